"""Axes: the range of the data, round tick marks on it, and their labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

TickFormat = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high`, with ticks inside it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def position(self, value: float) -> float:
        """Return the position of a value, 0 at `low` and 1 at `high`.

        On a log axis the value is positive.
        """
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(
    values: Iterable[float], *, ticks: int, from_zero: bool = False, whole: bool = False
) -> Axis:
    """An axis that begins and ends at a tick and holds all finite values; `whole`: no fractions."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # A constant: some room around it, and never a range of nothing.
        room = abs(high) * 0.1 or 1.0
        low, high = (low if from_zero and low == 0 else low - room), high + room
    step = round_step((high - low) / ticks)
    if whole:
        step = float(math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = tuple(i * step for i in range(first, last + 1))
    return Axis(low=marks[0], high=marks[-1], ticks=marks)


def span_axis(low: float, high: float, *, ticks: int) -> Axis:
    """A linear axis over exactly [low, high], with the whole-number ticks that lie inside."""
    if high <= low:
        low, high = low - 1, low + 1
    step = max(1.0, round_step((high - low) / ticks))
    marks = range(math.ceil(low / step), math.floor(high / step) + 1)
    return Axis(low=low, high=high, ticks=tuple(i * step for i in marks))


def log_axis(values: Iterable[float]) -> Axis:
    """A logarithmic axis over the positive values; 1, 2, 5 are marked where decades are few."""
    positive = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    low, high = min(positive), max(positive)
    if high / low < 1.5:
        low, high = low / 1.5, high * 1.5
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(decades) <= 4 else (1,)
    stride = math.ceil(len(decades) / 7)
    marks = [digit * 10.0**e for e in decades[::stride] for digit in digits]
    return Axis(
        low=low / 1.1,
        high=high * 1.1,
        ticks=tuple(mark for mark in marks if low / 1.1 <= mark <= high * 1.1),
        log=True,
    )


def round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))


def plain(value: float) -> str:
    """4, 0.25, 1.5e-4."""
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        digits, exponent = f"{value:.4e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.10g}" if abs(value) < 1e-12 else f"{round(value, 9):.7g}"


def counted(value: float) -> str:
    """0, 500, 1.5k, 20M."""
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.4g}"


def traffic(value: float) -> str:
    """512 B, 2.5 MB."""
    text = counted(value)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"
