"""A path's loss less that of a dense run of the same time, from losses and seconds of a step.

Both runs are whole: the learning rate of each has reached its lowest at its end. A dense run of any
length is interpolated between runs of a few lengths, linearly in the logarithm of the steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError
from tools.bench.convergence.groups import standard_error
from tools.bench.convergence.rows import Row
from tools.bench.convergence.study import DENSE, START
from tools.bench.loss_by_bytes.study import LENGTHS, PLAN, SHORTER


@dataclass(frozen=True, kw_only=True)
class IsoTime:
    """A path beside a dense run that ends when the path's run does.

    `step` is the mean of a step, in seconds, `share` that of a step of dense over a bf16 wire.
    `dense_steps` is the length of the dense run, at most that of the study, whose loss on the same
    seeds is `dense_loss`. `difference` is the mean over seeds of the path's validation loss less
    the dense run's, and `error` its standard error, None with one seed.
    """

    group: str
    seeds: tuple[int, ...]
    step: float
    share: float
    dense_steps: float
    loss: float
    dense_loss: float
    difference: float
    error: float | None

    @property
    def verdict(self) -> str:
        """Whether the path pays: beyond two standard errors."""
        if self.error is None or abs(self.difference) <= 2 * self.error:
            return "not shown"
        return "pays" if self.difference < 0 else "does not pay"


def losses_of(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return the validation losses by group and seed.

    Raises `ConfigError` if a seed of a dense run lacks a run of another length.
    """
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["valid_loss"] is not None:
            found.setdefault(row["group"], {})[row["seed"]] = row["valid_loss"]
    for steps in LENGTHS:
        name = f"{SHORTER}{steps}"
        if missing := found.get(DENSE, {}).keys() - found.get(name, {}).keys():
            raise ConfigError(
                f"--results: no finished run {name!r} of seed {min(missing)}; "
                "tools.bench.loss_by_bytes.run makes it"
            )
    return found


def dense_loss(steps: float, losses: Mapping[str, Mapping[int, float]], seed: int) -> float:
    """Return the loss of a dense run of this length; `steps` lies within those that were run."""
    known = {float(length): losses[f"{SHORTER}{length}"][seed] for length in LENGTHS}
    known[float(PLAN.steps)] = losses[DENSE][seed]
    lengths = sorted(known)
    shorter = max(length for length in lengths if length <= steps)
    longer = min(length for length in lengths if length >= steps)
    if shorter == longer:
        return known[shorter]
    share = math.log(steps / shorter) / math.log(longer / shorter)
    return known[shorter] + share * (known[longer] - known[shorter])


def compare(
    group: str, losses: Mapping[str, Mapping[int, float]], *, step: float, dense_step: float
) -> IsoTime:
    """Compare a path with dense over a bf16 wire, given the seconds of a step of both.

    Steps before the path takes over are dense. A path whose run takes longer than the dense one is
    compared with the whole dense run.
    """
    before = START * PLAN.steps if group != DENSE else 0.0
    length = before + (PLAN.steps - before) * step / dense_step
    length = min(float(PLAN.steps), length)
    seeds = tuple(sorted(losses[group].keys() & losses[DENSE].keys()))
    ours = [losses[group][seed] for seed in seeds]
    theirs = [dense_loss(length, losses, seed) for seed in seeds]
    differences = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    return IsoTime(
        group=group,
        seeds=seeds,
        step=step,
        share=step / dense_step,
        dense_steps=length,
        loss=statistics.fmean(ours),
        dense_loss=statistics.fmean(theirs),
        difference=statistics.fmean(differences),
        error=standard_error(differences) if len(seeds) > 1 else None,
    )
