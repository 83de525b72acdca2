"""The schedule of mask changes during training, and of pruned entries.

Loads no torch. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

FRACTION = 0.01377866
"""Share of the entries, stored or not, of pruned tensors that a rewiring moves (A.3.1).

At 10 % of nonzeros the share is 13.8 % of the nonzeros. For the Transformer the best found was 11
to 18 % of the nonzeros at 5 to 50 % of nonzeros, with longer intervals at more nonzeros (Table 9).
"""
THRESHOLD = 0.001
"""Magnitude below which weights are pruned, until it adapts."""
UNTIL = Fraction(19, 20)
"""Share of the run in which masks change, 190 of 200 epochs; the remainder settles weights that
grew last.
"""
EPOCHS, WIDENED_AFTER = 190, (25, 80, 140)
"""Epochs with rewirings, and the epochs after which the interval doubles."""


@dataclass(frozen=True, kw_only=True)
class RewiringSchedule:
    """Rewirings come after the updates that the interval divides, up to `until`.

    `widening`: the interval doubles as in the papers, after 1/8, 0.4 and 0.7 of the run where
    `until` is 0.95.
    """

    interval: int
    until: int
    widening: bool = True

    def due(self, t: int) -> bool:
        """Return whether there is a rewiring after update `t`."""
        return 0 < t <= self.until and t % self._interval_at(t) == 0

    def any_due(self, first: int, last: int) -> bool:
        """Return whether there is one after any of the updates `first` to `last`."""
        return any(map(self.due, range(first, min(last, self.until) + 1)))

    @cached_property
    def last(self) -> int:
        """The update after the last of them; 0 where there is none."""
        return next(filter(self.due, range(self.until, 0, -1)), 0)

    def _interval_at(self, t: int) -> int:
        passed = sum(t * EPOCHS > epochs * self.until for epochs in WIDENED_AFTER)
        return self.interval << passed if self.widening else self.interval


def until_of(total: int) -> int:
    """The last update after which a run of `total` may be rewired, where nothing else is said."""
    return int(UNTIL * total)


def target_of(fraction: Fraction, entries: Sequence[int]) -> int:
    """Return the rounded number of weights, one at least, that a rewiring should prune.

    At least one.
    """
    return max(1, round(fraction * sum(entries)))


def why_too_many(fraction: Fraction, entries: Sequence[int], stored: int) -> str:
    """Return why so large a fraction cannot be pruned at a time, and what would do; "" if it can.

    `stored` entries of the tensors exist. A rewiring may prune twice the target, and the threshold
    would double for ever on its way to a target that is out of reach.
    """
    target, total = target_of(fraction, entries), sum(entries)
    if 2 * target <= stored:
        return ""
    return (
        f"dsr_fraction {float(fraction):g}: {target} of {total} entries are more than half of "
        f"the {stored} that are not pruned; --dsr-fraction {stored / total / 4:.2g} would do"
    )


def why_none(schedule: RewiringSchedule, first: int, last: int) -> str:
    """Why none of the updates `first` to `last` is followed by a rewiring, and what would help.

    "" where one is.
    """
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
    """Return why Radius does not begin in the updates `first` to `last`, "" where it does.

    Radius begins in an update that `interval` divides, from `start` on and once there is a ticket;
    `first` is the earliest update after a ticket.
    """
    if last // interval * interval >= max(first, start):
        return ""
    return (
        f"the first ticket could be drawn after step {first - 1}, and from then to step {last} "
        f"there is no multiple of radius_interval {interval} for Radius to begin at; lower that or "
        "samo_early_bird_interval, or train longer"
    )


DRAWS = 5
"""Early-bird masks that must be alike, the newest among them: the length of the paper's queue."""


def is_prunable(name: str, shape: Sequence[int], *, keep_embeddings: bool) -> bool:
    """Return whether a tensor is a weight matrix, or an embedding and these are not kept.

    Biases and norms, which have one axis, never are. An embedding is what has the word in its name.
    """
    return len(shape) > 1 and not (keep_embeddings and "embedding" in name)


def stored_count(entries: int, sparsity: Fraction) -> int:
    """Entries to store out of so many: all but floor(p n), and at least one."""
    assert entries > 0 and 0 <= sparsity < 1
    return max(entries - math.floor(sparsity * entries), 1)


def first_ticket(interval: int) -> int:
    """The earliest update after which an early-bird ticket can be drawn."""
    return DRAWS * interval
