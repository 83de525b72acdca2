"""Plays a step event by event: passes, messages, collectives, optimizer, each for as long as the
cost model of `planning.seconds` says.

    stage 0   F F F . . B B B         |   | optimizer |
    network                    bucket bucket          gather      first in, first out
    stage 1   . F B F B F B .         |   | optimizer |
    network                 bucket bucket     gather
                                      '- all ranks agree that the step is good

Where the model adds up phases, here they overlap as they fall: a stage that is through early
reduces early. With one stage and steady passes the two agree exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.data_parallel.bucket_plan import Sent
from megatron.data_parallel.path import BYTES
from megatron.planning.activations import microbatches_of
from megatron.planning.course import Course, Setting, course_of
from megatron.planning.seconds import collective_seconds, optimizer_seconds


class Event(NamedTuple):
    """What a stage's network or optimizer does, in seconds from the start of the step."""

    stage: int
    lane: str
    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Phases:
    """Of a step, seconds that add up to it: `compute` of the busiest stage, `tensor` of it waiting
    for sums, `messages` that kept it from computing, `bubble` while it waited for others, `exposed`
    what of `reduce` is left when backward is over everywhere, and the optimizer's."""

    compute: float
    tensor: float
    messages: float
    bubble: float
    reduce: float
    exposed: float
    optimizer: float

    @property
    def total(self) -> float:
        """The whole step."""
        return (
            self.compute + self.tensor + self.messages + self.bubble + self.exposed + self.optimizer
        )


@dataclass(frozen=True)
class SimulatedStep:
    """A step of one kind; `count` of the run are of it."""

    name: str
    count: int
    courses: Sequence[Course]
    phases: Phases
    events: Sequence[Event] = field(default_factory=list[Event])

    @property
    def length(self) -> float:
        """Seconds."""
        return self.phases.total


def simulate(setting: Setting) -> list[SimulatedStep]:
    """A step of each kind that the run has."""
    courses = [course_of(setting, lasts) for lasts in setting.lasts]
    found: list[SimulatedStep] = []
    for number, kind in enumerate(setting.kinds):
        events = list(_Reduction(setting, courses, number).events())
        found.append(
            SimulatedStep(kind.name, kind.steps, courses, _phases(setting, courses, events), events)
        )
    return found


def mean_seconds(steps: Sequence[SimulatedStep]) -> float:
    """Of a step of the run."""
    count = sum(step.count for step in steps)
    if not count:
        return steps[0].length
    return sum(step.count * step.length for step in steps) / count


class _Reduction:
    """Collectives and optimizers of a step, after the passes of `courses`."""

    def __init__(self, setting: Setting, courses: Sequence[Course], kind: int) -> None:
        self._setting, self._courses, self._kind = setting, courses, kind
        self._grid = setting.grid
        self._stages = setting.grid.dims.pp
        chunks = len(self._grid.split[0])
        # A collective starts when the last of its ranks is there.
        self._backwards: list[list[tuple[float, float]]] = []
        for stage in range(self._stages):
            turns = [course.last_backwards(stage, chunks) for course in courses]
            self._backwards.append(
                [
                    (max(turn[k][0] for turn in turns), max(turn[k][1] for turn in turns))
                    for k in range(chunks)
                ]
            )

    def events(self) -> Iterator[Event]:
        """All of them."""
        config = self._grid.config
        free = [0.0] * self._stages
        reduced: list[dict[int, float]] = []
        late: list[tuple[int, Sent]] = []
        for stage in range(self._stages):
            done = dict[int, float]()
            for event, sent in self._reduce(stage, late):
                done[sent.bucket] = free[stage] = event.stop
                yield event
            reduced.append(done)
        ends = [self._over(stage) for stage in range(self._stages)]
        agreed = max(*free, *ends, 0.0)
        # Without clipping nobody needs the norm of all buckets to update one (AxoNN, V-C).
        streams = config.offload.optimizer_cpu_offload and not config.optimizer.clip_grad
        through: list[float] = []
        for stage, rank in enumerate(self._setting.ranks):
            whole = optimizer_seconds(self._grid, self._setting.site, rank)
            entries = sum(bucket.numel for bucket in rank.buckets)
            now = 0.0 if streams else agreed
            for number, bucket in enumerate(rank.buckets):
                start = max(now, reduced[stage].get(number, 0.0), ends[stage])
                now = start + whole * bucket.numel / entries
                yield Event(stage, "optimizer", f"update {number}", start, now)
            through.append(now)
        for stage, sent in late:
            takes = self._takes(sent)
            start, through[stage] = through[stage], through[stage] + takes
            yield Event(stage, "gather", f"{sent.kind} {sent.bucket}", start, start + takes)

    def _reduce(self, stage: int, late: list[tuple[int, Sent]]) -> Iterator[tuple[Event, Sent]]:
        """Of one stage until its optimizer may run; what comes after that goes to `late`."""
        grid, rank = self._grid, self._setting.ranks[stage]
        sent_here = grid.path.plan_traffic(grid.config, rank)[self._kind].sent
        entries = sum(bucket.numel for bucket in rank.buckets)
        seen, filled, free = set[int](), 0, 0.0
        rest: list[Sent] = []
        for sent in sent_here:
            if sent.bucket in seen:
                (rest.append(sent) if sent.kind != "all-gather" else late.append((stage, sent)))
                continue
            seen.add(sent.bucket)
            bucket = rank.buckets[sent.bucket]
            filled += bucket.numel
            ready = self._ready(stage, filled / entries)
            if bucket.kind.tied and self._stages > 1:
                # The table's two gradients, one at each end of the pipeline, are added first.
                ready = max(free, self._over(0), self._over(self._stages - 1))
                ready, start = ready + self._embedding_sum(bucket.numel), ready
                yield Event(stage, "reduce", "embedding sum", start, ready), sent
            elif bucket.kind.partial or not grid.config.parallel.overlap_grad_reduce:
                ready = self._over(stage)
            start = max(free, ready)
            free = start + self._takes(sent)
            yield Event(stage, "reduce", f"{sent.kind} {sent.bucket}", start, free), sent
        for sent in rest:
            start, free = free, free + self._takes(sent)
            yield Event(stage, "reduce", f"{sent.kind} {sent.bucket}", start, free), sent

    def _takes(self, sent: Sent) -> float:
        return collective_seconds(sent, self._setting.links.reduce, self._grid.dims.dp)

    def _embedding_sum(self, entries: int) -> float:
        grad = BYTES[self._grid.config.precision.grad_dtype]
        return self._setting.links.message.ring(grad * entries, 2, rounds=2)

    def _over(self, stage: int) -> float:
        """When a stage's last backward is through."""
        return max(stop for _, stop in self._backwards[stage])

    def _ready(self, stage: int, share: float) -> float:
        """When so much of its gradient is there: it appears evenly in each chunk's last
        backward."""
        turns = self._backwards[stage]
        at = share * len(turns)
        number = min(int(at), len(turns) - 1)
        start, stop = turns[number]
        # What fills with a chunk's last gradient does not wait for the next chunk's first.
        if number and at == number:
            return turns[number - 1][1]
        return start + (at - number) * (stop - start)


def _phases(setting: Setting, courses: Sequence[Course], events: Sequence[Event]) -> Phases:
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
    sent = [sum(e.stop - e.start for e in events if e.stage == s and e.lane != "optimizer")
            for s in range(grid.dims.pp)]  # fmt: skip
    agreed = max([over, *(e.stop for e in lanes["reduce"])])
    updated = max([agreed, *(e.stop for e in events if e.lane == "optimizer")])
    end = max([updated, *(e.stop for e in lanes["gather"])])
    ends = (stage == 0) + (stage == grid.dims.pp - 1)
    crossing = count * (4 * len(grid.split[0]) - 2 * ends) if grid.dims.pp > 1 else 0
    messages = setting.message * crossing if setting.links.blocking else 0.0
    tensor = count * setting.passes[stage].tensor
    return Phases(
        compute=busy - tensor - messages,
        tensor=tensor,
        messages=messages,
        bubble=over - busy,
        reduce=max(sent),
        exposed=agreed - over + (end - updated),
        optimizer=updated - agreed,
    )
