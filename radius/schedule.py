"""The settings of Radius, and the check that a resample falls into a run. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class RadiusSettings:
    """The settings of `RadiusReducer`, named as the `--radius-*` flags.

    `density` is the share of each matrix that is sent between resamples, `start` the first t at
    which a resample may happen, `seed` the seed of `select="seeded"`.
    """

    density: Fraction
    interval: int
    start: int
    schedule: str = "paper"
    select: str = "update"
    clip: str = "all"
    residual: str = "separate"
    seed: int = 0


def fitting_interval(first: int, last: int, interval: int) -> int:
    """Return `interval` if one of the updates `first` to `last` is a multiple of it.

    Otherwise return the largest interval that has a multiple there, 0 if there are no updates.
    """
    longest = min(interval, last)
    return next((t for t in range(longest, 0, -1) if last // t * t >= max(first, 1)), 0)


def why_no_resample(start: int, first: int, last: int, interval: int) -> str:
    """Return why no resample happens in the updates `first` to `last`, and a remedy; else ""."""
    begin = max(start, first)
    fitting = fitting_interval(begin, last, interval)
    if fitting == interval:
        return ""
    if not fitting:
        return (
            f"radius_start_iter {start} is past the last update of this run, {last}; give "
            f"--radius-start-iter {first}, or train for longer"
        )
    return (
        f"radius_interval {interval}: no update from {begin} to {last}, which is what is left of "
        f"this run, is a multiple of it; --radius-interval {fitting} would do"
    )
