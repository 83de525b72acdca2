"""Process-group handles, built once from `ParallelDims` and passed to whoever needs one.

A group of one is a no-op: nothing is sent, nothing is waited for, and no backend is needed, so a
run alone on one rank never initialises torch.distributed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.errors import ERRORS_BY_CODE, SparsetronError
from megatron.parallel.dims import ParallelDims

T = TypeVar("T")
# torch 2.13 gave them new names and warns of these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Calls:
    """The collectives that this rank issued over one set of connections, which `name` tells from
    others alike on all its ranks. gloo pairs the n-th of one rank with the n-th of another,
    whatever they are; `tell`, if set, hears each one's number, what it is and the name, so that
    ranks which issued different ones can be told."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.count = 0
        self.tell: Callable[[int, str, str], None] | None = None

    def note(self, what: str, tensor: torch.Tensor) -> None:
        """The next one is about to be issued."""
        self.count += 1
        if self.tell is not None:
            text = f"{what} of {tensor.numel()} {_last_part(tensor.dtype)}"
            self.tell(self.count, text, self.name)


class Traffic:
    """Bytes that this rank sent along one axis of the grid, collectives by the ring model."""

    def __init__(self) -> None:
        self._sent = 0

    def add(self, sent: int) -> None:
        """Count bytes that are about to be sent."""
        self._sent += sent

    def take(self) -> int:
        """Bytes since the last call."""
        sent, self._sent = self._sent, 0
        return sent


@dataclass(frozen=True)
class Group:
    """The ranks of one collective and this rank's place among them.

    `handle` is None for a group of one. Groups that share connections share `calls`; what is sent
    adds to `traffic`. `timeout`: of its collectives (None = torch's own).
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
        """Reduce in place over the group; None where there is nothing to wait for. `about`: what
        tells it from others of its kind, should ranks get out of step."""
        if self.handle is None:
            return None
        self.calls.note(about or _last_part(op).lower(), tensor)
        self.traffic.add(2 * (self.size - 1) * tensor.nbytes // self.size)
        return dist.all_reduce(tensor, op=op, group=self.handle, async_op=async_op)

    def all_gather(
        self, out: torch.Tensor, mine: torch.Tensor, *, async_op: bool = False, about: str = ""
    ) -> dist.Work | None:
        """Every rank's `mine`, in group order, into `out`, which has as many times its rows; both
        contiguous, of one dtype. None where there is nothing to wait for."""
        if self.handle is None:
            out.view(-1).copy_(mine.view(-1))
            return None
        self.calls.note(about or "gather", mine)
        self.traffic.add((self.size - 1) * mine.nbytes)
        return _all_gather(out, mine, group=self.handle, async_op=async_op)

    def broadcast(
        self, tensor: torch.Tensor, source: int, *, async_op: bool = False, about: str = ""
    ) -> dist.Work | None:
        """The tensor of the group's rank `source`, in place on the others. None where there is
        nothing to wait for."""
        if self.handle is None:
            return None
        self.calls.note(about or "broadcast", tensor)
        # What a rank passes on depends on the way; this is the mean over the ranks.
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
        """This rank's rows of `whole` reduced over the group, into `out`; as `all_gather`."""
        if self.handle is None:
            out.view(-1).copy_(whole.view(-1))
            return None
        self.calls.note(about or "reduce-scatter", whole)
        self.traffic.add((self.size - 1) * whole.nbytes // self.size)
        return _reduce_scatter(out, whole, op=op, group=self.handle, async_op=async_op)

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0, about: str) -> dist.Work:
        """Begin to send a contiguous tensor to the rank at place `to`; it must stay as it is until
        the work is waited for. `tag` pairs it with a `receive` there; NCCL pairs by order."""
        assert self.handle is not None, "nobody to send to"
        self.calls.note(about, tensor)
        self.traffic.add(tensor.nbytes)
        work = dist.isend(tensor, self.ranks[to], group=self.handle, tag=tag)
        assert work is not None, "we are in the group"
        return work

    def receive(self, out: torch.Tensor, *, source: int, tag: int = 0, about: str) -> dist.Work:
        """Begin to receive what the rank at place `source` sends, of the size of `out`, into it;
        it is there once the work was waited for."""
        assert self.handle is not None, "nobody to receive from"
        self.calls.note(about, out)
        work = dist.irecv(out, self.ranks[source], group=self.handle, tag=tag)
        assert work is not None, "we are in the group"
        return work

    def new_gloo_group(self) -> Group:
        """The same ranks over connections of their own, for a thread that talks while others do.
        CPU tensors only. Every rank of the world calls this once, in step."""
        if self.handle is None:
            return self
        handle = dist.new_group(list(self.ranks), self.timeout, backend="gloo")
        assert isinstance(handle, dist.ProcessGroup), "we are in it, so it is one"
        return Group(self.ranks, self.rank, handle, self.timeout)

    def barrier(self) -> None:
        """Wait until every rank of the group is here (on CPU tensors, so that it blocks)."""
        self.all_reduce(torch.zeros(1), dist.ReduceOp.SUM)

    def all_gather_str(self, text: str) -> list[str]:
        """Every rank's text, in group order, on every rank. Bytes only: nothing is unpickled."""
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
        """Run `work` on every rank and fail together: if it raises a `SparsetronError` anywhere,
        every rank raises the first one, so that none is left waiting in a later collective."""
        result: T | None = None
        mine: SparsetronError | None = None
        problem: dict[str, Any] = {}
        try:
            result = work()
        except SparsetronError as error:
            mine = error
            problem = {"code": error.exit_code, "text": str(error)}
        for rank, reply in enumerate(map(json.loads, self.all_gather_str(json.dumps(problem)))):
            if reply:
                error = ERRORS_BY_CODE.get(reply["code"], SparsetronError)(reply["text"])
                if mine is not None and rank == self.rank:
                    error = mine
                error.shared = True
                raise error
        return result  # type: ignore[return-value]  # work returned, or we raised


ALONE = Group((0,), 0)
"""A group of one rank, wherever that stands."""


@dataclass(frozen=True, kw_only=True)
class Edges:
    """A stage's one-way connections, each a group of (sender, receiver): of activations from the
    stage before and to the one after, of gradients the other way. The last stage comes before the
    first, for chunks of layers that go round more than once.

    NCCL carries out what is issued over one communicator in order, and a send waits there for its
    receiver: were two directions to share one, a send could hold back a receive on which its own
    receiver depends. So with NCCL each edge is a communicator of its own. gloo pairs by tag.
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
    """This rank's groups: along each axis of the grid, the ends of its pipeline that share a tied
    embedding, and everybody. `edges`: to the neighbours in the pipeline, None without one."""

    dims: ParallelDims
    tp: Group
    dp: Group
    pp: Group
    embedding: Group
    world: Group
    edges: Edges | None = None

    def listen(self, tell: Callable[[int, str, str], None]) -> None:
        """Have `tell` hear of every collective and transfer that this rank issues from now on: its
        number among those of its connections, what it is, and the connections' name."""
        for group in (self.tp, self.dp, self.pp, self.embedding, self.world, *(self.edges or ())):
            group.calls.tell = tell

    def connect(self, device: torch.device) -> None:
        """Make the NCCL communicators of all groups now, by one small all-reduce over each.

        NCCL makes a communicator at its first use, for which all members wait for each other and
        memory is allocated: in the middle of a step a receive that runs on one member's device
        could hold up both. With NCCL_RUNTIME_CONNECT=0, which ranks of a pipeline set, a
        communicator has the connections of every algorithm from its start. The groups of an axis
        are disjoint and every rank takes the axes in one order, so that no two ranks wait for each
        other in different groups. The transport connects the edges. Does nothing where tensors of
        `device` do not travel by NCCL. Collective over the world.
        """
        if self.world.handle is None or _backend_of(device) != "nccl":
            return
        for group in (self.world, self.tp, self.dp, self.pp, self.embedding):
            group.all_reduce(torch.zeros(1, device=device), dist.ReduceOp.SUM, about="connect")

    def sum_over_model(self, value: torch.Tensor) -> torch.Tensor:
        """Add up in place, over the tensor- and pipeline-parallel ranks of one copy of the model,
        what each counts of its own part."""
        for group in (self.tp, self.pp):
            group.all_reduce(value, dist.ReduceOp.SUM)
        return value

    @classmethod
    def build(
        cls, dims: ParallelDims, *, rank: int, timeout: timedelta | None = None
    ) -> ProcessGroups:
        """Create the groups; every rank of the world calls this once, in step. `timeout`: of their
        collectives (None = torch's own; that of the whole world's was given with the world)."""
        world = tuple(range(dims.world_size))
        pipelines = dims.lines("pp")
        ends = [tuple(dict.fromkeys((line[0], line[-1]))) for line in pipelines]
        everybody = Calls("world")
        pp = _join("pp", pipelines, rank, everybody, timeout)
        return cls(
            dims=dims,
            tp=_join("tp", dims.lines("tp"), rank, everybody, timeout),
            dp=_join("dp", dims.lines("dp"), rank, everybody, timeout),
            pp=pp,
            # Its sums go from stage to stage: they count with what else does.
            embedding=_join("embedding", ends, rank, everybody, timeout, pp.traffic),
            world=_join("world", [world], rank, everybody, timeout),
            edges=_edges(pipelines, rank, pp, timeout) if dims.pp > 1 else None,
        )


def _join(
    name: str,
    lines: list[tuple[int, ...]],
    rank: int,
    everybody: Calls,
    timeout: timedelta | None,
    traffic: Traffic | None = None,
) -> Group:
    """Make every group of a family, as torch.distributed demands, and return the one we are in.
    `everybody`: calls over the connections that all groups of the whole world share.

    A rank that is not in a group only counts it, and waits for nobody: torch names groups by that
    count. `use_local_synchronization` would spare the counting, but names a group by the number of
    groups that a rank is in, which differs here: the ends of a pipeline are in one more than its
    middle.
    """
    mine = Group((rank,), 0)
    traffic = traffic or Traffic()
    for ranks in lines:
        if len(ranks) == 1:
            continue
        whole = len(ranks) == dist.get_world_size()
        handle = dist.group.WORLD if whole else dist.new_group(list(ranks), timeout)
        if rank in ranks:
            assert isinstance(handle, dist.ProcessGroup), "we are in it, so it is one"
            calls = everybody if whole else Calls(f"{name} of {ranks[0]}")
            mine = Group(ranks, ranks.index(rank), handle, timeout, calls, traffic)
    return mine


def _edges(
    pipelines: list[tuple[int, ...]], rank: int, pp: Group, timeout: timedelta | None
) -> Edges:
    """This stage's edges. With NCCL every rank of the world counts the communicators of all stages
    and waits for the other ends of its own alone, see `_join`."""
    # "cpu:gloo,cuda:nccl": a backend for each device.
    apart = "nccl" in dist.get_backend()
    found: dict[str, Group] = {}
    for line in pipelines:
        for kind, step in (("activations", 1), ("gradients", -1)):
            for place, sender in enumerate(line):
                receiver = line[(place + step) % len(line)]
                handle = dist.new_group([sender, receiver], timeout) if apart else pp.handle
                if rank in (sender, receiver):
                    assert isinstance(handle, dist.ProcessGroup), "we are in it, so it is one"
                    way = "out" if rank == sender else "in"
                    calls = Calls(f"{kind} {sender}>{receiver}")
                    found[f"{kind}_{way}"] = Group(
                        (sender, receiver), int(way == "in"), handle, timeout, calls, pp.traffic
                    )
    return Edges(**found)


def _backend_of(device: torch.device) -> str:
    """The backend that carries tensors of a device: torch names one for all devices ("gloo"), or
    one for each ("cpu:gloo,cuda:nccl")."""
    name = dist.get_backend()
    if ":" not in name:
        return name
    return dict(part.split(":") for part in name.split(",")).get(device.type, "")


def _last_part(name: object) -> str:
    return str(name).rpartition(".")[2]
