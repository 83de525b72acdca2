"""Tests of the state that Radius saves, and of resuming from it on the same or other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import SHAPES, PathCase, Toy, case_id, gradients, same
from tests.radius.toys import (
    CASES,
    MATRICES,
    OWN_CASES,
    STEPS,
    alone,
    densities,
    moved,
    params_of,
    radius,
    reducer_of,
)
from tests.ranks import Ranks

pytestmark = pytest.mark.push


def on_rank_resumed(groups: ProcessGroups, case: PathCase) -> list[list[str]]:
    """Return for every position the names that differ at the end after a resume there."""
    through = Toy(groups, case)
    found = []
    lefts = []
    for number in range(STEPS):
        through.step([gradients(number, groups.dp.rank)], clip_norm=1.0)
        second = Toy(groups, case)
        moved(through, second, through.own())
        lefts.append((number, second))
    for number, second in lefts:
        for rest in range(number + 1, STEPS):
            second.step([gradients(rest, groups.dp.rank)], clip_norm=1.0)
        found.append(same(through.state(), second.state()))
    return found


# Contract 10 resumes the other cases at every other position.
@pytest.mark.parametrize(
    "case",
    [CASES[0], *OWN_CASES, *(pytest.param(case, marks=pytest.mark.full) for case in CASES[1:])],
    ids=case_id,
)
def test_resumed_at_every_position_of_an_interval_is_uninterrupted(
    ranks: Ranks, case: PathCase
) -> None:
    world = 2 * case.inner
    assert ranks.run(world, on_rank_resumed, case) == [[[]] * STEPS] * world


def on_rank_handed_over(
    groups: ProcessGroups, case: PathCase, places: Sequence[int], steps: int
) -> tuple[dict[int, dict[str, Any]], dict[str, torch.Tensor]]:
    """Return the state at each place where the run is left, and the weights at its end."""
    toy, found = Toy(groups, case, lr=1e-3), {}
    size, rank = groups.dp.size, groups.dp.rank
    for number in range(steps):
        if number in places:
            optimizer = {(kind, name): t.clone() for kind, name, t in toy.optimizer.tensors()}
            state = {"optimizer": optimizer, "own": toy.own(), "shared": toy.shared()}
            found[number] = state | {"pending": toy.residual()}
        mine = [gradients(number, share, scale=size / 4) for share in range(rank, 4, size)]
        toy.step(mine, clip_norm=1.0)
    return found, params_of(toy)


def on_rank_taken_over(
    groups: ProcessGroups, case: PathCase, left_at: int, states: list[dict[str, Any]], steps: int
) -> dict:
    toy = Toy(groups, case, lr=1e-3)
    size, rank = groups.dp.size, groups.dp.rank
    # As `RunStateDict` does for another number of ranks.
    owns = [state["own"] for state in states]
    own = {name: torch.stack([each[name] for each in owns]).mean(0) for name in owns[0]}
    for kind, name, tensor in toy.optimizer.tensors():
        tensor.copy_(states[0]["optimizer"][kind, name])
    toy.optimizer.applied = left_at
    toy.optimizer.finish_load()
    reducer_of(toy).load_state_tensors(own, states[0]["shared"])
    pending = toy.residual()
    for number in range(left_at, steps):
        mine = [gradients(number, share, scale=size / 4) for share in range(rank, 4, size)]
        toy.step(mine, clip_norm=1.0)
    return {"pending": pending, "params": params_of(toy)}


# On another number of ranks a wire rounds other gradients, and shards have other lengths:
# tests/training/test_resume_grids.py resumes those from checkpoints.
MOVABLE = [case for case in CASES if case.linear and not case.sharded and case.inner == 1]


@pytest.mark.parametrize("case", MOVABLE, ids=case_id)
def test_another_number_of_ranks_keeps_the_pending_update(ranks: Ranks, case: PathCase) -> None:
    places = (6, 8)
    stayed = ranks.run(4, on_rank_handed_over, case, places, STEPS)
    weights = stayed[0][1]
    for left_at in places:
        states = [state[left_at] for state, _ in stayed]
        pending = {n: torch.stack([s["pending"][n] for s in states]).mean(0) for n in MATRICES}
        is_pending = any(p.any() for p in pending.values())
        assert is_pending == (left_at % 4 != 0 or "rolling" in str(case)), left_at
        for world in (1, 2):
            for found in ranks.run(world, on_rank_taken_over, case, left_at, states, STEPS):
                where = f"left at {left_at}, on {world} ranks"
                close(where, found["pending"], pending, MATRICES)
                close(where, found["params"], weights, list(SHAPES), rtol=1e-4, atol=1e-5)


def close(
    where: str,
    found: dict,
    expected: dict,
    names: list[str],
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    for name in names:
        torch.testing.assert_close(
            found[name], expected[name], rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}"
        )


def test_only_what_is_not_chosen_waits_and_nothing_right_after_a_resample() -> None:
    toy = Toy(alone(), radius())
    for t in range(1, 10):
        toy.step([gradients(t)])
        own, shared = toy.own(), toy.shared()
        assert shared.pop("radius/steps").tolist() == [2, 0 if t < 4 else 4, t // 4 * 4]
        assert set(shared) == {f"index/{name}" for name in MATRICES if t >= 4}
        assert set(own) == (set(MATRICES) if t > 4 and t % 4 else set())
        for name, rest in own.items():
            n, chosen = math.prod(SHAPES[name]), shared[f"index/{name}"]
            assert rest.dtype == torch.float32 and rest.numel() == n
            assert int(chosen.sum()) == math.ceil(0.4 * n) and not rest[chosen].any()


def test_a_saved_start_wins_over_the_configured_one() -> None:
    first = Toy(alone(), radius(start_iter=9))
    for t in range(1, 4):
        first.step([gradients(t)])

    def take_over(toy: Toy) -> None:
        moved(first, toy, {})

    # Steps 4 to 13: without the saved start, the very first of them would be the first resample.
    found = densities(radius(start_iter=1), 10, before=take_over)
    assert [t for t, density in enumerate(found, 4) if density < 1] == [13]


def test_a_dense_checkpoint_starts_it_at_the_next_multiple() -> None:
    def pretend(toy: Toy) -> None:
        toy.optimizer.applied = 101
        reducer_of(toy).load_state_tensors({}, {})

    found = densities(radius(start_iter=20, interval=4), 6, before=pretend)  # steps 102 to 107
    assert [t for t, density in enumerate(found, 102) if density < 1] == [105, 106, 107]


@pytest.mark.parametrize("select", ["update", "seeded"])
def test_updates_counted_anew_meet_the_next_resample(select: str) -> None:
    """The state is as after `--no-load-optim`: an index exists, and t is below the start."""
    toy = Toy(alone(), radius(select=select, start_iter=9))
    for t in range(1, 15):
        toy.step([gradients(t)])
    toy.optimizer.applied = 0
    found = []
    for t in range(1, 10):
        toy.step([gradients(50 + t)])
        found.append(toy.engine.stats().density)
    assert [density == 1 for density in found] == [t % 4 == 0 for t in range(1, 10)]


@pytest.mark.parametrize("saved_at", [None, 2])
def test_rolling_counts_whole_rounds_where_updates_are_counted_anew(saved_at: int | None) -> None:
    """The count also holds where t passes the first resample again, and after a save."""
    toy = Toy(alone(), radius(schedule="rolling"))
    for t in range(1, 12):
        toy.step([gradients(t)])
    toy.optimizer.applied = 0
    for t in range(1, 10):
        toy.backward([gradients(50 + t)])
        step = toy.finish()
        counted = [r.steps_accumulated for r in step.reduced if r.steps_accumulated is not None]
        assert {float(c.max()) for c in counted} == {4.0}, t
        toy.apply(step)
        if t == saved_at:
            second = Toy(alone(), radius(schedule="rolling"))
            moved(toy, second, toy.own())
            toy = second
