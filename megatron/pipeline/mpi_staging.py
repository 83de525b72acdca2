"""Where MPI reads and writes: the tensors themselves, or host memory that copies them.

              outgoing: MPI may read once `ready`    incoming: written; `landed`, then `take`
host memory   the tensor, at once                    the tensor, at once
CUDA-aware    the tensor, when it is computed        the tensor, when its memory is free
pinned        its copy, when that is made            a copy in host memory; then back on the device

MPI knows nothing of CUDA streams: what it may touch is told by events, which are asked and never
waited for. The streams are behind `Streams`, so that all but them is tried out without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the stream got there."""
        ...


class Streams(Protocol):
    """A device's queues: the one that computes, and one at its side for copies."""

    def mark(self) -> Event:
        """What the computing stream was given until now."""
        ...

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """A copy in pinned memory, made at the side once the tensor is computed."""
        ...

    def to_device(self, pinned: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """A copy on the device, made at the side at once, whichever thread asks."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device reads and writes by itself."""
        ...

    def use(self, tensor: torch.Tensor, copied: Event) -> None:
        """Let the computing stream wait for a copy and have it from then on."""
        ...


def _nothing() -> None:
    pass


@dataclass(kw_only=True)
class Parcel:
    """One message's memory. `buffer`: contiguous, for MPI, which may touch it once `ready`.
    `landed` must be called when MPI has written to it, by any thread."""

    buffer: torch.Tensor
    ready: Callable[[], bool] = lambda: True
    landed: Callable[[], None] = _nothing
    fetch: Callable[[], torch.Tensor] | None = None

    def take(self) -> torch.Tensor:
        """The tensor that landed, for the computing stream."""
        return self.buffer if self.fetch is None else self.fetch()


class Staging(Protocol):
    """Makes the parcels of a transport's messages."""

    def outgoing(self, tensor: torch.Tensor) -> Parcel:
        """For a contiguous tensor that is about to be sent."""
        ...

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parcel:
        """For one that is to be received."""
        ...


class HostStaging:
    """Tensors in host memory."""

    def outgoing(self, tensor: torch.Tensor) -> Parcel:
        return Parcel(buffer=tensor)

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parcel:
        return Parcel(buffer=torch.empty(shape, dtype=dtype))


class DirectStaging:
    """Tensors on a device whose memory MPI reads and writes itself."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams, self._device = streams, device

    def outgoing(self, tensor: torch.Tensor) -> Parcel:
        return Parcel(buffer=tensor, ready=self._streams.mark().query)

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parcel:
        # The allocator hands out memory that kernels in the queue still use: they come first in the
        # stream, but MPI is not in the stream.
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return Parcel(buffer=tensor, ready=self._streams.mark().query)


class PinnedStaging:
    """Tensors on a device that MPI does not know of."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def outgoing(self, tensor: torch.Tensor) -> Parcel:
        pinned, copied = self._streams.to_host(tensor)
        return Parcel(buffer=pinned, ready=copied.query)

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parcel:
        pinned = self._streams.pinned(shape, dtype)
        arrived: list[tuple[torch.Tensor, Event]] = []

        def landed() -> None:
            arrived.append(self._streams.to_device(pinned))

        def fetch() -> torch.Tensor:
            ((tensor, copied),) = arrived
            self._streams.use(tensor, copied)
            return tensor

        return Parcel(buffer=pinned, landed=landed, fetch=fetch)


class CudaStreams:
    """The current stream of a CUDA device, and one at its side for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        pinned = self.pinned(tuple(tensor.shape), tensor.dtype)
        self._down.wait_event(self.mark())
        with torch.cuda.stream(self._down):
            pinned.copy_(tensor, non_blocking=True)
        # Its memory may not go to another tensor before the copy is made.
        tensor.record_stream(self._down)
        event = torch.cuda.Event()
        event.record(self._down)
        return pinned, event

    def to_device(self, pinned: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        # Allocated at the side too, so that the copy waits for nothing that is being computed.
        with torch.cuda.stream(self._up):
            tensor = pinned.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._up)
        return tensor, event

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # From a cache, which does not give a block out again before copies from it are made.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def use(self, tensor: torch.Tensor, copied: Event) -> None:
        assert isinstance(copied, torch.cuda.Event)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        tensor.record_stream(stream)


def staging_for(device: torch.device, *, mpi_has_cuda: bool) -> Staging:
    """How messages of tensors on `device` reach MPI."""
    if device.type != "cuda":
        return HostStaging()
    streams = CudaStreams(device)
    return DirectStaging(streams, device) if mpi_has_cuda else PinnedStaging(streams)
