"""Process groups, which are built once from `ParallelDims`.

A group of one rank sends nothing, waits for nothing and needs no backend, so a run on a single rank
never initialises torch.distributed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.errors import ERRORS_BY_CODE, SparsetronError
from megatron.parallel.dims import ParallelDims
from megatron.parallel.traffic import Calls, Messages, Traffic, Waitable, last_part

T = TypeVar("T")
EXCHANGE_TAG = (1 << 31) - 1
"""Tag of the messages between all ranks of a group: the largest, which no pipeline reaches."""
ASKING_SECONDS = 1.0
"""Seconds between two questions whether all ranks have finished; below every timeout."""
# torch 2.13 renamed these functions and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Group:
    """The ranks of a process group and this rank's index among them.

    `handle` is None for a group of one rank. Groups that share connections share `calls`. Sent
    bytes are added to `traffic`. `timeout` is the time limit with which `new_gloo_group` creates
    another group (None: torch's default).

    Collectives return the work handle of `async_op`, or None if there is nothing to wait for. Their
    `about` names the collective in reports of desynchronised ranks.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = None
    timeout: timedelta | None = None
    calls: Calls = field(default_factory=Calls, compare=False, repr=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType,
        *,
        async_op: bool = False,
        about: str = "",
    ) -> dist.Work | None:
        """Reduce a tensor in place over the group; one rank keeps its tensor."""
        if self.handle is None:
            return None
        self.calls.note(about or last_part(op).lower(), tensor)
        self.traffic.add(2 * (self.size - 1) * tensor.nbytes // self.size)
        return dist.all_reduce(tensor, op=op, group=self.handle, async_op=async_op)

    def all_gather(
        self, out: torch.Tensor, mine: torch.Tensor, *, async_op: bool = False, about: str = ""
    ) -> Waitable | None:
        """Gather `mine` of every rank into `out`, in group order.

        Both are contiguous and of one dtype; `out` has `size` times as many rows as `mine`, which
        may be this rank's own rows of `out`.
        """
        if self.handle is None:
            out.view(-1).copy_(mine.view(-1))
            return None
        self.calls.note(about or "gather", mine)
        self.traffic.add((self.size - 1) * mine.nbytes)
        if out.is_cuda or mine.is_cuda:
            return _all_gather(out, mine, group=self.handle, async_op=async_op)
        rows = out.view(-1).chunk(self.size)
        rows[self.rank].copy_(mine.view(-1))
        return self._exchange([mine.view(-1)] * self.size, rows, async_op=async_op)

    def broadcast(
        self, tensor: torch.Tensor, source: int, *, async_op: bool = False, about: str = ""
    ) -> dist.Work | None:
        """Broadcast in place the tensor of the rank at index `source` of the group."""
        if self.handle is None:
            return None
        self.calls.note(about or "broadcast", tensor)
        # The bytes that a rank forwards depend on the algorithm; this is the mean over the ranks.
        self.traffic.add((self.size - 1) * tensor.nbytes // self.size)
        return dist.broadcast(tensor, src=self.ranks[source], group=self.handle, async_op=async_op)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        whole: torch.Tensor,
        op: dist.ReduceOp.RedOpType,
        *,
        async_op: bool = False,
        about: str = "",
    ) -> dist.Work | None:
        """Reduce `whole` over the group into `out`, which gets this rank's rows of `whole`."""
        if self.handle is None:
            out.view(-1).copy_(whole.view(-1))
            return None
        self.calls.note(about or "reduce-scatter", whole)
        self.traffic.add((self.size - 1) * whole.nbytes // self.size)
        return _reduce_scatter(out, whole, op=op, group=self.handle, async_op=async_op)

    def all_to_all(
        self, out: torch.Tensor, mine: torch.Tensor, *, async_op: bool = False, about: str = ""
    ) -> Waitable | None:
        """Send row i of `mine` to the rank at index i, and receive its row for this rank.

        Both are contiguous and have `size` rows of equal length; row i of `out` is from rank i.
        """
        if self.handle is None:
            out.copy_(mine)
            return None
        self.calls.note(about or "all-to-all", mine)
        self.traffic.add((self.size - 1) * mine.nbytes // self.size)
        if out.is_cuda or mine.is_cuda:
            return dist.all_to_all_single(out, mine, group=self.handle, async_op=async_op)
        out[self.rank].copy_(mine[self.rank])
        return self._exchange(mine.unbind(), out.unbind(), async_op=async_op)

    def _exchange(
        self, mine: Sequence[torch.Tensor], received: Sequence[torch.Tensor], *, async_op: bool
    ) -> Waitable | None:
        """Send `mine[i]` to the rank at index i, and receive `received[i]` from it, over gloo.

        Messages between two ranks arrive in the order in which they were sent, so that several
        exchanges may be in progress.
        """
        # Broadcasts would leave links idle: gloo runs two collectives at a time, and a rank passes
        # a broadcast on when it has all of it (times: tools/bench/exchange/README.md).
        assert self.handle is not None, "nobody to send to"
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        ranks, handle = self.ranks, self.handle
        pending = [
            dist.irecv(received[i], ranks[i], group=handle, tag=EXCHANGE_TAG) for i in others[::-1]
        ]
        pending += [dist.isend(mine[i], ranks[i], group=handle, tag=EXCHANGE_TAG) for i in others]
        messages = Messages(pending)
        if async_op:
            return messages
        messages.wait()
        return None

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0, about: str) -> dist.Work:
        """Start to send a contiguous tensor to the rank at index `to`.

        The caller must not modify the tensor until the returned work is complete. gloo pairs the
        message with the `receive` of the same `tag`, NCCL with the next one in order.
        """
        assert self.handle is not None, "nobody to send to"
        self.calls.note(about, tensor)
        self.traffic.add(tensor.nbytes)
        work = dist.isend(tensor, self.ranks[to], group=self.handle, tag=tag)
        assert work is not None, "we are in the group"
        return work

    def receive(self, out: torch.Tensor, *, source: int, tag: int = 0, about: str) -> dist.Work:
        """Start to receive a tensor of the size of `out` into `out` from index `source`."""
        assert self.handle is not None, "nobody to receive from"
        self.calls.note(about, out)
        work = dist.irecv(out, self.ranks[source], group=self.handle, tag=tag)
        assert work is not None, "we are in the group"
        return work

    def new_gloo_group(self) -> Group:
        """Return a group of the same ranks with its own connections, for use by another thread.

        The group takes CPU tensors only. Collective over the world. A group of one rank returns
        itself.
        """
        if self.handle is None:
            return self
        handle = dist.new_group(list(self.ranks), self.timeout, backend="gloo")
        assert isinstance(handle, dist.ProcessGroup), "we are in it, so it is one"
        return Group(self.ranks, self.rank, handle, self.timeout)

    def barrier(self) -> None:
        """Wait until every rank of the group arrives; the tensor is on the CPU: the host waits."""
        self.all_reduce(torch.zeros(1), dist.ReduceOp.SUM)

    def all_gather_str(self, text: str) -> list[str]:
        """Gather the text of every rank on every rank, in group order, without pickle."""
        if self.handle is None:
            return [text]
        payload = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        size = torch.tensor([len(text.encode())])
        self.calls.note("gather", size)
        dist.all_gather(sizes, size, group=self.handle)
        longest = max(1, max(int(size) for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload[:longest]
        received = [torch.empty_like(padded) for _ in self.ranks]
        self.calls.note("gather", padded)
        dist.all_gather(received, padded, group=self.handle)
        return [
            bytes(chunk[: int(size)].tolist()).decode()
            for chunk, size in zip(received, sizes, strict=True)
        ]

    def raise_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it raises a `SparsetronError` on any rank, raise on all.

        Every rank raises the error of the failed rank with the lowest index, so that no rank waits
        in a later collective. Other exceptions are raised on their own rank only. Collective over
        the group.
        """
        result: T | None = None
        mine: SparsetronError | None = None
        problem: dict[str, Any] = {}
        try:
            result = work()
        except SparsetronError as error:
            mine = error
            problem = {"code": error.exit_code, "text": str(error)}
        # Errors are gathered only if there is one: the text of each rank on every rank is long.
        failed = torch.tensor([float(mine is not None)])
        self.all_reduce(failed, dist.ReduceOp.MAX)
        if not failed.item():
            return result  # type: ignore[return-value]  # work returned
        for rank, reply in enumerate(map(json.loads, self.all_gather_str(json.dumps(problem)))):
            if reply:
                error = ERRORS_BY_CODE.get(reply["code"], SparsetronError)(reply["text"])
                if mine is not None and rank == self.rank:
                    error = mine
                error.shared = True
                raise error
        raise AssertionError("a rank that failed tells its error")


ALONE = Group((0,), 0)
"""A group of one rank, usable on any rank."""


@dataclass(frozen=True, kw_only=True)
class Edges:
    """A stage's one-way connections, each a group of (sender, receiver).

    Activations come from the previous stage and go to the next, gradients the other way. The
    pipeline is a ring (the last stage precedes the first), for interleaved model chunks.

    NCCL executes the operations of a communicator in order, and a send waits for its receiver: with
    a shared communicator, a send could block a receive on which its own receiver depends. So with
    NCCL each edge has its own communicator. gloo pairs messages by tag.
    """

    activations_in: Group
    activations_out: Group
    gradients_in: Group
    gradients_out: Group

    def __iter__(self) -> Iterator[Group]:
        yield from (
            self.activations_in,
            self.activations_out,
            self.gradients_in,
            self.gradients_out,
        )


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """The process groups of this rank.

    `tp`, `dp` and `pp` are the groups along the axes. `embedding` has the first and the last stage
    of the rank's pipeline, which share a tied embedding; a rank between them is alone in it.
    `edges` connect neighbours in the pipeline (None: a single stage). `inner` and `outer` divide
    `dp` if the grid has `ParallelDims.dp_inner`.
    """

    dims: ParallelDims
    tp: Group
    dp: Group
    pp: Group
    embedding: Group
    world: Group
    edges: Edges | None = None
    inner: Group | None = None
    outer: Group | None = None

    @property
    def shards(self) -> Group:
        """The ranks over which optimizer states are sharded, if they are sharded."""
        return self.inner or self.dp

    @property
    def shard_copies(self) -> Group:
        """The data-parallel ranks with this rank's shard of sharded optimizer states."""
        return self.outer or ALONE

    @property
    def copies(self) -> Group:
        """The data-parallel ranks of which each has a gradient of its own to reduce.

        They are all data-parallel ranks, or one of each node, which reduces a shard of the gradient
        of the node.
        """
        return self.outer or self.dp

    @property
    def _all(self) -> Iterator[Group]:
        yield from (self.world, self.tp, self.dp, self.pp, self.embedding)
        yield from (each for each in (self.inner, self.outer) if each is not None)

    def listen(self, tell: Callable[[int, str, str], None]) -> None:
        """Set `Calls.tell` of every group and edge, to observe all communication of this rank."""
        for group in (*self._all, *(self.edges or ())):
            group.calls.tell = tell

    def connect(self, device: torch.device) -> None:
        """Create the NCCL communicators of all groups by one small all-reduce over each.

        Does nothing if tensors of `device` do not use NCCL. The transport connects the edges.
        Collective over the world.
        """
        if self.world.handle is None or _backend_of(device) != "nccl":
            return
        # NCCL creates a communicator at its first use, for which all members wait and memory is
        # allocated. Within a step, a running receive could block both. With NCCL_RUNTIME_CONNECT=0,
        # which pipeline ranks set, the connections of every algorithm exist from then on. Groups of
        # an axis are disjoint and all ranks use one order of axes, so there is no deadlock.
        for group in self._all:
            group.all_reduce(torch.zeros(1, device=device), dist.ReduceOp.SUM, about="connect")

    @cached_property
    def second_dp(self) -> Group:
        """The data-parallel ranks with connections of their own, for use by another thread.

        First access is collective over the world.
        """
        lines, rank = self.dims.lines("dp"), self.world.rank
        found = _join("second dp", lines, rank, None, self.dp.timeout, self.dp.traffic)
        found.calls.tell = self.dp.calls.tell
        # Observers learn of the group here, before another thread uses it.
        found.all_reduce(torch.zeros(1), dist.ReduceOp.SUM, about="connect")
        return found

    def max_over_world(self, value: torch.Tensor, *, about: str = "") -> torch.Tensor:
        """Maximise `value` in place over all ranks, axis by axis. Collective over the world.

        gloo passes a message from each rank to the next: 2 (tp + pp + dp) of them in a row are
        fewer than 2 tp pp dp.
        """
        for group in (self.dp, self.tp, self.pp):
            group.all_reduce(value, dist.ReduceOp.MAX, about=about)
        return value

    def run_beyond_timeout(self, work: Callable[[], T]) -> T:
        """Run `work` on each rank, and return its result once all ranks have finished.

        `work` may take longer than the timeout of a collective, as indexing a large corpus does: it
        runs in a thread, and the ranks ask each other every `ASKING_SECONDS` whether all have
        finished. Raises what `work` raises on this rank. Collective over the world.
        """
        mine: Future[T] = Future()

        def call() -> None:
            try:
                mine.set_result(work())
            except BaseException as error:
                mine.set_exception(error)

        # Not a pool, which would wait for its thread even after the loss of a rank.
        threading.Thread(target=call, name="beyond-timeout", daemon=True).start()
        is_busy = True
        while is_busy:
            wait([mine], timeout=ASKING_SECONDS)
            busy = torch.tensor(int(not mine.done()))
            is_busy = bool(self.max_over_world(busy, about="finish").item())
        return mine.result()

    def sum_over_model(self, value: torch.Tensor) -> torch.Tensor:
        """Sum `value` in place over the tensor- and pipeline-parallel ranks of one model copy.

        Collective over these ranks.
        """
        for group in (self.tp, self.pp):
            group.all_reduce(value, dist.ReduceOp.SUM)
        return value

    @classmethod
    def build(
        cls, dims: ParallelDims, *, rank: int, timeout: timedelta | None = None
    ) -> ProcessGroups:
        """Create the groups. Collective over the world.

        `timeout` applies to collectives of groups that do not span the world (None: torch's
        default); others use the world's process group with its own timeout.
        """
        world = tuple(range(dims.world_size))
        pipelines = dims.lines("pp")
        ends = [tuple(dict.fromkeys((line[0], line[-1]))) for line in pipelines]
        everybody = Calls("world")
        pp = _join("pp", pipelines, rank, everybody, timeout)
        dp = _join("dp", dims.lines("dp"), rank, everybody, timeout)
        inner = outer = None
        if dims.dp_inner > 1:
            # Another thread uses the outer connections.
            inner = _join("dp inner", dims.inner_lines(), rank, None, timeout, dp.traffic)
            outer = _join("dp outer", dims.outer_lines(), rank, None, timeout, dp.traffic)
        return cls(
            dims=dims,
            tp=_join("tp", dims.lines("tp"), rank, everybody, timeout),
            dp=dp,
            pp=pp,
            inner=inner,
            outer=outer,
            # Its sums travel between stages, so they count as pipeline traffic.
            embedding=_join("embedding", ends, rank, everybody, timeout, pp.traffic),
            world=_join("world", [world], rank, everybody, timeout),
            edges=_edges(pipelines, rank, pp, timeout) if dims.pp > 1 else None,
        )


def _join(
    name: str,
    lines: list[tuple[int, ...]],
    rank: int,
    everybody: Calls | None,
    timeout: timedelta | None,
    traffic: Traffic | None = None,
) -> Group:
    """Create all groups of a family on every rank, as torch demands, and return this rank's.

    A group of all ranks is torch's own, whose collectives `everybody` counts; None creates another.
    """
    # A rank outside a group only counts it, without waiting: torch names groups by that count.
    # `use_local_synchronization` names a group by the number of groups that a rank is in, which
    # differs here: the ends of a pipeline are in one more group than its middle.
    mine = Group((rank,), 0)
    traffic = traffic or Traffic()
    for ranks in lines:
        if len(ranks) == 1:
            continue
        whole = everybody is not None and len(ranks) == dist.get_world_size()
        about = f"{name} of {ranks[0]}"
        handle = (
            dist.group.WORLD if whole else dist.new_group(list(ranks), timeout, group_desc=about)
        )
        if rank in ranks:
            assert isinstance(handle, dist.ProcessGroup), "we are in it, so it is one"
            calls = everybody if everybody and whole else Calls(about)
            mine = Group(ranks, ranks.index(rank), handle, timeout, calls, traffic)
    return mine


def _edges(
    pipelines: list[tuple[int, ...]], rank: int, pp: Group, timeout: timedelta | None
) -> Edges:
    """Return this stage's edges; with NCCL every rank counts all communicators (see `_join`)."""
    # The backend may be "cpu:gloo,cuda:nccl".
    apart = "nccl" in dist.get_backend()
    found: dict[str, Group] = {}
    for line in pipelines:
        for kind, step in (("activations", 1), ("gradients", -1)):
            for place, sender in enumerate(line):
                receiver = line[(place + step) % len(line)]
                about = f"{kind} {sender}>{receiver}"
                handle = pp.handle
                if apart:
                    handle = dist.new_group([sender, receiver], timeout, group_desc=about)
                if rank in (sender, receiver):
                    assert isinstance(handle, dist.ProcessGroup), "we are in it, so it is one"
                    way = "out" if rank == sender else "in"
                    found[f"{kind}_{way}"] = Group(
                        (sender, receiver), int(way == "in"), handle, timeout, Calls(about),
                        pp.traffic,
                    )  # fmt: skip
    return Edges(**found)


def _backend_of(device: torch.device) -> str:
    """Return the backend for tensors of a device, from "gloo" or "cpu:gloo,cuda:nccl"."""
    name = dist.get_backend()
    if ":" not in name:
        return name
    return dict(part.split(":") for part in name.split(",")).get(device.type, "")
