"""Streams and events that know what is ordered before what, by vector clocks.

Each stream counts its operations. Its clock holds, for every stream s, up to which of s's
operations everything that follows on the stream is ordered. The host is one more stream: it learns
a clock by waiting, and whatever it issues afterwards knows what it knew.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from tests.rehearsal.findings import Findings

Clock = dict[int, int]


class StreamTimeline:
    """All streams of a process. `settle` is called before a clock learns something: memory that was
    freed is judged by what was known when it was freed."""

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
        """The stream that this thread issues to."""
        return getattr(self._thread, "stream", self.default)

    @current.setter
    def current(self, stream: PlayedStream) -> None:
        self._thread.stream = stream

    def wait(self, what: str, clock: Clock) -> None:
        """The host stops until the device has done all that `clock` covers."""
        self.findings.note("wait", what)
        self.host.learn(clock)


class PlayedStream:
    """A queue of the device; a context manager, as torch's."""

    def __init__(self, timeline: StreamTimeline, name: str) -> None:
        self.timeline, self.name = timeline, name
        self.number = timeline.number(name)
        self.clock: Clock = {}
        self._outer: list[PlayedStream] = []

    def advance(self) -> int:
        """Issue one operation; returns its number."""
        if self is not self.timeline.host:
            self.learn(self.timeline.host.clock)
        count = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = self.timeline.latest[self.number] = count
        return count

    def follows(self, stream: int, count: int) -> bool:
        """Return whether what is issued from here on is ordered after that operation."""
        return stream == self.number or self.clock.get(stream, 0) >= count

    def learn(self, clock: Clock) -> None:
        self.timeline.settle()
        for stream, count in clock.items():
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
    """A place in a stream. One that was never recorded counts as reached, as CUDA has it."""

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
        # The first answer is "not yet", for which a program has to be ready, unless the host has
        # waited for what was recorded.
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
