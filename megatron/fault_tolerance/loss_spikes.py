"""Detection of loss spikes (the rule of OLMo-core's SkipStepOptimizer)."""

from __future__ import annotations

import math
from collections.abc import Sequence

WINDOW = 128
"""Number of recent losses with which a new loss is compared."""


def is_spike(loss: float, recent: Sequence[float], *, sigmas: float) -> bool:
    """Return whether `loss` is a spike.

    A spike lies more than `sigmas` standard deviations above the mean of the recent losses, or is
    not finite. There is none before `WINDOW` losses.
    """
    if len(recent) < WINDOW:
        return False
    if not math.isfinite(loss):
        return True
    mean = math.fsum(recent) / len(recent)
    variance = math.fsum((value - mean) ** 2 for value in recent) / (len(recent) - 1)
    return loss > mean + sigmas * math.sqrt(variance)


def remember(recent: list[float], loss: float) -> None:
    """Append a loss to `recent` in place, and keep the last `WINDOW`.

    Losses of skipped steps are appended too, so that a lasting new level soon counts as normal. One
    that is not finite is left out: no loss lies above a mean with it.
    """
    if not math.isfinite(loss):
        return
    recent.append(loss)
    del recent[:-WINDOW]
