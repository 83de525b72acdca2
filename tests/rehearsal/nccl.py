"""NCCL played by gloo, for tensors of the device. Install it before the program is imported.

The program asks torch for "cpu:gloo,cuda:nccl". Collectives of CUDA tensors run over gloo on the
same memory, and everything in which NCCL differs is added:

    order       each communicator has a stream, for sends, receives and collectives with `async_op`.
                They wait for the current stream, and `wait` lets the current stream wait for them,
                while the host goes on. A missing `wait`, or a buffer that is written too early, is
                therefore a race. Other collectives run on the current stream
    messages    sends and receives of two ranks pair by their order: tags are not sent. A send does
                not hold up the host, whether its receiver is there or not; a receive holds up the
                device, so that nothing may be issued before it is waited for
    arguments   as torch does, refuses tensors on the CPU or not contiguous, and dtypes and groups
                that NCCL does not have
    calls       `Nccl.calls` is the log of this rank, for `nccl_log`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from tests.rehearsal.device import PlayedDevice
from tests.rehearsal.device import install as install_device
from tests.rehearsal.nccl_log import Call
from tests.rehearsal.streams import PlayedEvent, PlayedStream

BACKENDS = "cpu:gloo,cuda:nccl"
DTYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}

Tensors = Sequence[torch.Tensor]
Start = Callable[[Tensors], Any]
"""A function that starts an operation over gloo on CPU tensors and returns its work."""


class Nccl:
    """The communicators of this rank."""

    def __init__(self, device: PlayedDevice) -> None:
        self.calls: list[Call] = []
        self.gloo_alone: set[str] = set()
        """Names of groups without NCCL."""
        self._device = device
        self._streams: dict[str, PlayedStream] = {}
        self._sent: list[tuple[Any, Tensors]] = []

    def take(self) -> list[Call]:
        """Return the calls since the last `take`, once every sent message is received."""
        while self._sent:
            self._sent.pop()[0].wait()
        calls, self.calls = self.calls, []
        return calls

    def issue(
        self,
        kind: str,
        group: Any,
        tensors: Tensors,
        written: Tensors,
        start: Start,
        *,
        async_op: bool,
        how: str = "",
        peer: int | None = None,
    ) -> PlayedWork | None:
        """Check, log and order one operation, and run it on the tensors' memory.

        Returns the work to wait for with `async_op`.
        """
        group = group or dist.group.WORLD
        self._check(kind, group, tensors)
        ranks = tuple(dist.get_process_group_ranks(group))
        name = f"group {group.group_name} of ranks {list(ranks)}"
        if peer is not None:  # torch makes a communicator for each pair of ranks
            name += ", between {} and {}".format(*sorted([dist.get_rank(), peer]))
        numel = sum(tensor.numel() for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        self.calls.append(Call(name, ranks, kind, how, numel, dtype, peer))
        memory = [self._device.memory.on_host(tensor) for tensor in tensors]
        ids = {id(tensor) for tensor in written}
        if not async_op:
            self._device.operations.issue(tensors, ids)
            start(memory).wait()
            return None
        with self._stream(name) as stream:
            self._device.operations.issue(tensors, ids)
        done = stream.record_event()
        if kind == "send":
            memory = [tensor.clone() for tensor in memory]
            self._sent.append((start(memory), memory))
            return PlayedWork(self._device, None, done, tensors)
        return PlayedWork(self._device, start(memory), done, tensors, holds_up=kind == "receive")

    def _stream(self, name: str) -> PlayedStream:
        """Return the communicator's stream, after it waits for the current stream."""
        timeline = self._device.timeline
        if name not in self._streams:
            self._streams[name] = PlayedStream(timeline, f"NCCL's stream of {name}")
        self._streams[name].wait_stream(timeline.current)
        return self._streams[name]

    def _check(self, kind: str, group: Any, tensors: Tensors) -> None:
        if group.group_name in self.gloo_alone:
            self._refuse(f"{kind} over a group that is gloo's alone")
        for tensor in tensors:
            if not tensor.is_cuda:
                self._refuse(f"{kind} of a tensor on the CPU beside one on the device")
            if tensor.device.index != torch.cuda.current_device():
                self._refuse(f"{kind} on {tensor.device}, which is not the current device")
            if tensor.dtype not in DTYPES:
                self._refuse(f"{kind} of {tensor.dtype}, which NCCL does not have")
            if not tensor.is_contiguous():
                self._refuse(f"{kind} of a tensor that is not contiguous")

    def _refuse(self, what: str) -> None:
        self._device.findings.note("device", what)
        raise ValueError(what)


class PlayedWork:
    """The handle of an operation, which keeps the tensors alive.

    `real` is gloo's work. With `holds_up`, the device does nothing else before the operation is
    done.
    """

    def __init__(
        self,
        device: PlayedDevice,
        real: Any,
        done: PlayedEvent,
        tensors: Tensors,
        *,
        holds_up: bool = False,
    ) -> None:
        self._device, self._real, self._done, self._tensors = device, real, done, tensors
        self._issued = self._count() if holds_up else None
        self._waited = False

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait."""
        if self._issued not in (None, self._count()):
            count = self._count() - self._issued
            what = f"{count} operations were issued after the receive that is waited for here"
            self._device.findings.note("receive ahead", what)
        self.arrive()
        self._done.wait()
        self._waited = True
        return True

    def arrive(self) -> None:
        """Wait until gloo has written the numbers; with NCCL the host would go on."""
        if self._real is not None:
            self._real.wait()

    def is_completed(self) -> bool:
        # Peers may be late: a program must not rely on completion.
        return self._waited

    def _count(self) -> int:
        stream = self._device.timeline.current
        return stream.clock.get(stream.number, 0)


@cache
def install() -> Nccl:
    """Play NCCL beside the device in this process, until it ends."""
    assert "megatron.parallel.groups" not in sys.modules, "it keeps some of torch's functions"
    nccl = Nccl(install_device())
    for name, kind in (
        ("all_gather_into_tensor", "all-gather"),
        ("all_gather_single", "all-gather"),
        ("reduce_scatter_tensor", "reduce-scatter"),
        ("reduce_scatter_single", "reduce-scatter"),
    ):
        if (real := getattr(dist, name, None)) is not None:
            setattr(dist, name, _between(nccl, kind, real))
    dist.all_reduce = _all_reduce(nccl, dist.all_reduce)
    dist.broadcast = _broadcast(nccl, dist.broadcast)
    dist.all_gather = _all_gather(nccl, dist.all_gather)
    dist.isend = _message(nccl, "send", dist.isend)
    dist.irecv = _message(nccl, "receive", dist.irecv)
    _make_groups_of_gloo(nccl)
    return nccl


def _name(op: Any) -> str:
    return str(op).rpartition(".")[2].lower()


def _all_reduce(nccl: Nccl, real: Any) -> Any:
    def call(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: Any = False):
        def start(memory: Tensors) -> Any:
            return real(memory[0], op=op, group=group, async_op=True)

        if not tensor.is_cuda:
            return real(tensor, op=op, group=group, async_op=async_op)
        how = _name(op)
        return nccl.issue(
            "all-reduce", group, [tensor], [tensor], start, async_op=async_op, how=how
        )

    return call


def _broadcast(nccl: Nccl, real: Any) -> Any:
    def call(tensor: Any, src: Any = None, group: Any = None, async_op: Any = False):
        def start(memory: Tensors) -> Any:
            return real(memory[0], src=src, group=group, async_op=True)

        if not tensor.is_cuda:
            return real(tensor, src=src, group=group, async_op=async_op)
        how = f"from rank {src}"
        return nccl.issue("broadcast", group, [tensor], [tensor], start, async_op=async_op, how=how)

    return call


def _between(nccl: Nccl, kind: str, real: Any) -> Any:
    """Return a replacement of a collective from one tensor to another, which may overlap."""

    def call(out: Any, mine: Any, *, group: Any = None, async_op: Any = False, **how: Any):
        def start(memory: Tensors) -> Any:
            # gloo would read from the overlap what it has written there.
            return real(memory[0], memory[1].clone(), group=group, async_op=True, **how)

        if not out.is_cuda and not mine.is_cuda:
            return real(out, mine, group=group, async_op=async_op, **how)
        what = _name(how["op"]) if "op" in how else ""
        return nccl.issue(kind, group, [out, mine], [out], start, async_op=async_op, how=what)

    return call


def _all_gather(nccl: Nccl, real: Any) -> Any:
    def call(parts: list[Any], mine: Any, group: Any = None, async_op: Any = False):
        def start(memory: Tensors) -> Any:
            return real(list(memory[:-1]), memory[-1], group=group, async_op=True)

        if not mine.is_cuda:
            return real(parts, mine, group=group, async_op=async_op)
        tensors = [*parts, mine]
        return nccl.issue("all-gather", group, tensors, parts, start, async_op=async_op)

    return call


def _message(nccl: Nccl, kind: str, real: Any) -> Any:
    def call(tensor: Any, peer: int, group: Any = None, tag: int = 0):
        if not tensor.is_cuda:
            return real(tensor, peer, group=group, tag=tag)
        written = [tensor] if kind == "receive" else []
        start = lambda memory: real(memory[0], peer, group=group)  # noqa: E731
        return nccl.issue(kind, group, [tensor], written, start, async_op=True, peer=peer)

    return call


def _make_groups_of_gloo(nccl: Nccl) -> None:
    """Make gloo groups that report both backends where the program asks for both."""
    real_init, real_group = dist.init_process_group, dist.new_group

    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        real_init("cpu:gloo", *args, **kwargs)

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, **more: Any
    ) -> Any:
        group = real_group(ranks, timeout, backend or "cpu:gloo", **more)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            nccl.gloo_alone.add(group.group_name)
        return group

    dist.init_process_group, dist.new_group = init, new_group
    dist.get_backend = lambda group=None: BACKENDS
