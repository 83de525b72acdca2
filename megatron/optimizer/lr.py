"""Learning rate and weight decay as functions of the samples in applied steps.

Like Megatron, the schedules count samples, so that batch ramp-up stretches the schedule. A flag in
iterations counts as that many global batches. A skipped step does not advance the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# Each maps decay progress in [0, 1] to the remaining fraction of (max - min).
_DECAY: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (math.cos(math.pi * x) + 1.0),
    "exponential": lambda x: 2.0 * 0.5**x - 1.0,
    "minus_sqrt": lambda x: 1.0 - math.sqrt(x),
}


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning-rate schedule: `at(samples)` is the rate of the update after `samples` samples.

    The rate rises linearly from `warmup_init` over `warmup_samples` (so the first step of a warm-up
    from 0 has rate 0, as in Megatron), decays by `style` until `decay_samples`, then stays at
    `min_lr`. The style "multi-step" multiplies `max_lr` by the factor of the last of `steps` that
    has begun, but never goes below `min_lr`.

    Attributes:
        steps: (first samples, factor of `max_lr`) of each step, ascending.
    """

    max_lr: float
    min_lr: float
    warmup_init: float
    warmup_samples: int
    decay_samples: int
    style: str
    wsd_decay_samples: int = 0
    wsd_style: str = "exponential"
    steps: tuple[tuple[int, float], ...] = ()

    def at(self, samples: int) -> float:
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            rise = (self.max_lr - self.warmup_init) * samples / self.warmup_samples
            return self.warmup_init + rise
        if self.style == "constant":
            return self.max_lr
        if self.style == "multi-step":
            begun = [factor for start, factor in self.steps if samples >= start]
            return max(self.min_lr, self.max_lr * begun[-1]) if begun else self.max_lr
        if samples > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            first = max(self.warmup_samples, 1)
            return max(self.min_lr, self.max_lr * math.sqrt(first / max(samples, 1)))
        return self.min_lr + (self.max_lr - self.min_lr) * self._left(samples)

    def _left(self, samples: int) -> float:
        """Return the remaining fraction of (max_lr - min_lr)."""
        if self.style == "WSD":
            anneal_from = self.decay_samples - self.wsd_decay_samples
            if samples <= anneal_from:
                return 1.0
            return _DECAY[self.wsd_style]((samples - anneal_from) / self.wsd_decay_samples)
        span = self.decay_samples - self.warmup_samples
        return _DECAY[self.style]((samples - self.warmup_samples) / span if span else 1.0)


@dataclass(frozen=True, kw_only=True)
class WeightDecay:
    """The weight-decay schedule: `at(samples)` is constant or rises from `start` to `end`."""

    start: float
    end: float
    total_samples: int
    style: str = "constant"

    def at(self, samples: int) -> float:
        if self.style == "constant":
            return self.end
        progress = min(1.0, samples / self.total_samples)
        if self.style == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start + (self.end - self.start) * 0.5 * (math.cos(math.pi * (1 - progress)) + 1)
