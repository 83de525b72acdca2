"""The numbers of one training step, and their means over an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EVALUATION_KINDS = ("valid", "test")

Spread = tuple[float, float] | list[float]
"""A timer over ranks: the pair (min, max), or a list with one value per rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step of the whole job, as Python numbers.

    Attributes:
        lm_loss: Mean over the tokens of the global batch; may be NaN or infinite.
        grad_norm: None if a skipped step has no norm.
        step_seconds: Time without evaluation and saving.
        bytes_sent: Bytes that this rank sent to its data-parallel group.
        axis_bytes: Bytes that this rank sent along other axes of the grid, by name.
        flops: Model FLOPs over all ranks.
        peak_memory_bytes: Maximum on this rank: on a GPU of tensors during the step, on a CPU of
            the process since its start.
        timers: Seconds since the previous record, over ranks.
        path: The gradient path's own numbers, by name.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    lm_loss: float
    lr: float
    grad_norm: float | None
    step_seconds: float
    tokens: int
    bytes_sent: int
    density: float
    skipped: bool
    loss_scale: float
    global_batch_size: int
    peak_memory_bytes: int
    flops: float
    world_size: int
    num_zeros: int | None = None
    params_norm: float | None = None
    timers: Mapping[str, Spread] = field(default_factory=dict)
    wait_seconds: float | None = None
    path: Mapping[str, float] = field(default_factory=dict)
    axis_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole job per second of this step; 0 if no time was measured."""
        return self.tokens / self.step_seconds if self.step_seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LogInterval:
    """Sums, means and counts of the steps since the last log line.

    `path` has the latest value of each name, since not every step has all names.
    """

    steps: int
    seconds: float
    tokens: int
    flops: float
    lm_loss: float
    bytes_per_step: float
    wait_seconds: float | None
    skipped: int
    nan: int
    peak_memory_bytes: int
    timers: dict[str, Spread]
    density: float
    path: dict[str, float]
    axis_bytes_per_step: dict[str, float]


def summarize(records: Sequence[StepRecord]) -> LogInterval:
    """Summarise a non-empty interval of steps.

    The loss is the mean over applied steps, or over skipped steps if no step was applied.
    """
    assert records, "an interval holds at least one step"
    applied = [r.lm_loss for r in records if not r.skipped]
    losses = applied or [r.lm_loss for r in records]
    waits = [r.wait_seconds for r in records if r.wait_seconds is not None]
    return LogInterval(
        steps=len(records),
        seconds=sum(r.step_seconds for r in records),
        tokens=sum(r.tokens for r in records),
        flops=sum(r.flops for r in records),
        lm_loss=sum(losses) / len(losses),
        bytes_per_step=sum(r.bytes_sent for r in records) / len(records),
        wait_seconds=sum(waits) / len(waits) if waits else None,
        skipped=sum(r.skipped for r in records),
        nan=sum(not math.isfinite(r.lm_loss) for r in records),
        peak_memory_bytes=max(r.peak_memory_bytes for r in records),
        timers=_sum_timers(records),
        density=sum(r.density for r in records) / len(records),
        path={name: value for r in records for name, value in r.path.items()},
        axis_bytes_per_step={
            name: sum(r.axis_bytes.get(name, 0) for r in records) / len(records)
            for name in records[-1].axis_bytes
        },
    )


def _sum_timers(records: Sequence[StepRecord]) -> dict[str, Spread]:
    totals: dict[str, list[float]] = {}
    pairs: set[str] = set()
    for record in records:
        for name, spread in record.timers.items():
            if isinstance(spread, tuple):
                pairs.add(name)
            sums = totals.setdefault(name, [0.0] * len(spread))
            for i, seconds in enumerate(spread):
                sums[i] += seconds
    return {name: (v[0], v[1]) if name in pairs else v for name, v in totals.items()}
