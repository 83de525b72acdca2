"""Plays the orders of all ranks of a pipeline against each other, on paper.

Tells how long a step takes, how much of it is bubble, and that no ranks wait for each other for
ever, for times of a pass that the caller chooses. No torch, no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.pipeline.schedule import Kind, Message, Operation, Place


class Deadlock(Exception):
    """Ranks that wait for messages which nobody is going to send."""


@dataclass(frozen=True)
class Passed:
    """An operation, and when it ran."""

    operation: Operation
    start: int
    stop: int


@dataclass(frozen=True)
class Timeline:
    """What each rank did when, in the caller's unit of time."""

    ranks: list[list[Passed]]

    @property
    def length(self) -> int:
        """From the start to the end of the last operation of any rank."""
        return max(passed[-1].stop for passed in self.ranks)

    @property
    def bubble(self) -> Fraction:
        """Idle over busy time, of the rank that is busy longest: (p - 1) / (v m) where stages take
        equal times (Narayanan et al. 2021, section 2.2)."""
        busy = max(sum(each.stop - each.start for each in passed) for passed in self.ranks)
        return Fraction(self.length - busy, busy)

    def in_flight(self, rank: int) -> int:
        """Most chunk inputs that a rank held at a time, from forward to backward."""
        held = most = 0
        for each in self.ranks[rank]:
            held += 1 if each.operation.kind is Kind.FORWARD else -1
            most = max(most, held)
        return most

    def __str__(self) -> str:
        """One row a rank, one letter a unit of time: microbatch A, B, ... forward and a, b, ...
        backward, followed by the chunk where there is more than one."""
        chunked = any(each.operation.chunk for passed in self.ranks for each in passed)
        width = 2 if chunked else 1
        rows = []
        for passed in self.ranks:
            cells = ["." * width] * self.length
            for each in passed:
                cells[each.start : each.stop] = [_letter(each.operation, chunked)] * (
                    each.stop - each.start
                )
            rows.append(" ".join(cells))
        return "\n".join(rows)


def timeline(
    orders: Sequence[Sequence[Operation]],
    *,
    chunks: int = 1,
    forward: int = 1,
    backward: int = 1,
    transfer: int = 0,
) -> Timeline:
    """Run each rank's order as early as its messages allow. `forward` and `backward`: time of a
    pass through one chunk; `transfer`: of a message, which occupies no rank.

    Raises `Deadlock`, naming what each rank waits for.
    """
    places = [Place(stage=r, stages=len(orders), chunks=chunks) for r in range(len(orders))]
    seconds = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    passed: list[list[Passed]] = [[] for _ in orders]
    there: dict[Message, int] = {}
    moved = True
    while moved:
        moved = False
        for place, order, done in zip(places, orders, passed, strict=True):
            while len(done) < len(order):
                operation = order[len(done)]
                needed = place.needs(operation)
                if needed is not None and needed not in there:
                    break
                start = max(done[-1].stop if done else 0, there[needed] if needed else 0)
                stop = start + seconds[operation.kind]
                done.append(Passed(operation, start, stop))
                made = place.makes(operation)
                if made is not None:
                    there[made] = stop + transfer
                moved = True
    _refuse_waiting(places, orders, passed)
    return Timeline(passed)


def _refuse_waiting(
    places: Sequence[Place], orders: Sequence[Sequence[Operation]], passed: list[list[Passed]]
) -> None:
    waiting = [
        f"rank {place.stage} for {place.needs(order[len(done)])}"
        for place, order, done in zip(places, orders, passed, strict=True)
        if len(done) < len(order)
    ]
    if waiting:
        raise Deadlock(f"these wait for ever: {', '.join(waiting)}")


def _letter(operation: Operation, chunked: bool) -> str:
    letter = chr(ord("A" if operation.kind is Kind.FORWARD else "a") + operation.microbatch % 26)
    return f"{letter}{operation.chunk}" if chunked else letter
