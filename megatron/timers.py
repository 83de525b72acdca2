"""Named timers with Megatron-LM's names and levels; a timer that is off costs next to nothing.

The caller aggregates over ranks, since only the caller has the process groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

_OFF: AbstractContextManager[None] = nullcontext()


class _Timer:
    """One timer; as a context manager it adds the time spent inside."""

    __slots__ = ("_clock", "_started", "_synchronize", "seconds")

    def __init__(
        self, *, synchronize: Callable[[], None] | None, clock: Callable[[], float]
    ) -> None:
        self._synchronize = synchronize
        self._clock = clock
        self._started: float | None = None
        self.seconds = 0.0

    def __enter__(self) -> None:
        assert self._started is None, "timer is running already"
        if self._synchronize is not None:
            self._synchronize()
        self._started = self._clock()

    def __exit__(self, *_: object) -> None:
        assert self._started is not None
        if self._synchronize is not None:
            self._synchronize()
        self.seconds += self._clock() - self._started
        self._started = None


class Timers:
    """Timers by name: `with timers("forward-compute", level=1): ...` adds up seconds.

    Timers above `level` (`--timing-log-level`) measure nothing. `synchronize` is called at both
    ends of a measurement, so that a device's queued work counts where it was queued. A timer may
    not be nested in itself; different timers may nest. Not thread-safe.
    """

    def __init__(
        self,
        level: int,
        *,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.level = level
        self._synchronize = synchronize
        self._clock = clock
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, *, level: int = 0) -> AbstractContextManager[None]:
        """Return the timer of this name, or a context that does nothing if `level` is too high."""
        if level > self.level:
            return _OFF
        timer = self._timers.get(name)
        if timer is None:
            timer = _Timer(synchronize=self._synchronize, clock=self._clock)
            self._timers[name] = timer
        return timer

    def elapsed(self, *, reset: bool = True) -> dict[str, float]:
        """Return seconds by name since the last reset, in order of first use.

        With `reset`, set them to 0. A timer that is running is counted after it has stopped.
        """
        seconds = {name: timer.seconds for name, timer in self._timers.items()}
        if reset:
            for timer in self._timers.values():
                timer.seconds = 0.0
        return seconds
