"""Groups of runs that differ in their seed, their errors, and which of them beats which."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tools.studies.rows import StudyRow

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Quantiles (97.5 %) of Student's t distribution for 1 to 10 degrees of freedom.

The last, which is slightly too large, serves for more.
"""

Measure = Callable[["SeedGroup"], float]


@dataclass(frozen=True, kw_only=True)
class SeedGroup:
    """The runs of one group.

    `losses` are validation losses by seed, `gaps` those less the loss of the baseline's run of the
    same seed. `error` is the standard error of the mean gap; with one seed it is that of one run by
    the scatter of all groups that have several (`error_is_own` False), None without any. `bytes`,
    `density`, `step_seconds`, `clipped` and `scores` are means over seeds, `peak_memory` the
    largest; None if no row has them.
    """

    name: str
    ranks: int
    data_parallel: int
    losses: Mapping[int, float]
    gaps: Mapping[int, float]
    error: float | None
    bytes: float
    density: float | None
    step_seconds: float | None
    peak_memory: float | None
    clipped: float
    failed: int
    scores: Mapping[str, float]

    @property
    def loss(self) -> float | None:
        """Mean validation loss."""
        return statistics.fmean(self.losses.values()) if self.losses else None

    @property
    def gap(self) -> float | None:
        """Mean gap to the baseline."""
        return statistics.fmean(self.gaps.values()) if self.gaps else None

    @property
    def payload(self) -> float:
        """Bytes of a vector whose ring all-reduce sends as much: equal for all numbers of copies.

        Of the part of the model that a rank holds; 0 for one copy, which sends nothing.
        """
        copies = self.data_parallel
        return self.bytes / (2 * (copies - 1) / copies) if copies > 1 else 0.0

    @property
    def error_is_own(self) -> bool:
        """Whether the error comes from the seeds of this group."""
        return len(self.gaps) > 1


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The loss of `first` less that of `second` on common seeds, and its standard error."""

    first: str
    second: str
    seeds: tuple[int, ...]
    mean: float
    error: float | None

    @property
    def lower(self) -> str | None:
        """Which of both is lower, beyond the error; a single seed has no error of its own."""
        if self.error is None or not is_beyond(self.mean, self.error, seeds=len(self.seeds)):
            return None
        return self.first if self.mean < 0 else self.second

    @property
    def verdict(self) -> str:
        """The result of the comparison, in words."""
        if len(self.seeds) < 2:
            return "one seed, not tested"
        return "no difference shown" if self.lower is None else f"{self.lower} is lower"


def groups_of(rows: Sequence[StudyRow], baselines: Mapping[str, str]) -> list[SeedGroup]:
    """Return the groups that have rows, in the order of `baselines`, the baseline of each group."""
    members = {name: [row for row in rows if row.group == name] for name in baselines}
    losses = {name: losses_of(found) for name, found in members.items()}
    gaps = {
        name: {
            seed: loss - losses[baselines[name]][seed]
            for seed, loss in found.items()
            if seed in losses[baselines[name]]
        }
        for name, found in losses.items()
    }
    scatter = scatter_of(own for name, own in gaps.items() if name != baselines[name])
    return [
        _group(name, found, losses[name], gaps[name], scatter)
        for name, found in members.items()
        if found
    ]


def training_seconds(rows: Iterable[StudyRow]) -> dict[str, float]:
    """Return by group the mean over runs that ended well of their steps times their median step.

    A run that continues another is thus compared with one that made all steps itself, and a few
    slow steps do not count. Groups without a step time are left out.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.valid_loss is not None and row.step_seconds is not None:
            found.setdefault(row.group, []).append(row.steps * row.step_seconds)
    return {name: statistics.fmean(times) for name, times in found.items()}


def losses_of(rows: Iterable[StudyRow]) -> dict[int, float]:
    """Return validation losses by seed, without failed runs."""
    return {
        row.seed: row.valid_loss
        for row in sorted(rows, key=lambda row: row.seed)
        if row.valid_loss is not None
    }


def degrees_of(samples: Iterable[Mapping[int, float]]) -> int:
    """Return the degrees of freedom of `scatter_of`."""
    return sum(len(sample) - 1 for sample in samples if sample)


def quantile(degrees: int) -> float:
    """Return the quantile of `STUDENT` for at least one degree of freedom."""
    return STUDENT[min(degrees, len(STUDENT)) - 1]


def scatter_of(samples: Iterable[Mapping[int, float]]) -> float | None:
    """Return the standard deviation over seeds, pooled over samples of several seeds."""
    several = [list(sample.values()) for sample in samples if len(sample) > 1]
    if not several:
        return None
    squares = sum((len(sample) - 1) * statistics.variance(sample) for sample in several)
    return math.sqrt(squares / sum(len(sample) - 1 for sample in several))


def is_beyond(mean: float, error: float, *, seeds: int) -> bool:
    """Return whether a mean over seeds differs from 0 at the level of 5 %, by Student's t test.

    Never with one seed, whatever the error.
    """
    if seeds < 2:
        return False
    return abs(mean) > quantile(seeds - 1) * error


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of at least two values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def difference(
    first: SeedGroup, second: SeedGroup, *, scatter: float | None = None
) -> Difference | None:
    """Return the paired difference of two groups; None without a common seed.

    `scatter` is the standard deviation of a gap, which is a difference of two runs as well, and the
    error with one seed.
    """
    seeds = tuple(sorted(first.losses.keys() & second.losses.keys()))
    if not seeds:
        return None
    margins = [first.losses[seed] - second.losses[seed] for seed in seeds]
    error = standard_error(margins) if len(margins) > 1 else scatter
    return Difference(
        first=first.name,
        second=second.name,
        seeds=seeds,
        mean=statistics.fmean(margins),
        error=error,
    )


def beaten_by(group: SeedGroup, groups: Sequence[SeedGroup], measure: Measure) -> list[str] | None:
    """Return the groups that cost at most as much by `measure` and whose loss is lower.

    Lower means beyond the error of the paired difference over common seeds (`is_beyond`). None if
    the group has one seed.
    """
    if len(group.losses) < 2:
        return None
    found: list[str] = []
    for other in groups:
        if other.name == group.name or measure(other) > measure(group):
            continue
        paired = difference(group, other)
        if paired is not None and paired.lower == other.name:
            found.append(other.name)
    return found


def frontier(groups: Sequence[SeedGroup], measure: Measure) -> list[SeedGroup]:
    """Return the groups on the Pareto front of mean gap against `measure`, by rising cost.

    Gaps are paired by seed, so that groups of different seeds can be compared, but all of them must
    have one baseline.
    """
    found: list[SeedGroup] = []
    best = math.inf
    rated = [(measure(group), group.gap, group) for group in groups if group.gap is not None]
    for _, gap, group in sorted(rated, key=lambda each: each[:2]):
        if gap < best:
            best = gap
            found.append(group)
    return found


def _group(
    name: str,
    rows: Sequence[StudyRow],
    losses: Mapping[int, float],
    gaps: Mapping[int, float],
    scatter: float | None,
) -> SeedGroup:
    failed = sum(row.valid_loss is None for row in rows)
    # A run that ended early has not sent what the whole run would.
    rows = [row for row in rows if row.valid_loss is not None] or rows
    error = standard_error(list(gaps.values())) if len(gaps) > 1 else scatter
    names = dict.fromkeys(name for row in rows for name in row.scores)
    return SeedGroup(
        name=name,
        ranks=rows[0].ranks,
        data_parallel=rows[0].data_parallel,
        losses=losses,
        gaps=gaps,
        error=error if gaps else None,
        bytes=statistics.fmean(row.bytes for row in rows),
        density=_of_known(statistics.fmean, (row.density for row in rows)),
        step_seconds=_of_known(statistics.fmean, (row.step_seconds for row in rows)),
        peak_memory=_of_known(max, (row.peak_memory for row in rows)),
        clipped=statistics.fmean(row.clipped for row in rows),
        failed=failed,
        scores={
            name: statistics.fmean(row.scores[name] for row in rows if name in row.scores)
            for name in names
        },
    )


def _of_known(
    function: Callable[[list[float]], float], values: Iterable[float | None]
) -> float | None:
    """Return the function of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return function(known) if known else None
