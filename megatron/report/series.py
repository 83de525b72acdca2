"""Curves made fit for a page: smoothed, and thinned without losing a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `x` and `y` have equal length; the curve is interrupted where y is not finite."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    width: float = 1.6
    opacity: float = 1.0
    markers: bool = False
    dashed: bool = False

    def after(self, x: float) -> Series:
        """The part of the curve right of `x`."""
        kept = [i for i, value in enumerate(self.x) if value > x]
        return replace(self, x=[self.x[i] for i in kept], y=[self.y[i] for i in kept])


def smoothing_window(count: int) -> int:
    """Return the values (odd) that a smoothed curve of `count` points averages; 1 = none.

    The number is about a 50th of `count`.
    """
    return 1 if count < 60 else 2 * (count // 100) + 1


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred mean of the finite values.

    Centred, since a trailing mean draws a falling loss too high; for the same reason the window
    narrows on both sides alike where a run begins. At the end it loses its right side alone.
    """
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    smoothed = []
    for i in range(len(values)):
        half = min(window // 2, i)
        first, last = i - half, min(i + half + 1, len(values))
        count = counts[last] - counts[first]
        smoothed.append((sums[last] - sums[first]) / count if count else math.nan)
    return smoothed


def thin(
    x: Sequence[float], y: Sequence[float], *, most: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """Thin a curve to about `most` points: of each stretch its smallest and largest value."""
    if len(x) <= most:
        return list(x), list(y)
    size = math.ceil(2 * len(x) / most)
    kept: list[int] = []
    for start in range(0, len(x), size):
        stretch = range(start, min(start + size, len(x)))
        finite = [i for i in stretch if math.isfinite(y[i])]
        if not finite:
            kept.append(start)
            continue
        kept += sorted({min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)})
    return [x[i] for i in kept], [y[i] for i in kept]
