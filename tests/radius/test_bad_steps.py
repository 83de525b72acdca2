"""Steps that are skipped, and the state that they leave alone."""

from __future__ import annotations

import math

import pytest

from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import PathCase, Toy, case_id, gradients, same
from tests.radius.toys import (
    CASES,
    OWN_CASES,
    STEPS,
    masks_of,
    params_of,
    radius,
)
from tests.ranks import Ranks


def on_rank_poisoned(groups: ProcessGroups, case: PathCase, name: str) -> list[list[str]]:
    """Return for each position the state that a step with a NaN on the last rank changes."""
    toy = Toy(groups, case)
    found = []
    for t in range(1, STEPS + 1):
        before = toy.state()
        bad = gradients(100 + t, groups.dp.rank)
        if groups.dp.rank == groups.dp.size - 1:
            bad[name].view(-1)[t] = math.nan
        assert not toy.step([bad]).ok
        found.append(same(before, toy.state()))
        toy.step([gradients(t, groups.dp.rank)])
    return found


# Contract 4 skips some steps of every case. Fewer than four ranks have no inner groups of two.
@pytest.mark.parametrize(
    ("case", "world"),
    [
        pytest.param(
            case,
            world,
            id=f"{case_id(case)}-{world}",
            marks=[pytest.mark.full] * (world != 2 or case.inner > 1) * (case is not CASES[0]),
        )
        for case in CASES
        for world in (1, 2, 4)
    ],
)
def test_a_nan_leaves_residual_and_index_alone_at_every_position(
    ranks: Ranks, case: PathCase, world: int
) -> None:
    for name in ("second.weight", "norm.weight"):
        assert ranks.run(world, on_rank_poisoned, case, name) == [[[]] * STEPS] * world


@pytest.mark.parametrize("case", OWN_CASES, ids=case_id)
def test_a_nan_leaves_them_alone_under_other_settings(ranks: Ranks, case: PathCase) -> None:
    assert ranks.run(2, on_rank_poisoned, case, "second.weight") == [[[]] * STEPS] * 2


@pytest.mark.parametrize("pending", [1e20, 1e30, 3e38])
@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_too_large_to_square_is_skipped_at_once_and_keeps_no_resample_from_passing(
    ranks: Ranks, world: int, pending: float
) -> None:
    """It is finite, and not among the entries that are sent."""
    for found in ranks.run(world, on_rank_with_huge_gradient, pending):
        assert found["good"] == [True] * 4 + [False] + [True] * 10
        assert found["finite"]


def on_rank_with_huge_gradient(groups: ProcessGroups, pending: float) -> dict:
    toy = Toy(groups, radius())
    good = []
    for t in range(1, 16):
        mine = gradients(t, groups.dp.rank)
        if t == 5:
            mask = masks_of(toy)["first.weight"].view(-1)
            mine["first.weight"].view(-1)[(~mask).nonzero()[:1]] = pending
        good.append(toy.step([mine]).ok)
    return {"good": good, "finite": all(p.isfinite().all() for p in params_of(toy).values())}
