"""Tests of a stage that runs what has arrived.

It stays within its limit, never deadlocks, gives the gradients of 1F1B bit by bit, and decides
alike on all tensor-parallel ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.sections import split_layers
from megatron.parallel.groups import ALONE, Group, ProcessGroups
from megatron.parallel.traffic import Calls
from megatron.pipeline.message_driven import WAIT, BatchProgress, MessageDriven
from megatron.pipeline.runner import Pipeline
from megatron.pipeline.schedule import Kind, Message, Operation, StagePosition, one_f_one_b
from megatron.pipeline.stage import Stage
from megatron.timers import Timers
from tests.pipeline.loopback import (
    ArrivalLoopback,
    DrawnMailbox,
    HeldMailbox,
    Loopback,
    Mailbox,
    on_threads,
)
from tests.pipeline.test_stage import MODEL, SCALE, gradients, microbatches, model
from tests.ranks import Ranks
from tools.planner.timeline import driven, even, jitter, slow, timeline

DRAWN = {
    (2, 4, 2, 2, 0): """
        A B . . a a C b b D c c . d d
        . A a a B b b C c c D d d . .
    """,
    (2, 4, 3, 2, 2): """
        A B C . . . . . a a D b b . c c . . d d
        . . . A a a B b b C c c . D d d . . . .
    """,
    (3, 4, 4, 1, 1): """
        A B C D . . . . . a . b . c . d
        . . A B C D . a . b . c . d . .
        . . . . A a B b C c D d . . . .
    """,
    (3, 4, 3, 1, 0): """
        A B C . . a D b . c . d
        . A B C a . b D c . d .
        . . A a B b C c D d . .
    """,
}
"""Charts as in test_schedule, by stages, microbatches, limit, times of backward and transfer."""


@pytest.mark.parametrize("sizes", DRAWN, ids=str)
def test_courses_are_as_drawn(sizes: tuple[int, int, int, int, int]) -> None:
    stages, count, limit, backward, transfer = sizes
    drawn = [row.strip() for row in DRAWN[sizes].strip().splitlines()]
    shown = timeline(driven(stages, count, limit), backward=backward, transfer=transfer)
    assert str(shown).splitlines() == drawn


def test_with_both_kinds_here_backward_goes_first() -> None:
    middle = driven(3, 4, 3)[1]
    gradient, activation = Message(Kind.BACKWARD, 0, 1), Message(Kind.FORWARD, 1, 0)
    assert middle.choose([]) is None
    one = middle.after(Operation(Kind.FORWARD, 0))
    assert one.choose([activation, gradient]) == Operation(Kind.BACKWARD, 0)
    assert one.choose([activation]) == Operation(Kind.FORWARD, 1)
    assert one.choose([Message(Kind.FORWARD, 1, 1)]) is None, "of another boundary"


def test_ends_of_a_pipeline_have_no_choice() -> None:
    for stages, limit, count in product((1, 2, 3), (1, 2, 5), (1, 4)):
        for player in (driven(stages, count, limit)[i] for i in (0, -1)):
            while possible := player.possible():
                assert len(possible) == 1
                player = player.after(possible[0])
            assert player.forwards == player.backwards == count


class Line:
    """A pipeline of message-driven ranks whose messages arrive on command."""

    def __init__(self, stages: int, count: int, limit: int) -> None:
        self.players, self.limit, self.count = driven(stages, count, limit), limit, count
        self.under_way: list[Message] = []
        self.here: list[set[Message]] = [set() for _ in range(stages)]
        self.ran: list[list[Operation]] = [[] for _ in range(stages)]

    def moves(self) -> list[tuple[str, int]]:
        """Return next events: a rank runs, or a boundary's oldest message of a kind arrives."""
        runs = [
            ("run", rank)
            for rank, player in enumerate(self.players)
            if player.choose(self.here[rank]) is not None
        ]
        firsts = {(m.kind, m.boundary): n for n, m in reversed(list(enumerate(self.under_way)))}
        return runs + [("arrive", number) for number in firsts.values()]

    def do(self, move: tuple[str, int]) -> None:
        what, number = move
        if what == "arrive":
            message = self.under_way.pop(number)
            self.here[message.boundary + (message.kind is Kind.FORWARD)].add(message)
            return
        player = self.players[number]
        operation = player.choose(self.here[number])
        assert operation is not None
        self.here[number].discard(player.place.needs(operation))  # type: ignore[arg-type]
        self.players[number] = player.after(operation)
        self.ran[number].append(operation)
        made = player.place.makes(operation)
        self.under_way += [] if made is None else [made]

    def check(self) -> None:
        """Check the laws of a finished batch."""
        assert not self.under_way and not any(self.here) and not any(map(_left, self.players))
        for rank, ran in enumerate(self.ran):
            held = 0
            for kind in Kind:
                assert [op for op in ran if op.kind is kind] == [
                    Operation(kind, microbatch) for microbatch in range(self.count)
                ]
            for operation in ran:
                held += 1 if operation.kind is Kind.FORWARD else -1
                assert held <= (1 if rank == len(self.ran) - 1 else self.limit)


def _left(player: BatchProgress) -> bool:
    return bool(player.possible())


def play_out(line: Line, random: Random) -> None:
    while moves := line.moves():
        line.do(random.choice(moves))
    line.check()


def test_no_limit_deadlocks_whatever_arrives_when() -> None:
    for stages, limit, count in product(range(1, 6), range(1, 7), range(1, 9)):
        play_out(Line(stages, count, limit), Random(stages * limit * count))


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 6), st.randoms(use_true_random=False))
def test_no_delay_deadlocks(stages: int, count: int, limit: int, random: Random) -> None:
    play_out(Line(stages, count, limit), random)


def test_times_of_passes_keep_the_limit_and_1f1bs_order_of_backwards() -> None:
    for stages, limit, seed in product((2, 3, 4), (1, 2, 4, 7), range(3)):
        found = timeline(driven(stages, 8, limit), backward=2, transfer=0.5, factor=jitter(seed))
        for rank in range(stages):
            assert found.in_flight(rank) <= limit
            backwards = [
                p.operation for p in found.ranks[rank] if p.operation.kind is Kind.BACKWARD
            ]
            fixed = one_f_one_b(rank, stages, 8)
            assert backwards == [each for each in fixed if each.kind is Kind.BACKWARD]


def test_on_paper_it_is_1f1b_where_all_is_even_and_faster_where_links_are_slow() -> None:
    def both(p: int, m: int, limit: int, **times: Any) -> tuple[Any, Any]:
        orders = [one_f_one_b(rank, p, m) for rank in range(p)]
        return timeline(driven(p, m, limit), **times).length, timeline(orders, **times).length

    assert both(3, 4, 4, transfer=1) == (16, 20)  # as drawn in `schedule`
    for p, m in product((2, 3, 4), (8, 16)):
        for limit in (p, p + 1, 2 * p):
            mine, fixed = both(p, m, limit, forward=1, backward=2)
            assert mine == fixed == 3 * (m + p - 1)
        mine, fixed = both(p, m, 2 * p, backward=2, transfer=Fraction(1, 2))
        assert mine < fixed
        mine, fixed = both(p, m, 2 * p, backward=2, factor=slow(0, Fraction(3, 2)))
        assert mine < fixed
    # Two stages have no choice: with as many microbatches in flight, both orders are equal.
    for seed in range(5):
        mine, fixed = both(2, 8, 2, backward=2, factor=jitter(seed))
        assert mine == fixed


def test_factors_are_of_passes() -> None:
    operation = Operation(Kind.FORWARD, 3)
    assert slow(1, 1.5)(1, operation) == 1.5 and slow(1, 1.5)(0, operation) == even(0, operation)
    drawn = [jitter(seed)(rank, operation) for seed in range(2000) for rank in (0, 1)]
    assert len(set(drawn)) == len(drawn) and jitter(7)(0, operation) == drawn[14]
    assert sum(drawn) / len(drawn) == pytest.approx(1, abs=0.02)


def lines(
    stages: int,
    mailbox: Mailbox,
    *,
    limit: int | None = None,
    fixed: bool = False,
    tp: Sequence[Group] | None = None,
    at: Any = lambda phase: None,
) -> list[Pipeline]:
    """Return the pipelines of all stages in this process; `tp` are the ranks of each stage."""
    split = split_layers(MODEL.num_layers, stages)
    made = []
    for rank, (layers,) in enumerate(split):
        place = StagePosition(stage=rank, stages=stages)
        transport = Loopback(mailbox) if fixed else ArrivalLoopback(mailbox)
        timers, group = Timers(2), ALONE if tp is None else tp[rank]
        course = None
        if isinstance(transport, ArrivalLoopback):
            course = MessageDriven(
                place,
                limit=limit,
                transport=transport,
                tp=group,
                marker=None,
                timers=timers,
                at=at,
            )
        engine: Any = SimpleNamespace(told=[])
        engine.expect_last_backward = lambda names, told=engine.told: told.append(list(names))
        made.append(
            Pipeline(
                stage=Stage([model(layers, group)]),
                place=place,
                transport=transport,
                engine=engine,
                timers=timers,
                at=at,
                driven=course,
            )
        )
    return made


def works(pipelines: Sequence[Pipeline], count: int, name: str, **more: Any) -> list[Any]:
    batches = microbatches(count)
    return [partial(getattr(each, name), batches, iteration=1, **more) for each in pipelines]


@cache
def by_1f1b(stages: int, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    pipelines = lines(stages, Mailbox(), fixed=True)
    *_, loss = on_threads(works(pipelines, count, "forward_backward", scale=SCALE))
    return loss, gradients(pipelines)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("stages", "limit"), [(2, 1), (2, 2), (2, 4), (4, 1), (4, None), (4, 8)])
def test_losses_and_gradients_are_those_of_1f1b_to_the_bit(
    stages: int, limit: int | None, seed: int
) -> None:
    count = 8
    mailbox = DrawnMailbox(seed)
    pipelines = lines(stages, mailbox, limit=limit)
    *others, loss = mailbox.on_threads(works(pipelines, count, "forward_backward", scale=SCALE))
    wanted_loss, wanted = by_1f1b(stages, count)
    assert torch.equal(loss, wanted_loss) and not any(others)
    found = gradients(pipelines)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name
    assert mailbox.is_empty and not any(line.stage._graphs for line in pipelines)
    for line in pipelines:
        assert line.engine.told == [list(line.stage.names(0))]  # type: ignore[attr-defined]
        assert {WAIT, "forward-recv", "backward-recv"} <= line.timers.elapsed().keys()
    # Evaluations use the fixed schedule.
    *_, evaluated = mailbox.on_threads(works(pipelines, count, "forward"))
    torch.testing.assert_close(evaluated, loss, rtol=0, atol=0)


def test_deliveries_differ_and_the_course_with_them() -> None:
    """The previous test is meaningless unless deliveries and courses differ."""
    courses = set()
    for seed in range(6):
        mailbox = DrawnMailbox(seed)
        pipelines = lines(4, mailbox, limit=8)
        mailbox.on_threads(works(pipelines, 6, "forward_backward", scale=SCALE))
        transport = pipelines[1].transport
        assert isinstance(transport, ArrivalLoopback)
        courses.add(tuple(message for message, _ in transport.received))
    assert len(courses) > 1


def middle_of_three(
    arrived: Callable[..., list[Message]],
    *,
    marker: Any = None,
    timers: Timers | None = None,
    at: Callable[[str], None] = lambda phase: None,
) -> Iterator[Operation]:
    """Return the passes of the second of three stages, in a batch of two microbatches."""
    transport: Any = SimpleNamespace(arrived=arrived)
    course = MessageDriven(
        StagePosition(stage=1, stages=3),
        limit=None,
        transport=transport,
        tp=ALONE,
        marker=marker,
        timers=timers or Timers(0),
        at=at,
    )
    return course.passes(course.begin(2))


def test_a_rank_that_waits_for_any_message_says_so() -> None:
    phases, timers = list[str](), Timers(2)
    came = [Message(Kind.FORWARD, 1, 0)]

    def arrived(*, wait: bool) -> list[Message]:
        time.sleep(0.02 * wait)
        return came if wait else []

    passes = middle_of_three(arrived, timers=timers, at=phases.append)
    assert next(passes) == Operation(Kind.FORWARD, 0) and not phases, "nothing else can come next"
    assert next(passes) == Operation(Kind.FORWARD, 1) and phases == ["receive"]
    assert timers.elapsed()[WAIT] > 0.015
    assert [each.kind for each in passes] == [Kind.BACKWARD, Kind.BACKWARD]
    assert phases == ["receive"]


def test_a_choice_waits_for_the_mark_before_it_looks_at_messages() -> None:
    did = list[str]()
    here = [Message(Kind.FORWARD, 1, 0)]
    marker: Any = SimpleNamespace(wait=lambda: did.append("mark"))
    passes = middle_of_three(lambda *, wait: did.append("look") or here, marker=marker)
    assert next(passes) == Operation(Kind.FORWARD, 0) and not did, "nothing else can come next"
    assert next(passes) == Operation(Kind.FORWARD, 1) and did == ["mark", "look"]
    assert len(list(passes)) == 2 and did == ["mark", "look"]


def on_two_lines(groups: ProcessGroups) -> dict[str, Any]:
    """Run three stages of two ranks each, fixed and driven by messages.

    For the middle stage, each activation comes before the gradient of the previous microbatch on
    the first rank, and after that gradient on the other rank.
    """
    assert groups.world.size == 2
    leads = groups.world.rank == 0

    def after(message: Message) -> Message | None:
        kind, microbatch, boundary = message
        if leads and kind is Kind.BACKWARD and boundary == 1 and microbatch < 7:
            return Message(Kind.FORWARD, microbatch + 1, 1)  # the output of the middle stage
        if not leads and kind is Kind.FORWARD and boundary == 0 and microbatch:
            return Message(Kind.BACKWARD, microbatch - 1, 1)
        return None

    tp = []
    for _ in range(3):
        handle = dist.new_group([0, 1], backend="gloo")
        assert isinstance(handle, dist.ProcessGroup)
        tp.append(Group((0, 1), groups.world.rank, handle, calls=Calls()))
    found = {}
    for name in ("fixed", "driven"):
        mailbox = Mailbox() if name == "fixed" else HeldMailbox(after)
        pipelines = lines(3, mailbox, limit=4, tp=tp, fixed=name == "fixed")
        *_, loss = on_threads(works(pipelines, 8, "forward_backward", scale=SCALE))
        found[name] = (loss, gradients(pipelines))
        found[f"{name} calls"] = [group.calls.count for group in tp]
    transport = pipelines[1].transport
    assert isinstance(transport, ArrivalLoopback)
    found["received"] = transport.received
    return found


def otherwise(received: Sequence[tuple[Message, list[Message]]]) -> int:
    """Return how often a middle stage of three would have chosen another pass by its arrivals."""
    (_, player, _), differ = driven(3, 8, 4), 0
    for message, here in received:
        operation = Operation(message.kind, message.microbatch)
        differ += player.choose(here) != operation
        player = player.after(operation)
    assert not player.possible()
    return differ


def test_tensor_parallel_ranks_run_what_their_first_decides(ranks: Ranks) -> None:
    leader, follower = ranks.run(2, on_two_lines)
    course = [message for message, _ in leader["received"]]
    assert [message for message, _ in follower["received"]] == course
    assert otherwise(follower["received"]) > 0, "or else there was nothing to agree on"
    for each in (leader, follower):
        (loss, found), (wanted_loss, wanted) = each["driven"], each["fixed"]
        assert torch.equal(loss, wanted_loss)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), name
        first, middle, last = (
            both - 2 * fixed
            for both, fixed in zip(each["driven calls"], each["fixed calls"], strict=True)
        )
        # At most one message per pass, and none where a stage has no choice.
        assert first == last == 0 and 0 < middle <= 16
