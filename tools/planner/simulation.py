"""Simulation of a step, event by event.

The events are passes, messages, collectives and optimizer updates, with durations from the cost
model of `seconds`.

    stage 0   F F F . . B B B     norm    norm | optimizer
    network                    bucket bucket               gather      first in, first out
    stage 1   . F B F B F B .     norm norm    | optimizer
    network                 bucket bucket                  gather
                                               '- all ranks know the norm

The cost model adds up phases; here they overlap: a stage that finishes early reduces early. With
one stage and steady passes both agree exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from megatron.data_parallel.bucket_plan import PlannedCollective
from megatron.memory_estimate import microbatches_of
from tools.planner.course import Course, Setting, course_of
from tools.planner.seconds import collective_seconds, link_of
from tools.planner.updates import (
    BucketSums,
    UpdateJob,
    embedding_seconds,
    gather_delay,
    in_turns,
    jobs_of,
    norm_seconds,
    play_sums,
    streams,
    update_seconds,
)


class SimulatedEvent(NamedTuple):
    """An activity of a stage's network or device other than a pass.

    The network has "reduce" and "gather", the device "norm" and "optimizer"; seconds count from the
    start of the step.
    """

    stage: int
    lane: str
    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class SimulatedPhases:
    """Seconds that add up to a step.

    `compute` and `tensor` (waiting for sums) are of the busiest stage; `messages` kept it from
    computing; it spent `bubble` waiting for other stages. `exposed` is the part of `reduce` after
    the last backward, followed by norm and `optimizer`.
    """

    compute: float
    tensor: float
    messages: float
    bubble: float
    reduce: float
    exposed: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return (
            self.compute + self.tensor + self.messages + self.bubble + self.exposed + self.optimizer
        )


@dataclass(frozen=True)
class SimulatedStep:
    """A step of one kind; the run has `count` of them."""

    name: str
    count: int
    courses: Sequence[Course]
    phases: SimulatedPhases
    events: Sequence[SimulatedEvent] = field(default_factory=list[SimulatedEvent])

    @property
    def length(self) -> float:
        """Seconds of the step."""
        return self.phases.total


def simulate(setting: Setting) -> list[SimulatedStep]:
    """Simulate a step of each kind that the run has, and return the steps."""
    courses = [course_of(setting, lasts) for lasts in setting.lasts]
    found: list[SimulatedStep] = []
    for number, kind in enumerate(setting.kinds):
        reduction = _Reduction(setting, courses, number)
        events = list(reduction.events())
        phases = _phases(setting, courses, events, reduction.free)
        found.append(SimulatedStep(kind.name, kind.steps, courses, phases, events))
    return found


def mean_seconds(steps: Sequence[SimulatedStep]) -> float:
    """Return the mean seconds of a step of the run."""
    count = sum(step.count for step in steps)
    if not count:
        return steps[0].length
    return sum(step.count * step.length for step in steps) / count


class _Reduction:
    """The simulation of collectives and optimizers of a step, after the passes of `courses`."""

    def __init__(self, setting: Setting, courses: Sequence[Course], kind: int) -> None:
        self._setting, self._courses, self._kind = setting, courses, kind
        self._grid = setting.grid
        self._stages = setting.grid.dims.pp
        # The times at which the stages may begin the next step.
        self.free: list[float] = []
        chunks = len(self._grid.split[0])
        # A collective starts when its last rank arrives.
        self._backwards: list[list[tuple[float, float]]] = []
        for stage in range(self._stages):
            turns = [course.last_backwards(stage, chunks) for course in courses]
            self._backwards.append(
                [
                    (max(turn[k][0] for turn in turns), max(turn[k][1] for turn in turns))
                    for k in range(chunks)
                ]
            )

    def events(self) -> Iterator[SimulatedEvent]:
        """Yield the events of all stages: reductions, norms, updates and gathers."""
        setting, stages = self._setting, range(self._stages)
        found: list[SimulatedEvent] = []
        sums = [self._reduce(stage, found) for stage in stages]
        # All ranks vote on a step after their backwards.
        voted = max(self._over(stage) for stage in stages)
        jobs = [jobs_of(self._grid, setting.ranks[stage], sums[stage]) for stage in stages]
        yield from sorted(found, key=lambda event: (event.stage, event.start))
        update = partial(update_seconds, self._grid, setting.site)
        norm = partial(norm_seconds, self._grid, setting.site)
        if streams(self._grid.config):
            yield from self._run("optimizer", jobs, voted, lambda n: norm(n) + update(n))
            return
        looks = list(self._run("norm", jobs, voted, norm))
        yield from looks
        agreed = max(event.stop for event in looks)
        updates = list(self._run("optimizer", jobs, agreed, update))
        yield from updates
        for stage in stages:
            free = max(event.stop for event in updates if event.stage == stage)
            late, rank, updated = sums[stage].late, setting.ranks[stage], free
            if overlaps := self._grid.config.parallel.overlap_param_gather:
                late = late[::-1]
            for sent in late:
                start, free = free, free + self._takes(sent)
                yield SimulatedEvent(stage, "gather", f"{sent.kind} {sent.bucket}", start, free)
            if overlaps:
                forward = setting.passes[stage].forward
                free = updated + gather_delay(rank, late, takes=self._takes, forward=forward)
            self.free.append(free)

    def _run(
        self,
        lane: str,
        jobs: Sequence[list[UpdateJob]],
        since: float,
        takes: Callable[[float], float],
    ) -> Iterator[SimulatedEvent]:
        """Yield the events of `jobs`, which run one after the other on the device of each stage."""
        for stage, its in enumerate(jobs):
            for job, start, stop in in_turns(its, since, takes):
                yield SimulatedEvent(stage, lane, f"{lane} {job.name}", start, stop)

    def _reduce(self, stage: int, found: list[SimulatedEvent]) -> BucketSums:
        """Return the collectives of one stage, and append the events of reductions to `found`."""
        rank = self._setting.ranks[stage]
        step = self._grid.path.plan_traffic(self._grid.config, rank)[self._kind]
        overlaps = self._grid.config.parallel.overlap_grad_reduce and step.overlaps

        def ready(number: int, share: float, free: float) -> float:
            bucket = rank.buckets[number]
            if bucket.kind.tied and self._stages > 1:
                start = max(free, self._over(0), self._over(self._stages - 1))
                link = self._setting.links.message
                stop = start + embedding_seconds(self._grid, link, bucket.numel)
                found.append(SimulatedEvent(stage, "reduce", "embedding sum", start, stop))
                return stop
            if bucket.kind.partial or bucket.kind.tied or not overlaps:
                return self._over(stage)
            return self._ready(stage, share)

        sums = play_sums(rank, step.sent, ready=ready, takes=self._takes)
        for each, start, stop in sums.done:
            found.append(SimulatedEvent(stage, "reduce", f"{each.kind} {each.bucket}", start, stop))
        return sums

    def _takes(self, sent: PlannedCollective) -> float:
        setting, dims = self._setting, self._grid.dims
        link = link_of(sent, setting.site, dims, setting.links.reduce)
        return collective_seconds(sent, link, dims.dp)

    def _over(self, stage: int) -> float:
        """Return the end of a stage's last backward."""
        return max(stop for _, stop in self._backwards[stage])

    def _ready(self, stage: int, share: float) -> float:
        """Return the time at which a share of a stage's gradient is complete.

        The gradient of a chunk grows evenly during the chunk's last backward.
        """
        turns = self._backwards[stage]
        at = share * len(turns)
        number = min(int(at), len(turns) - 1)
        start, stop = turns[number]
        # A bucket that a chunk's last gradient fills does not wait for the next chunk.
        if number and at == number:
            return turns[number - 1][1]
        return start + (at - number) * (stop - start)


def _phases(
    setting: Setting,
    courses: Sequence[Course],
    events: Sequence[SimulatedEvent],
    free: Sequence[float],
) -> SimulatedPhases:
    grid = setting.grid
    count = microbatches_of(grid)
    over = max(float(course.timeline.length) + course.skipped for course in courses)
    busy, stage = max(
        (course.rounds * sum(float(p.stop) - float(p.start) for p in passed), -number)
        for course in courses
        for number, passed in enumerate(course.timeline.ranks)
    )
    stage = -stage
    lanes = {lane: [e for e in events if e.lane == lane] for lane in ("reduce", "gather")}
    sent = [
        sum(e.stop - e.start for e in events if e.stage == s and e.lane in lanes)
        for s in range(grid.dims.pp)
    ]
    agreed = max([over, *(e.stop for e in lanes["reduce"])])
    updated = max([agreed, *(e.stop for e in events if e.lane == "optimizer")])
    end = max([updated, *free])
    ends = (stage == 0) + (stage == grid.dims.pp - 1)
    crossing = count * (4 * len(grid.split[0]) - 2 * ends) if grid.dims.pp > 1 else 0
    messages = setting.message * crossing if setting.links.blocking else 0.0
    tensor = count * setting.passes[stage].tensor
    return SimulatedPhases(
        compute=busy - tensor - messages,
        tensor=tensor,
        messages=messages,
        bubble=over - busy,
        reduce=max(sent),
        exposed=agreed - over + (end - updated),
        optimizer=updated - agreed,
    )
