"""The contenders of the benchmark of message-driven pipelines, and stages that sleep unevenly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.pipeline.schedule import Kind, Operation, StagePosition
from tools.bench.pipeline.rank import SleepingStage
from tools.planner.timeline import Factor, Timeline, driven, even, jitter, slow, timeline

SLOW_STAGE, SLOW_FACTOR = 1, 1.5
SIGMA = 0.3
BALANCED, SLOW, JITTER = "balanced", "slow stage", "jitter"
PROFILES = (BALANCED, SLOW, JITTER)


@dataclass(frozen=True, kw_only=True)
class UnevenContender:
    """A way to run a step.

    `beyond` is the number of microbatches in flight beyond the number of stages, for the
    message-driven schedule; None means the fixed order of 1F1B. `ahead` is the number of forwards
    before the first backward beyond those of 1F1B. `calls` is how often a thread calls MPI before
    it pauses; None means as often as in a run.
    """

    name: str
    over_mpi: bool = False
    calls: int | None = None
    beyond: int | None = None
    ahead: int = 0

    def on_paper(
        self,
        stages: int,
        microbatches: int,
        *,
        factor: Factor,
        forward: float,
        backward: float,
        transfer: float = 0.0,
    ) -> Timeline:
        """Return the simulated step, in which messages and decisions take only `transfer`."""
        if self.beyond is None:
            ranks = [
                _in_turns(stages - 1 - stage + self.ahead, microbatches) for stage in range(stages)
            ]
        else:
            ranks = driven(stages, microbatches, stages + self.beyond)
        return timeline(ranks, factor=factor, forward=forward, backward=backward, transfer=transfer)


REFERENCE, DRIVEN = "1F1B, gloo", "message-driven"
CONTENDERS = (
    UnevenContender(name=REFERENCE, over_mpi=False),
    UnevenContender(name="1F1B, MPI", over_mpi=True),
    UnevenContender(name="1F1B, MPI called once", over_mpi=True, calls=1),
    UnevenContender(name=DRIVEN, over_mpi=True, beyond=0),
    UnevenContender(name=f"{DRIVEN}, limit p + 2", over_mpi=True, beyond=2),
)


ONLY_ON_PAPER = UnevenContender(name="1F1B, two more in flight", ahead=2)
"""Separates the effect of the higher limit from the effect of deciding by messages."""


def _in_turns(ahead: int, microbatches: int) -> list[Operation]:
    """Return `ahead` forwards, then one forward and one backward in turns.

    This is 1F1B if `ahead` is the number of later stages.
    """
    forwards = [Operation(Kind.FORWARD, number) for number in range(microbatches)]
    backwards = [Operation(Kind.BACKWARD, number) for number in range(microbatches)]
    ahead = min(ahead, microbatches)
    pairs = zip(forwards[ahead:], backwards, strict=False)
    left = backwards[microbatches - ahead :]
    return [*forwards[:ahead], *(each for pair in pairs for each in pair), *left]


def factor_of(profile: str, number: int) -> Factor:
    """Return the factor of a pass's time, in one round of a profile.

    It is the same for all contenders and in the simulation.
    """
    if profile == BALANCED:
        return even
    return slow(SLOW_STAGE, SLOW_FACTOR) if profile == SLOW else jitter(number, SIGMA)


class StagePass(NamedTuple):
    """A pass that a stage ran, in seconds of a clock shared by all processes of a machine."""

    kind: str
    microbatch: int
    start: float
    stop: float


class UnevenStage(SleepingStage):
    """A `SleepingStage` of one chunk whose passes take `factor` times as long, and are recorded."""

    def __init__(self, place: StagePosition, settings: dict[str, Any]) -> None:
        super().__init__(place, settings)
        self._rank, self._settings = place.stage, settings
        self.factor: Factor = even
        self.passes: list[StagePass] = []

    def forward(self, iteration: int, batch: Any, hidden: object, *, chunk: int) -> torch.Tensor:
        with self._noted(Operation(Kind.FORWARD, batch.index)) as factor:
            self._forward = self._settings["forward"] * factor
            return super().forward(iteration, batch, hidden, chunk=chunk)

    def backward(self, index: int, gradient: object, *, chunk: int) -> torch.Tensor | None:
        with self._noted(Operation(Kind.BACKWARD, index)) as factor:
            self._backward = self._settings["backward"] * factor
            return super().backward(index, gradient, chunk=chunk)

    @contextmanager
    def _noted(self, operation: Operation) -> Iterator[float]:
        start = time.monotonic()
        yield float(self.factor(self._rank, operation))
        kind = operation.kind.name.lower()
        self.passes.append(StagePass(kind, operation.microbatch, start, time.monotonic()))
