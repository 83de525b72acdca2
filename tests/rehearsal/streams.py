"""Streams and events that track by vector clocks which operations are ordered before which.

Each stream counts its operations. A stream's clock holds, for every stream s, the last operation of
s that precedes everything later on the stream. The host is one more stream: it learns a clock by
waiting, and all operations that it issues later inherit its clock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from tests.rehearsal.findings import Findings

Clock = dict[int, int]


class StreamTimeline:
    """All streams of a process.

    `settle` is called before a clock learns something: freed memory is judged by the clock at the
    time of the free.
    """

    def __init__(self, findings: Findings, settle: Callable[[], None]) -> None:
        self.findings, self.settle = findings, settle
        self.names: dict[int, str] = {}
        self.latest: Clock = {}
        self._numbers = itertools.count()
        self._thread = threading.local()
        self.host = PlayedStream(self, "the host")
        self.default = PlayedStream(self, "the default stream")

    def number(self, name: str) -> int:
        number = next(self._numbers)
        self.names[number] = name
        return number

    @property
    def current(self) -> PlayedStream:
        """The stream to which this thread issues operations."""
        return getattr(self._thread, "stream", self.default)

    @current.setter
    def current(self, stream: PlayedStream) -> None:
        self._thread.stream = stream

    def wait(self, what: str, clock: Clock) -> None:
        """Let the host wait until the device has done everything that `clock` covers."""
        self.findings.note("wait", what)
        self.host.learn(clock)


class PlayedStream:
    """A queue of the device, and a context manager like torch's streams."""

    def __init__(self, timeline: StreamTimeline, name: str) -> None:
        self.timeline, self.name = timeline, name
        self.number = timeline.number(name)
        self.clock: Clock = {}
        self._outer: list[PlayedStream] = []

    def advance(self) -> int:
        """Issue one operation and return its number."""
        if self is not self.timeline.host:
            self.learn(self.timeline.host.clock)
        count = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = self.timeline.latest[self.number] = count
        return count

    def follows(self, stream: int, count: int) -> bool:
        """Return whether later operations of this stream are ordered after the given operation."""
        return stream == self.number or self.clock.get(stream, 0) >= count

    def learn(self, clock: Clock) -> None:
        self.timeline.settle()
        for stream, count in clock.copy().items():  # another thread may use the clock
            if self.clock.get(stream, 0) < count:
                self.clock[stream] = count

    def wait_event(self, event: PlayedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: PlayedStream) -> None:
        self.learn(stream.clock)

    def record_event(self, event: PlayedEvent | None = None) -> PlayedEvent:
        event = event or PlayedEvent(self.timeline)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.timeline.wait(f"synchronize {self.name}", self.clock)

    def query(self) -> bool:
        self.timeline.host.learn(self.clock)
        return True

    def __enter__(self) -> PlayedStream:
        self._outer.append(self.timeline.current)
        self.timeline.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self.timeline.current = self._outer.pop()


class PlayedEvent:
    """A place in a stream; an event that was never recorded counts as reached, as in CUDA."""

    def __init__(self, timeline: StreamTimeline) -> None:
        self._timeline = timeline
        self._clock: Clock = {}
        self._recorded_at = 0.0
        self._was_asked = True

    def record(self, stream: PlayedStream | None = None) -> None:
        stream = stream or self._timeline.current
        stream.advance()
        self._clock, self._recorded_at = dict(stream.clock), time.perf_counter()
        self._was_asked = False

    def wait(self, stream: PlayedStream | None = None) -> None:
        (stream or self._timeline.current).learn(self._clock)

    def query(self) -> bool:
        # The first answer is "not yet", which a program has to expect, unless the host has waited
        # for the recorded work.
        host = self._timeline.host
        if not self._was_asked and not all(host.follows(*one) for one in self._clock.items()):
            self._was_asked = True
            return False
        self._timeline.host.learn(self._clock)
        return True

    def synchronize(self) -> None:
        self._timeline.wait("synchronize an event", self._clock)

    def elapsed_time(self, later: PlayedEvent) -> float:
        return (later._recorded_at - self._recorded_at) * 1e3
