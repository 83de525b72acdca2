"""The schedule of mask changes and the numbers of pruned entries. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property

FRACTION = 0.01377866
"""Share of all entries of the prunable tensors that a rewiring replaces (A.3.1).

It equals 13.8 % of the nonzeros at 10 % nonzeros. For the Transformer 11 to 18 % of the nonzeros
were best from 5 to 50 % nonzeros, with longer intervals for more nonzeros (Table 9).
"""
THRESHOLD = 0.001
"""Magnitude below which the first rewiring prunes; it adapts afterwards."""
UNTIL = Fraction(19, 20)
"""Share of the run with rewirings, 190 of 200 epochs; the rest trains the last grown weights."""
Periods = tuple[tuple[int, int], ...]
PERIODS: Periods = ((25, 1), (80, 2), (140, 4), (190, 8))
"""The last of 200 epochs of each period, and its interval over the first interval (Table 5)."""
CONSTANT: Periods = ((1, 1),)
"""One period: the interval does not change."""


@dataclass(frozen=True, kw_only=True)
class RewiringSchedule:
    """The updates that are followed by a rewiring: multiples of the interval up to `until`.

    `interval`: updates between rewirings in the first period. `frequency` divides the intervals of
    all periods (the multiplier of Tables 8 and 9). `periods` are scaled so that the last one ends
    with `until`.
    """

    interval: int
    until: int
    frequency: float = 1.0
    periods: Periods = PERIODS

    def due(self, t: int) -> bool:
        """Return whether a rewiring follows update `t`."""
        return 0 < t <= self.until and t % self._interval_at(t) == 0

    def any_due(self, first: int, last: int) -> bool:
        """Return whether a rewiring follows any of the updates `first` to `last`."""
        return any(map(self.due, range(first, min(last, self.until) + 1)))

    @cached_property
    def last(self) -> int:
        """Update that the last rewiring follows; 0 if there is none."""
        return next(filter(self.due, range(self.until, 0, -1)), 0)

    def _interval_at(self, t: int) -> int:
        last, _ = self.periods[-1]
        factor = next(factor for end, factor in self.periods if t * last <= end * self.until)
        return max(1, round(self.interval * factor / self.frequency))


def until_of(total: int) -> int:
    """Return the default last update that a rewiring may follow, for `total` updates."""
    return int(UNTIL * total)


def target_of(fraction: Fraction, entries: Sequence[int]) -> int:
    """Return the weights to prune per rewiring, from the entries of each tensor; at least one."""
    return max(1, round(fraction * sum(entries)))


def why_too_many(fraction: Fraction, entries: Sequence[int], stored: int) -> str:
    """Return why a rewiring cannot prune this fraction, and a fraction that works; "" if it can.

    `stored` of all `entries` exist. A rewiring leaves one entry in each tensor, and prunes no more
    than can grow elsewhere. A target out of reach would double the threshold forever.
    """
    target, total = target_of(fraction, entries), sum(entries)
    most = min(stored - len(entries), total - stored)
    if target <= most:
        return ""
    return (
        f"dsr_fraction {float(fraction):g}: a rewiring cannot move {target} of {total} entries, as "
        f"{stored} are stored; --dsr-fraction {most / total / 2:.2g} would do"
    )


def why_none(schedule: RewiringSchedule, first: int, last: int) -> str:
    """Return why no rewiring follows updates `first` to `last`, and a remedy; "" if one does."""
    if schedule.any_due(first, last):
        return ""
    end = min(last, schedule.until)
    if end < first:
        return (
            f"dsr_until {schedule.until} is before update {first}, the next of this run; give a "
            "larger one"
        )
    halves = [schedule.interval >> n for n in range(1, schedule.interval.bit_length())]
    fitting = next((n for n in halves if replace(schedule, interval=n).any_due(first, last)), 0)
    way_out = f"--dsr-interval {fitting} would do" if fitting else "train for longer"
    return (
        f"dsr_interval {schedule.interval}: the network is rewired after no update from {first} to "
        f"{end}, the last that may be; {way_out}"
    )


def why_no_resample(first: int, last: int, *, start: int, interval: int) -> str:
    """Return why Radius begins in none of the updates `first` to `last`; "" if it does.

    Radius begins in a multiple of `interval` from `start` on, once there is a ticket; `first` is
    the earliest update after a ticket.
    """
    if last // interval * interval >= max(first, start):
        return ""
    return (
        f"the first ticket could be drawn after step {first - 1}, and from then to step {last} "
        f"there is no multiple of radius_interval {interval} for Radius to begin at; lower that or "
        "samo_early_bird_interval, or train longer"
    )


DRAWS = 5
"""Consecutive early-bird masks that must be similar: the length of the paper's queue."""


def is_prunable(
    name: str, shape: Sequence[int], *, keep_embeddings: bool, dense: Sequence[str] = ()
) -> bool:
    """Return whether a tensor is a weight matrix or kernel that no setting leaves whole.

    Biases and norms, which have one axis, are never pruned. Embeddings have "embed" in their name
    (`embedding.word_embeddings`, `encoder.embed_tokens`) and stay whole with `keep_embeddings`.
    `dense`: shell patterns of logical names that stay whole.
    """
    if len(shape) < 2 or (keep_embeddings and "embed" in name):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in dense)


def stored_count(entries: int, sparsity: Fraction) -> int:
    """Return the entries to store: all but floor(p n), and at least one."""
    assert entries > 0 and 0 <= sparsity < 1
    return max(entries - math.floor(sparsity * entries), 1)


def first_ticket(interval: int) -> int:
    """Return the earliest update after which an early-bird ticket can be drawn."""
    return DRAWS * interval
