"""The passes of a pipeline in a simulated step with any number of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.data_parallel.bucket_plan import RankShapes, StepTraffic
from megatron.memory_estimate import Activations, RankGrid, microbatches_of
from megatron.pipeline.schedule import Kind, Operation, StagePosition
from tools.planner.seconds import Lasts, PassSeconds, pass_seconds, play, unchanged
from tools.planner.site import Link, Site
from tools.planner.timeline import Passed, Timeline

ROUNDS = 4
"""Minimum number of rounds that are simulated; a round has as many microbatches as stages.

Once two consecutive rounds take equally long, later rounds are assumed to take the same time. With
several chunks, all rounds are simulated.
"""


@dataclass(frozen=True)
class Links:
    """The links of a data-parallel group, and between consecutive stages.

    `blocking`: a message keeps its sender and its receiver from computing.
    """

    reduce: Link
    message: Link
    blocking: bool = False


@dataclass(frozen=True)
class Setting:
    """The setting of a simulated step.

    `ranks` has one rank per stage, `passes` the times of a microbatch per stage, and `lasts` the
    factors of each simulated pipeline; other pipelines behave like one of these.
    """

    grid: RankGrid
    site: Site
    ranks: Sequence[RankShapes]
    passes: Sequence[PassSeconds]
    links: Links
    lasts: Sequence[Lasts] = (unchanged,)

    @classmethod
    def of(cls, grid: RankGrid, site: Site, ranks: Sequence[RankShapes]) -> Setting:
        """Return the setting with the pass times and links of the cost model (`seconds`)."""
        passes = [pass_seconds(grid, site, stage) for stage in range(grid.dims.pp)]
        return cls(
            grid, site, ranks, passes, Links(site.link(grid.dims, "dp"), site.message(grid.dims))
        )

    @cached_property
    def message(self) -> float:
        """Seconds of a message."""
        return self.links.message.message(Activations(self.grid).hidden)

    @cached_property
    def kinds(self) -> Sequence[StepTraffic]:
        """The kinds of step of the run, with their collectives."""
        return self.grid.path.plan_traffic(self.grid.config, self.ranks[0])


@dataclass(frozen=True)
class Course:
    """The passes of one pipeline.

    All microbatches left out of `timeline` take `skipped` seconds together, in equal rounds.
    """

    timeline: Timeline
    skipped: float = 0.0
    rounds: float = 1.0
    """Ratio of the passes of a whole batch to the simulated ones."""

    def last_backwards(self, stage: int, chunks: int) -> list[tuple[float, float]]:
        """Return start and end of the last backward of each chunk, the model's last chunk first."""
        found: dict[int, Passed] = {}
        for each in self.timeline.ranks[stage]:
            if each.operation.kind is Kind.BACKWARD:
                found[each.operation.chunk] = each
        return [
            (float(found[c].start) + self.skipped, float(found[c].stop) + self.skipped)
            for c in reversed(range(chunks))
        ]


def course_of(setting: Setting, lasts: Lasts) -> Course:
    """Simulate the passes of one pipeline, and return them.

    Equal rounds are left out if pass times do not vary and stages have one chunk (see `ROUNDS`).
    """
    grid, steady = setting.grid, lasts is unchanged
    stages, chunks, count = grid.dims.pp, len(grid.split[0]), microbatches_of(grid)
    blocking = setting.links.blocking
    occupied = {
        (rank, kind, chunk): setting.message * _crossing(rank, stages, chunk, chunks, kind)
        for rank in range(stages)
        for chunk in range(chunks)
        for kind in Kind
    }

    def takes(rank: int, operation: Operation, seconds: float) -> float:
        return lasts(rank, operation, seconds) + occupied[rank, operation.kind, operation.chunk]

    def played(microbatches: int) -> Timeline:
        free = 0.0 if blocking else setting.message
        own = takes if blocking and stages > 1 else lasts
        return play(grid, setting.passes, free, microbatches, lasts=own)

    odd, rounds = count % stages, ROUNDS
    while steady and chunks == 1 and count > (rounds + 1) * stages:
        several = played(rounds * stages + odd)
        last, before = _rounds(several, stages)
        if abs(last - before) < 1e-9 * last:
            left = (count - odd) // stages - rounds
            return Course(several, left * last, count / (rounds * stages + odd))
        rounds *= 2
    return Course(played(count))


def _crossing(rank: int, stages: int, chunk: int, chunks: int, kind: Kind) -> int:
    """Return the number of messages, 0 to 2, that a pass waits for and sends."""
    place, operation = (
        StagePosition(stage=rank, stages=stages, chunks=chunks),
        Operation(kind, 0, chunk),
    )
    return sum(each is not None for each in (place.needs(operation), place.makes(operation)))


def _rounds(course: Timeline, stages: int) -> tuple[float, float]:
    """Return the seconds of the last two rounds before the pipeline drains.

    A round is measured between backwards of the first stage.
    """
    stops = [float(p.stop) for p in course.ranks[0] if p.operation.kind is Kind.BACKWARD]
    ends = [stops[-1 - turns * stages] for turns in (1, 2, 3)]
    return ends[0] - ends[1], ends[1] - ends[2]


def jittered(factor: Callable[[int, Operation], float]) -> Lasts:
    """Return a `Lasts` that multiplies all passes by a factor."""
    return lambda rank, operation, seconds: seconds * factor(rank, operation)


def with_links(setting: Setting, links: Links) -> Setting:
    """Return the setting with other links."""
    return replace(setting, links=links)
