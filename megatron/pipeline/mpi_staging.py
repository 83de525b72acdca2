"""Staging buffers of pipeline messages: when MPI may access the memory of a tensor, and which.

    CPU tensor ---------------------------------> MPI
    device tensor --(an event of its stream)----> MPI with device support
    device tensor --copy--> pinned memory ------> any other MPI

MPI is not ordered by streams, so events tell when a tensor or a copy is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class StreamEvent(Protocol):
    """An event recorded in a stream."""

    def query(self) -> bool:
        """Return whether the stream has reached the event."""
        ...


class Streams(Protocol):
    """The compute stream of a device and its side streams for copies."""

    def mark(self) -> StreamEvent:
        """Record an event at the current end of the compute stream."""
        ...

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, StreamEvent]:
        """Copy to pinned memory on a side stream, and return the copy and the event of its end."""
        ...

    def to_device(self, pinned: torch.Tensor) -> tuple[torch.Tensor, StreamEvent]:
        """Copy to the device on a side stream, and return the copy and the event of its end.

        Returns at once; any thread may call it.
        """
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory that the device can access asynchronously."""
        ...

    def use(self, tensor: torch.Tensor, copied: StreamEvent) -> None:
        """Let the compute stream wait for a copy, and keep its memory until that stream is done."""
        ...


def _nothing() -> None:
    pass


@dataclass(kw_only=True)
class MessageBuffer:
    """The memory of one message; `buffer` is contiguous, and MPI may access it once `ready()`.

    `landed` is called, from any thread, when MPI has completed the transfer. `fetch` returns the
    received tensor if that is not `buffer`.
    """

    buffer: torch.Tensor
    ready: Callable[[], bool] = lambda: True
    landed: Callable[[], None] = _nothing
    fetch: Callable[[], torch.Tensor] | None = None

    def take(self) -> torch.Tensor:
        """Return the received tensor, for use on the compute stream."""
        return self.buffer if self.fetch is None else self.fetch()


class Staging(Protocol):
    """A factory of the buffers of a transport's messages."""

    def outgoing(self, tensor: torch.Tensor) -> MessageBuffer:
        """Return the buffer that sends a contiguous tensor."""
        ...

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> MessageBuffer:
        """Return the buffer for a tensor that will be received."""
        ...


class HostStaging:
    """Staging of CPU tensors, which MPI accesses directly."""

    def outgoing(self, tensor: torch.Tensor) -> MessageBuffer:
        return MessageBuffer(buffer=tensor)

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> MessageBuffer:
        return MessageBuffer(buffer=torch.empty(shape, dtype=dtype))


class DirectStaging:
    """Staging of device tensors that a CUDA-aware MPI accesses directly."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams, self._device = streams, device

    def outgoing(self, tensor: torch.Tensor) -> MessageBuffer:
        return MessageBuffer(buffer=tensor, ready=self._streams.mark().query)

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> MessageBuffer:
        # Queued kernels may still use the allocated memory; MPI is not ordered by the stream.
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return MessageBuffer(buffer=tensor, ready=self._streams.mark().query)


class PinnedStaging:
    """Staging of device tensors in pinned memory, for an MPI without device support."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def outgoing(self, tensor: torch.Tensor) -> MessageBuffer:
        pinned, copied = self._streams.to_host(tensor)
        return MessageBuffer(buffer=pinned, ready=copied.query)

    def incoming(self, shape: tuple[int, ...], dtype: torch.dtype) -> MessageBuffer:
        pinned = self._streams.pinned(shape, dtype)
        arrived: list[tuple[torch.Tensor, StreamEvent]] = []

        def landed() -> None:
            arrived.append(self._streams.to_device(pinned))

        def fetch() -> torch.Tensor:
            ((tensor, copied),) = arrived
            self._streams.use(tensor, copied)
            return tensor

        return MessageBuffer(buffer=pinned, landed=landed, fetch=fetch)


class CudaStreams:
    """The current stream of a CUDA device, and a side stream for each copy direction."""

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
        # Do not reuse the tensor's memory before the copy is complete.
        tensor.record_stream(self._down)
        event = torch.cuda.Event()
        event.record(self._down)
        return pinned, event

    def to_device(self, pinned: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        # Allocate on the side stream, too, so that the copy does not wait for computation.
        with torch.cuda.stream(self._up):
            tensor = pinned.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._up)
        return tensor, event

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # The caching host allocator does not reuse a block before copies from it are complete.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def use(self, tensor: torch.Tensor, copied: StreamEvent) -> None:
        assert isinstance(copied, torch.cuda.Event)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        tensor.record_stream(stream)


def staging_for(device: torch.device, *, mpi_has_cuda: bool) -> Staging:
    """Return the staging for tensors on `device`."""
    if device.type != "cuda":
        return HostStaging()
    streams = CudaStreams(device)
    return DirectStaging(streams, device) if mpi_has_cuda else PinnedStaging(streams)
