"""Simulation of all ranks of a pipeline, with given times of passes and messages.

It gives the duration of a step and its bubble, and shows that ranks do not deadlock. No torch, no
ranks.

    [interleaved(rank, p, v, m) for each rank] --.
                                                  >--> timeline --> Timeline
    driven(p, m, limit) -------------------------'
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from typing import Protocol, Self

from megatron.pipeline.message_driven import BatchProgress
from megatron.pipeline.schedule import Kind, Message, Operation, StagePosition

Time = int | float | Fraction
"""Time in any unit; whole numbers and fractions stay exact."""
Factor = Callable[[int, Operation], Time]
"""A function that returns the factor of a rank's pass relative to the others."""


class Deadlock(Exception):
    """Ranks wait for messages that no rank will send."""


class Player(Protocol):
    """The progress of a rank in its operations; an immutable value."""

    def possible(self) -> Sequence[Operation]:
        """Return the possible next operations, the most urgent first; empty at the end."""
        ...

    def after(self, operation: Operation) -> Self:
        """Return the progress after one of these operations."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A `Player` with a fixed order, whose first `done` operations have run."""

    order: Sequence[Operation]
    done: int = 0

    def possible(self) -> Sequence[Operation]:
        """Return the next operation alone; empty at the end."""
        return self.order[self.done : self.done + 1]

    def after(self, operation: Operation) -> Fixed:
        """Return the progress after the next operation."""
        return replace(self, done=self.done + 1)


@dataclass(frozen=True)
class Passed:
    """An operation, with its start and end."""

    operation: Operation
    start: Time
    stop: Time


@dataclass(frozen=True)
class Timeline:
    """The operations of each rank over time, in the caller's unit of time."""

    ranks: list[list[Passed]]

    @property
    def length(self) -> Time:
        """Time from the start to the end of the last operation of any rank."""
        return max(passed[-1].stop for passed in self.ranks)

    @property
    def bubble(self) -> Fraction:
        """Idle time divided by busy time of the busiest rank.

        The ratio is (p - 1) / (v m) if stages take equal times (Narayanan et al. 2021, section 2.2;
        Eq. 6 and 7 of the SAMO paper).
        """
        busy = max(
            sum(Fraction(each.stop) - Fraction(each.start) for each in passed)
            for passed in self.ranks
        )
        return Fraction(self.length) / busy - 1

    def in_flight(self, rank: int) -> int:
        """Return the maximum number of chunk inputs that a rank holds, from forward to backward."""
        held = most = 0
        for each in self.ranks[rank]:
            held += 1 if each.operation.kind is Kind.FORWARD else -1
            most = max(most, held)
        return most

    def __str__(self) -> str:
        """Draw one row per rank with one letter per unit of time: microbatch A, B, ...

        Capitals are forward, small letters backward, followed by the chunk if there are several.
        Times must be whole numbers.
        """
        chunked = any(each.operation.chunk for passed in self.ranks for each in passed)
        width = 2 if chunked else 1
        rows = []
        for passed in self.ranks:
            cells = ["." * width] * int(self.length)
            for each in passed:
                start, stop = int(each.start), int(each.stop)
                cells[start:stop] = [_letter(each.operation, chunked)] * (stop - start)
            rows.append(" ".join(cells))
        return "\n".join(rows)


def driven(stages: int, microbatches: int, limit: int) -> list[BatchProgress]:
    """Return the progress of every rank of a message-driven pipeline before the batch."""
    return [
        BatchProgress(
            place=StagePosition(stage=rank, stages=stages), microbatches=microbatches, limit=limit
        )
        for rank in range(stages)
    ]


def even(rank: int, operation: Operation) -> Time:
    """Return 1: the `Factor` of equal passes on all ranks."""
    return 1


def slow(stage: int, by: Time) -> Factor:
    """Return a `Factor` that multiplies all passes of one rank."""
    return lambda rank, operation: by if rank == stage else 1


def jitter(seed: int, sigma: float = 0.3) -> Factor:
    """Return a `Factor` that is log-normal with mean 1 for each pass.

    `sigma` is the standard deviation of its logarithm. It depends on the pass only, not on when the
    pass runs.
    """

    def factor(rank: int, operation: Operation) -> float:
        drawn = random.Random(f"{seed} {rank} {operation}")
        return drawn.lognormvariate(-sigma * sigma / 2, sigma)

    return factor


def timeline(
    ranks: Sequence[Player | Sequence[Operation]],
    *,
    chunks: int = 1,
    forward: Time = 1,
    backward: Time = 1,
    transfer: Time = 0,
    factor: Factor = even,
) -> Timeline:
    """Simulate a batch: each rank runs its next operation as early as messages allow.

    Args:
        ranks: For each rank an order, or a player that decides as messages arrive. A message that
            arrives just when a rank becomes free counts as arrived.
        chunks: Number of model chunks of a rank.
        forward: Time of a forward pass through one chunk, before its factor.
        backward: Time of a backward pass through one chunk, before its factor.
        transfer: Time of a message, which occupies no rank.
        factor: Returns the factor of each pass.

    Raises:
        Deadlock: Ranks wait for ever; the error names the messages.
    """
    players = [Fixed(each) if isinstance(each, Sequence) else each for each in ranks]
    places = [
        StagePosition(stage=r, stages=len(players), chunks=chunks) for r in range(len(players))
    ]
    seconds = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    passed: list[list[Passed]] = [[] for _ in players]
    there: set[Message] = set()
    events = _Events()
    for rank in range(len(players)):
        events.add(0, rank)
    while events.left:
        now, arrived, awake = events.next()
        there |= arrived
        for rank in awake:
            done = passed[rank]
            operation = _ready(players[rank], places[rank], there)
            if operation is None or (done and done[-1].stop > now):
                continue
            stop = now + seconds[operation.kind] * factor(rank, operation)
            done.append(Passed(operation, now, stop))
            players[rank] = players[rank].after(operation)
            events.add(stop, rank)
            if (made := places[rank].makes(operation)) is not None:
                events.add(stop + transfer, _receiver(made, len(players)), made)
    _refuse_waiting(places, players)
    return Timeline(passed)


class _Events:
    """The times at which a rank may start an operation: it is free, or a message arrived."""

    def __init__(self) -> None:
        self.left: list[tuple[Time, int, int, Message | None]] = []
        self._number = count()

    def add(self, time: Time, rank: int, message: Message | None = None) -> None:
        # The number orders events of equal time, which need not be comparable.
        heapq.heappush(self.left, (time, next(self._number), rank, message))

    def next(self) -> tuple[Time, set[Message], set[int]]:
        """Return all events of the next time that has any."""
        now = self.left[0][0]
        arrived, awake = set[Message](), set[int]()
        while self.left and self.left[0][0] == now:
            _, _, rank, message = heapq.heappop(self.left)
            awake.add(rank)
            if message is not None:
                arrived.add(message)
        return now, arrived, awake


def _ready(player: Player, place: StagePosition, there: Container[Message]) -> Operation | None:
    for operation in player.possible():
        needed = place.needs(operation)
        if needed is None or needed in there:
            return operation
    return None


def _receiver(message: Message, ranks: int) -> int:
    """Return the rank behind the boundary for an activation, the rank before it for a gradient."""
    return (message.boundary + (message.kind is Kind.FORWARD)) % ranks


def _refuse_waiting(places: Sequence[StagePosition], players: Sequence[Player]) -> None:
    waiting = [
        f"rank {place.stage} for {' or '.join(str(place.needs(each)) for each in possible)}"
        for place, player in zip(places, players, strict=True)
        if (possible := player.possible())
    ]
    if waiting:
        raise Deadlock(f"these wait for ever: {', '.join(waiting)}")


def _letter(operation: Operation, chunked: bool) -> str:
    letter = chr(ord("A" if operation.kind is Kind.FORWARD else "a") + operation.microbatch % 26)
    return f"{letter}{operation.chunk}" if chunked else letter
