"""Losses of dense runs of any length, to compare a run with a dense run of the same time.

All runs are whole: the learning rate of each has reached its lowest at its end. A dense run of any
length is interpolated between runs of a few lengths, linearly in the logarithm of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from megatron.errors import ConfigError
from tools.studies.rows import StudyRow


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
