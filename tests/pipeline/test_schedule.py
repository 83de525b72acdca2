"""Tests of schedules: as drawn, within their bounds, as fast as in the papers, deadlock-free."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from megatron.pipeline.schedule import (
    Kind,
    Operation,
    StagePosition,
    forward_only,
    interleaved,
    one_f_one_b,
    warm_up,
)
from tools.planner.timeline import Deadlock, timeline

DRAWN = {
    (1, 1, 3): """
        A a B b C c
    """,
    (2, 1, 3): """
        A B . a C b . c
        . A a B b C c .
    """,
    (3, 1, 4): """
        A B C . . a D b . c . d
        . A B . a C b D c . d .
        . . A a B b C c D d . .
    """,
    (4, 1, 2): """
        A B . . . . . a . b
        . A B . . . a . b .
        . . A B . a . b . .
        . . . A a B b . . .
    """,
    (2, 2, 4): """
        A0 B0 A1 B1 C0 a1 D0 b1 C1 a0 D1 b0 .. c1 .. d1 c0 d0
        .. A0 B0 A1 a1 B1 b1 C0 a0 D0 b0 C1 c1 D1 d1 c0 d0 ..
    """,
    (3, 2, 3): """
        A0 B0 C0 A1 B1 C1 .. .. a1 .. b1 .. c1 a0 b0 c0
        .. A0 B0 C0 A1 B1 C1 a1 .. b1 .. c1 a0 b0 c0 ..
        .. .. A0 B0 C0 A1 a1 B1 b1 C1 c1 a0 b0 c0 .. ..
    """,
}
"""Rows are ranks, columns units of time.

Microbatches are A, B, ... forward and a, b, ... backward, followed by the chunk. The keys are
stages, chunks and microbatches.
"""

GRIDS = [
    (p, v, m)
    for p, v, m in product((1, 2, 3, 4, 6, 8), (1, 2, 3), (1, 2, 3, 4, 8, 12, 24))
    if v == 1 or (p > 1 and m % p == 0)
]


def orders(p: int, v: int, m: int) -> list[list[Operation]]:
    return [interleaved(rank, p, v, m) for rank in range(p)]


@pytest.mark.parametrize("sizes", DRAWN, ids=str)
def test_orders_are_as_drawn(sizes: tuple[int, int, int]) -> None:
    drawn = [row.strip() for row in DRAWN[sizes].strip().splitlines()]
    shown = str(timeline(orders(*sizes), chunks=sizes[1])).splitlines()
    assert shown == drawn


def test_every_pass_of_every_chunk_runs_once_and_backward_comes_later() -> None:
    for p, v, m in GRIDS:
        for order in orders(p, v, m):
            assert sorted(order, key=str) == sorted(
                (Operation(kind, i, c) for kind in Kind for i in range(m) for c in range(v)),
                key=str,
            )
            for _, i, c in order:
                forward, backward = (order.index(Operation(kind, i, c)) for kind in Kind)
                assert forward < backward


def test_no_grid_deadlocks_and_bubbles_are_those_of_the_paper() -> None:
    """The bubble is (p - 1) / (v m) for any times of the passes, where m fills the stages."""
    for (p, v, m), (forward, backward) in product(GRIDS, ((1, 1), (1, 2), (3, 2))):
        found = timeline(orders(p, v, m), chunks=v, forward=forward, backward=backward)
        assert found.bubble == Fraction(p - 1, v * m), (p, v, m)
        slow = timeline(orders(p, v, m), chunks=v, forward=1, backward=2, transfer=5)
        assert slow.length >= found.length or (forward, backward) == (3, 2)
        timeline([forward_only(p, v, m)] * p, chunks=v)


def test_microbatches_in_flight_are_bounded() -> None:
    for p, v, m in GRIDS:
        found = timeline(orders(p, v, m), chunks=v)
        for rank in range(p):
            most = min(warm_up(rank, p, v, m) + 1, v * m)
            assert found.in_flight(rank) <= most
            if v == 1:
                assert found.in_flight(rank) == min(p - rank, m)
                assert one_f_one_b(rank, p, m) == interleaved(rank, p, 1, m)


def test_both_ends_of_every_edge_issue_its_messages_in_one_order() -> None:
    """A transport without tags, such as NCCL's, relies on this order."""
    for p, v, m in GRIDS:
        for make in (interleaved, lambda _, *sizes: forward_only(*sizes)):
            places = [StagePosition(stage=rank, stages=p, chunks=v) for rank in range(p)]
            runs = [make(rank, p, v, m) for rank in range(p)]
            for rank, kind in product(range(p), Kind):
                to = (rank + (1 if kind is Kind.FORWARD else -1)) % p
                sent = [places[rank].makes(each) for each in runs[rank] if each.kind is kind]
                needed = [places[to].needs(each) for each in runs[to] if each.kind is kind]
                assert [one for one in sent if one] == [one for one in needed if one]


def test_no_rank_has_more_unanswered_sends_than_the_first_has_in_flight() -> None:
    """A wait for the oldest send beyond those never blocks: it has been received."""
    for p, v, m in GRIDS:
        places = [StagePosition(stage=rank, stages=p, chunks=v) for rank in range(p)]
        for backward, transfer in ((1, 0), (5, 0), (1, 7)):
            found = timeline(orders(p, v, m), chunks=v, backward=backward, transfer=transfer)
            begun = {
                places[rank].needs(each.operation): each.start
                for rank in range(p)
                for each in found.ranks[rank]
            }
            for rank, kind in product(range(p), Kind):
                sends = [
                    (each.stop, begun[message])
                    for each in found.ranks[rank]
                    if each.operation.kind is kind
                    and (message := places[rank].makes(each.operation)) is not None
                ]
                for number, (now, _) in enumerate(sends):
                    under_way = sum(received > now for _, received in sends[: number + 1])
                    assert under_way <= warm_up(0, p, v, m) + 1, (p, v, m, rank, kind)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    first = one_f_one_b(1, 2, 2)  # a forward and a backward in turns, on both ranks
    second = [first[0], first[2], first[1], first[3]]
    assert timeline([second, first]).length == 6
    with pytest.raises(Deadlock, match=r"rank 0 for gradient 0\.0, rank 1 for activation 1\.0"):
        timeline([first, second])
