"""The time that a rank waits for its collectives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self

import torch


class TimingEvent(Protocol):
    """The part of `torch.cuda.Event` that times a stream."""

    def record(self) -> None:
        """Mark the present end of the current stream."""
        ...

    def query(self) -> bool:
        """Whether the stream has reached the mark."""
        ...

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds from this mark to the other one; both must have been reached."""
        ...


def _cuda_event() -> TimingEvent:
    return torch.cuda.Event(enable_timing=True)


class Waits:
    """Adds up the seconds in which nothing else goes on because a collective is not done.

    gloo blocks the host, so that a clock tells. NCCL blocks the current stream alone: an event on
    either side of the wait tells how long the stream stood still, and is read once the stream is
    past it, so that the host never waits for it.
    """

    def __init__(self, new_event: Callable[[], TimingEvent] = _cuda_event) -> None:
        self._new_event = new_event
        self._seconds = 0.0
        self._unread: deque[tuple[TimingEvent, TimingEvent]] = deque()

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Count the time of the wait inside, which is for a tensor of `device`."""
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        before, after = self._new_event(), self._new_event()
        before.record()
        yield
        after.record()
        self._unread.append((before, after))

    def take(self) -> float:
        """Return the seconds found since the last call. A wait that the stream is not past yet is
        left for a later call."""
        while self._unread and self._unread[0][1].query():
            before, after = self._unread.popleft()
            self._seconds += before.elapsed_time(after) / 1000
        seconds, self._seconds = self._seconds, 0.0
        return seconds
