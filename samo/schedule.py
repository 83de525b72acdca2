"""The schedule of mask changes and the numbers of pruned entries. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
EPOCHS, WIDENED_AFTER = 190, (25, 80, 140)
"""Epochs with rewirings, and the epochs after which the interval doubles."""


@dataclass(frozen=True, kw_only=True)
class RewiringSchedule:
    """The updates that are followed by a rewiring: multiples of the interval up to `until`.

    With `widening` the interval doubles as in the papers, after 1/8, 0.4 and 0.7 of the run if
    `until` is 0.95 of the run.
    """

    interval: int
    until: int
    widening: bool = True

    def due(self, t: int) -> bool:
        """Return whether a rewiring follows update `t`."""
        return 0 < t <= self.until and t % self._interval_at(t) == 0

    def any_due(self, first: int, last: int) -> bool:
        """Return whether a rewiring follows any of the updates `first` to `last`."""
        return any(map(self.due, range(first, min(last, self.until) + 1)))

    @cached_property
    def last(self) -> int:
        """Return the update that the last rewiring follows; 0 if there is none."""
        return next(filter(self.due, range(self.until, 0, -1)), 0)

    def _interval_at(self, t: int) -> int:
        passed = sum(t * EPOCHS > epochs * self.until for epochs in WIDENED_AFTER)
        return self.interval << passed if self.widening else self.interval


def until_of(total: int) -> int:
    """Return the default last update that a rewiring may follow, for `total` updates."""
    return int(UNTIL * total)


def target_of(fraction: Fraction, entries: Sequence[int]) -> int:
    """Return the weights to prune per rewiring, from the entries of each tensor; at least one."""
    return max(1, round(fraction * sum(entries)))


def why_too_many(fraction: Fraction, entries: Sequence[int], stored: int) -> str:
    """Return why a rewiring cannot prune this fraction, and a fraction that works; "" if it can.

    A rewiring may prune twice the target, and an unreachable target would double the threshold
    forever. `stored` of all `entries` exist.
    """
    target, total = target_of(fraction, entries), sum(entries)
    if 2 * target <= stored:
        return ""
    return (
        f"dsr_fraction {float(fraction):g}: {target} of {total} entries are more than half of "
        f"the {stored} that are not pruned; --dsr-fraction {stored / total / 4:.2g} would do"
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


def is_prunable(name: str, shape: Sequence[int], *, keep_embeddings: bool) -> bool:
    """Return whether a tensor is a weight matrix, or an embedding unless `keep_embeddings`.

    Biases and norms, which have one axis, are never pruned. Embeddings have "embedding" in their
    name.
    """
    return len(shape) > 1 and not (keep_embeddings and "embedding" in name)


def stored_count(entries: int, sparsity: Fraction) -> int:
    """Return the entries to store: all but floor(p n), and at least one."""
    assert entries > 0 and 0 <= sparsity < 1
    return max(entries - math.floor(sparsity * entries), 1)


def first_ticket(interval: int) -> int:
    """Return the earliest update after which an early-bird ticket can be drawn."""
    return DRAWS * interval
