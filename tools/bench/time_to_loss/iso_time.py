"""A path's loss less that of a dense run of the same time, from losses and seconds of a step.

Both runs are whole: the learning rate of each has reached its lowest at its end. A dense run of any
length is interpolated between runs of a few lengths, linearly in the logarithm of the steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.errors import ConfigError
from tools.studies.rows import StudyRow
from tools.studies.statistics import is_beyond, standard_error


@dataclass(frozen=True, kw_only=True)
class IsoTime:
    """A path beside a dense run that ends when the path's run does.

    `step` is the mean of a step, in seconds, `share` that of a step of dense over a bf16 wire.
    `length` is the time of the path's run in steps of dense, `dense_steps` the length of the dense
    run, which is that of the path's run at most, and `dense_loss` its loss on the same seeds.
    `difference` is the mean over seeds of the path's validation loss less the dense run's, and
    `error` its standard error, None with one seed.
    """

    group: str
    seeds: tuple[int, ...]
    step: float
    share: float
    length: float
    dense_steps: float
    loss: float
    dense_loss: float
    difference: float
    error: float | None

    @property
    def verdict(self) -> str:
        """Whether the path pays: at the level of 5 %."""
        if self.error is None or not is_beyond(self.difference, self.error, seeds=len(self.seeds)):
            return "not shown"
        return "pays" if self.difference < 0 else "does not pay"


class DenseLosses:
    """Losses of dense runs by length and seed.

    `shorter` is the prefix of the groups of shorter runs, `dense` the group of whole ones. Raises
    `ConfigError` if a seed of `dense` lacks a length, or if there are none.
    """

    def __init__(self, rows: Iterable[StudyRow], *, dense: str, shorter: str) -> None:
        self._losses: dict[int, dict[int, float]] = {}
        for row in rows:
            if row.valid_loss is not None and (row.group == dense or row.group.startswith(shorter)):
                self._losses.setdefault(row.steps, {})[row.seed] = row.valid_loss
        if not self._losses:
            raise ConfigError(f"--results: no finished run of {dense}; tools/study.py makes it")
        for steps, losses in self._losses.items():
            if missing := self._losses[self.steps].keys() - losses.keys():
                raise ConfigError(
                    f"--results: no dense run of {steps} steps and seed {min(missing)}; "
                    "tools/study.py makes it"
                )

    @property
    def steps(self) -> int:
        """Length of a whole run."""
        return max(self._losses)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the runs, rising."""
        return sorted(self._losses)

    @property
    def seeds(self) -> set[int]:
        """Seeds of whole runs."""
        return set(self._losses[self.steps])

    def mean(self, steps: int) -> float:
        """Return the mean loss of the runs of a length."""
        return statistics.fmean(self._losses[steps].values())

    def at(self, steps: float, seed: int) -> float:
        """Return the loss of a dense run of this length.

        Raises `ConfigError` for a length outside of those that were run.
        """
        if not self.lengths[0] <= steps <= self.steps:
            raise ConfigError(f"--results: no dense run is as short as {steps:.0f} steps")
        shorter = max(length for length in self._losses if length <= steps)
        longer = min(length for length in self._losses if length >= steps)
        known = self._losses[shorter][seed]
        if shorter == longer:
            return known
        share = math.log(steps / shorter) / math.log(longer / shorter)
        return known + share * (self._losses[longer][seed] - known)

    def gaps(self, losses: Mapping[int, float], length: float) -> dict[int, float]:
        """Return `losses` less those of dense runs of `length` steps, by common seed.

        A length beyond that of a whole run stands for a whole run. Raises `ConfigError` for one
        that is shorter than all runs.
        """
        steps = min(float(self.steps), length)
        seeds = sorted(losses.keys() & self.seeds)
        return {seed: losses[seed] - self.at(steps, seed) for seed in seeds}


def compare(
    group: str,
    losses: Mapping[int, float],
    dense: DenseLosses,
    *,
    before: int,
    step: float,
    dense_step: float,
) -> IsoTime:
    """Compare a path with dense over a bf16 wire, given the seconds of a step of both.

    `losses` are the path's by seed; its first `before` steps are dense. A path whose run takes
    longer than the dense one is compared with the whole dense run.
    """
    length = before + (dense.steps - before) * step / dense_step
    gaps = dense.gaps(losses, length)
    if not gaps:
        raise ConfigError(f"--results: {group} and dense have no seed in common")
    loss = statistics.fmean(losses[seed] for seed in gaps)
    difference = statistics.fmean(gaps.values())
    return IsoTime(
        group=group,
        seeds=tuple(gaps),
        step=step,
        share=step / dense_step,
        length=length,
        dense_steps=min(float(dense.steps), length),
        loss=loss,
        dense_loss=loss - difference,
        difference=difference,
        error=standard_error(list(gaps.values())) if len(gaps) > 1 else None,
    )
