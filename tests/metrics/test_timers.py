"""Named stopwatches: sums, levels, synchronisation, reset."""

from __future__ import annotations

import pytest

from megatron.timers import Timers


class _Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_seconds_add_up_by_name_until_the_reset() -> None:
    ticks = _Ticks()
    timers = Timers(1, clock=ticks)
    for _ in range(3):
        with timers("outer"), timers("inner", level=1):
            ticks.now += 2.0
        ticks.now += 100.0
    assert timers.elapsed(reset=False) == {"outer": 6.0, "inner": 6.0}
    assert timers.elapsed() == {"outer": 6.0, "inner": 6.0}
    assert timers.elapsed() == {"outer": 0.0, "inner": 0.0}


def test_timers_above_the_level_do_nothing() -> None:
    calls: list[int] = []
    timers = Timers(0, synchronize=lambda: calls.append(1))
    with timers("forward", level=1):
        pass
    assert timers("forward", level=1) is timers("backward", level=2)
    assert timers.elapsed() == {} and calls == []


def test_device_is_waited_for_at_both_ends() -> None:
    ticks = _Ticks()

    def synchronize() -> None:
        ticks.now += 1.0

    timers = Timers(0, synchronize=synchronize, clock=ticks)
    with timers("step"):
        pass
    assert timers.elapsed() == {"step": 1.0}
    assert ticks.now == 2.0


def test_time_counts_when_the_body_fails() -> None:
    ticks = _Ticks()
    timers = Timers(0, clock=ticks)
    with pytest.raises(ValueError, match="x"), timers("step"):
        ticks.now += 1.0
        raise ValueError("x")
    with timers("step"):
        ticks.now += 1.0
    assert timers.elapsed() == {"step": 2.0}


def test_a_timer_inside_itself_is_our_bug() -> None:
    timers = Timers(0)
    with pytest.raises(AssertionError), timers("a"), timers("a"):
        pass
