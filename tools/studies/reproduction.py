"""Groups of a study beside other rows of the same runs, as those of another machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.studies.rows import StudyRow
from tools.studies.statistics import degrees_of, groups_of, quantile, scatter_of


@dataclass(frozen=True, kw_only=True)
class RepeatedGroup:
    """Mean gaps of a group in two files of rows, over the seeds that both have.

    `gap` is that of the study's rows, `other` that of the rows beside them. `error` is the standard
    error of the difference of both gaps, by the scatter of gaps over seeds: a run of the same seed
    on another processor adds numbers in another order, which changes its loss by less than another
    seed does. None if no group has several seeds. `degrees` are the degrees of freedom of the
    scatter.
    """

    name: str
    seeds: tuple[int, ...]
    gap: float
    other: float
    error: float | None
    degrees: int

    @property
    def difference(self) -> float:
        """The other gap less the study's own."""
        return self.other - self.gap

    @property
    def is_apart(self) -> bool:
        """Whether both gaps differ at the level of 5 %, by Student's t test."""
        if self.error is None:
            return False
        return abs(self.difference) > quantile(self.degrees) * self.error

    @property
    def verdict(self) -> str:
        """The result of the comparison, in words."""
        if self.error is None:
            return "no error, not tested"
        return "another gap" if self.is_apart else "no difference shown"


def repeated_groups(
    rows: Sequence[StudyRow], others: Sequence[StudyRow], baselines: Mapping[str, str]
) -> list[RepeatedGroup]:
    """Return the groups with a gap of the same seed in both, in the order of `baselines`.

    A run is compared with one of the same settings only.
    """
    settings = {row.name: row.settings for row in rows}
    alike = [row for row in others if settings.get(row.name, row.settings) == row.settings]
    own = {group.name: group for group in groups_of(rows, baselines)}
    beside = {group.name: group for group in groups_of(alike, baselines)}
    samples = [
        group.gaps
        for groups in (own, beside)
        for name, group in groups.items()
        if name != baselines[name]
    ]
    scatter = scatter_of(samples)
    found = []
    for name, group in own.items():
        there = beside[name].gaps if name in beside else {}
        seeds = tuple(sorted(group.gaps.keys() & there.keys()))
        if not seeds or name == baselines[name]:
            continue
        found.append(
            RepeatedGroup(
                name=name,
                seeds=seeds,
                gap=statistics.fmean(group.gaps[seed] for seed in seeds),
                other=statistics.fmean(there[seed] for seed in seeds),
                error=None if scatter is None else scatter * math.sqrt(2 / len(seeds)),
                degrees=degrees_of(samples),
            )
        )
    return found
