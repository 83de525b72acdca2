"""The numbers of one training step, and their means over an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EVALUATION_KINDS = ("valid", "test")


@dataclass(frozen=True, kw_only=True)
class Measures:
    """The unit and the sums of a task, and the names of the means.

    Args:
        unit: The unit that a batch counts, in the plural: "tokens", "images".
        sums: The sums that the last chunk returns, in order; the first is differentiated.
        means: The name, in the log, of each sum divided by the count: "accuracy" for the sum
            "correct". With underscores for blanks it is the key in metrics.jsonl.
        perplexity: The mean whose exponential an evaluation reports as perplexity; None for none.
    """

    unit: str
    sums: tuple[str, ...] = ("loss",)
    means: tuple[str, ...] = ("loss",)
    perplexity: str | None = None

    def __post_init__(self) -> None:
        assert len(self.sums) == len(self.means), "each sum has a mean"


def perplexity(loss: float) -> float:
    """Return exp(loss), but at most exp(20) as in Megatron; NaN if the loss is NaN."""
    return math.nan if math.isnan(loss) else math.exp(min(20.0, loss))


def key_of(name: str) -> str:
    """Return the key in metrics.jsonl of a mean's name."""
    return name.replace(" ", "_")


Spread = tuple[float, float] | list[float]
"""A timer over ranks: the pair (min, max), or a list with one value per rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step of the whole job, as Python numbers.

    `means` are the task's means by name; the first is the loss, and each may be NaN or infinite.
    `counted` is the number of units, such as tokens, in the global batch. `grad_norm` is None for a
    step with non-finite gradients. `step_seconds` excludes evaluation and saving. `bytes_sent` and
    `wait_seconds` are those of this rank's gradient path (`ReducerStats`), `axis_bytes` the bytes
    that this rank sent along other axes of the grid, by name. `flops` are model FLOPs over all
    ranks. `peak_memory_bytes` is the peak on this rank: on a GPU of tensors during the step, on a
    CPU of the process since its start. `timers` are seconds since the previous logged step, over
    ranks. `path` has the gradient path's own numbers by name.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    means: Mapping[str, float]
    lr: float
    grad_norm: float | None
    step_seconds: float
    counted: int
    bytes_sent: int
    density: float
    skipped: bool
    loss_scale: float
    global_batch_size: int
    peak_memory_bytes: int
    flops: float
    world_size: int
    unit: str = "tokens"
    num_zeros: int | None = None
    params_norm: float | None = None
    timers: Mapping[str, Spread] = field(default_factory=dict)
    wait_seconds: float | None = None
    path: Mapping[str, float] = field(default_factory=dict)
    axis_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean loss, the first of the means."""
        return next(iter(self.means.values()))

    @property
    def per_second(self) -> float:
        """Units per second of the whole job in this step; 0 if no time was measured."""
        return self.counted / self.step_seconds if self.step_seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The means of a data set, "valid" or "test", after `iteration` steps, by name, the loss first.

    `perplexity_of` names the mean whose exponential is a perplexity.
    """

    iteration: int
    kind: str
    means: Mapping[str, float]
    perplexity_of: str | None = None

    def __post_init__(self) -> None:
        assert self.kind in EVALUATION_KINDS, self.kind

    @property
    def values(self) -> dict[str, float]:
        """The means by their keys in metrics.jsonl: valid_loss, valid_accuracy.

        They include the perplexity if it is not the exponential of the loss.
        """
        (first, loss), *others = self.means.items()
        found = {"loss": loss} | {key_of(name): mean for name, mean in others}
        if self.perplexity_of not in (None, first):
            found["perplexity"] = perplexity(self.means[self.perplexity_of])
        return {f"{self.kind}_{key}": value for key, value in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class LogInterval:
    """Sums, means and counts of the steps since the last log line.

    `path` has the latest value of each name, since not every step has all names.
    """

    steps: int
    seconds: float
    counted: int
    flops: float
    means: dict[str, float]
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
    """Return the summary of a non-empty interval of steps.

    Loss and other means are averaged over the applied steps, or over all steps if none was applied.
    """
    assert records, "an interval holds at least one step"
    applied = [r.means for r in records if not r.skipped] or [r.means for r in records]
    waits = [r.wait_seconds for r in records if r.wait_seconds is not None]
    return LogInterval(
        steps=len(records),
        seconds=sum(r.step_seconds for r in records),
        counted=sum(r.counted for r in records),
        flops=sum(r.flops for r in records),
        means={name: sum(m[name] for m in applied) / len(applied) for name in applied[0]},
        bytes_per_step=sum(r.bytes_sent for r in records) / len(records),
        wait_seconds=sum(waits) / len(waits) if waits else None,
        skipped=sum(r.skipped for r in records),
        nan=sum(not math.isfinite(r.loss) for r in records),
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
