"""Tests of skipped steps: what they leave unchanged, and what in-place residuals keep of them."""

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


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_nan_leaves_residual_and_index_alone_at_every_position(
    ranks: Ranks, case: PathCase, world: int
) -> None:
    for name in ("second.weight", "norm.weight"):
        assert ranks.run(world, on_rank_poisoned, case, name) == [[[]] * STEPS] * world


@pytest.mark.parametrize("case", OWN_CASES, ids=case_id)
def test_a_nan_leaves_them_alone_under_other_settings(ranks: Ranks, case: PathCase) -> None:
    assert ranks.run(2, on_rank_poisoned, case, "second.weight") == [[[]] * STEPS] * 2


def on_rank_dropped(groups: ProcessGroups, position: int, kind: str) -> dict:
    """Skip the step at a position with an in-place residual, for a NaN or a loss spike."""
    toy = Toy(groups, radius(residual="in-place"))
    for t in range(1, position):
        toy.step([gradients(t, groups.dp.rank)])
    before, state = toy.residual(), settled(toy)
    skipped = gradients(99, groups.dp.rank)
    if kind == "nan" and groups.dp.rank == 0:
        skipped["first.weight"].view(-1)[:7] = math.nan
    toy.backward([skipped])
    step = toy.finish()
    toy.engine.abort()
    after = toy.residual()
    changed, masks = same(state, settled(toy)), masks_of(toy)
    return {"before": before, "after": after, "ok": step.ok, "changed": changed, "masks": masks}


@pytest.mark.parametrize("position", [3, 4, 5, 6, 8, 9, 12])
@pytest.mark.parametrize("kind", ["nan", "spike"])
def test_in_place_what_a_skipped_step_added_stays_pending_and_finite(
    ranks: Ranks, position: int, kind: str
) -> None:
    by_rank = ranks.run(2, on_rank_dropped, position, kind)
    assert all(found["ok"] == (kind == "spike") and not found["changed"] for found in by_rank)
    for name in MATRICES:
        after = torch.stack([found["after"][name] for found in by_rank])
        assert after.isfinite().all()
        if position <= 4:  # no index yet: the step is dropped as on the dense path
            assert not after.any()
            continue
        added = torch.stack([gradients(99, rank)[name].view(-1) for rank in range(2)])
        rest = ~by_rank[0]["masks"][name].view(-1)
        wanted = torch.stack([found["before"][name] for found in by_rank]) + added * rest
        if kind == "nan" and name == "first.weight":
            # The pending part of a non-finite entry is lost on that rank alone.
            wanted[0, :7] = 0.0
        torch.testing.assert_close(after.mean(0), wanted.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pending", [1e20, 1e30, 3e38])
@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_too_large_to_square_is_skipped_at_once_and_keeps_no_resample_from_passing(
    ranks: Ranks, world: int, pending: float
) -> None:
    """The gradient is finite, and not among the sent entries."""
    for found in ranks.run(world, on_rank_with_huge_gradient, residual, pending):
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
