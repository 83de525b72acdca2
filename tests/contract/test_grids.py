"""Tests of Radius on grids.

Every rank selects the entries that one rank with the whole tensors selects, nothing is lost, and a
run resumes where it stopped. Runs are compared by their checkpoints, which hold logical tensors.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import NumericsError
from megatron.fault_tolerance.replicas import compare_replicas
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tests.contract.grid import (
    EMBEDDING,
    SHAPES,
    GridToy,
    differing,
    gradients,
    logical,
    on_grid,
    world_of,
)
from tests.contract.harness import DEMO, LOWRANK, SHORT, PathCase
from tests.ranks import Ranks

pytestmark = pytest.mark.push

STEPS = 14
"""With an interval of 4: dense up to step 4, then more than two intervals."""
MATRICES = sum(len(shape) > 1 for shape in SHAPES.values())
PAPER = PathCase("radius", SHORT)
ROLLING = PathCase("radius", SHORT | {"radius_schedule": "rolling"})
SEEDED = PathCase("radius", SHORT | {"radius_select": "seeded"})
DRAWN_ROLLING = PathCase(
    "radius", SHORT | {"radius_schedule": "rolling", "radius_select": "seeded"}
)
GRADIENT = PathCase("radius", SHORT | {"radius_select": "gradient"})
IN_TURNS = PathCase("roundrobin", {"roundrobin_interval": 3})


def on_rank_saved(
    groups: ProcessGroups, grid: str, case: PathCase, pruned: bool, folder: Path
) -> list[tuple]:
    """Run to the end and save; return the logged figures of each step."""
    toy = GridToy(on_grid(groups, grid), case, pruned=pruned, lr=1e-3)
    told = []
    for number in range(STEPS):
        toy.step(toy.share(number))
        stats = toy.engine.stats(full=True)
        told.append(
            (stats.density, stats.extra.get("residual_norm"), stats.extra.get("index_kept"))
        )
    toy.save(folder)
    return told


@functools.cache
def _alone() -> ProcessGroups:
    return ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)


RUNS = [
    (PAPER, False, ["TP4", "TP2xPP2", "TP2xDP2"]),
    (PAPER, True, ["TP2", "TP2xPP2"]),
    (ROLLING, False, ["TP2"]),
    (ROLLING, True, ["TP2xDP2"]),
    (SEEDED, False, ["TP2"]),
    (DRAWN_ROLLING, True, ["TP2"]),
    (GRADIENT, False, ["TP2xDP2"]),
]


@pytest.mark.parametrize(("case", "pruned", "grids"), RUNS)
def test_11_a_grid_makes_the_run_of_one_rank(
    ranks: Ranks, tmp_path: Path, case: PathCase, pruned: bool, grids: list[str]
) -> None:
    """Runs are bit-equal, unless ranks are averaged or entries are updated in other pieces."""
    wanted = on_rank_saved(_alone(), "1", case, pruned, tmp_path / "1")
    for grid in grids:
        told = ranks.run(world_of(grid), on_rank_saved, grid, case, pruned, tmp_path / grid)
        exact = "DP" not in grid and case.options.get("radius_schedule") != "rolling"
        one, other = logical(tmp_path / "1", STEPS), logical(tmp_path / grid, STEPS)
        assert one.keys() == other.keys()
        assert sum(name.startswith("entries/index/") for name in one) == MATRICES
        for name, tensor in one.items():
            mine = other[name]
            # Two stages add the gradients of a tied weight in another order.
            summed_alike = exact and not (name.endswith(EMBEDDING) and "PP" in grid)
            if summed_alike or tensor.dtype in (torch.bool, torch.int64):
                assert torch.equal(mine, tensor), (grid, name)
            else:
                mean = mine.mean(0) if name.startswith("residual/") else mine
                alone = tensor[0] if name.startswith("residual/") else tensor
                torch.testing.assert_close(mean, alone, rtol=1e-4, atol=1e-4)
        # Every rank reports the whole model. Slices of a bucket are aligned, and the gaps count as
        # sent and stored.
        for found in told:
            assert [density for density, _, _ in found] == [density for density, _, _ in told[0]]
            for mine, (density, norm, kept) in zip(found, wanted, strict=True):
                assert mine[0] == pytest.approx(density, abs=0.1)
                assert mine[2] == (kept if kept is None else pytest.approx(kept))
                if exact:
                    assert mine[1] == (norm if norm is None else pytest.approx(norm, rel=1e-6))


def on_rank_conserved(groups: ProcessGroups, grid: str, case: PathCase, pruned: bool) -> list[dict]:
    toy = GridToy(on_grid(groups, grid), case, pruned=pruned)
    found = []
    for number in range(10):
        before = toy.residual()
        whole = gradients(number, toy.groups.dp.rank)
        toy.backward([whole])
        step = toy.finish()
        reduced = {name: tensor.clone() for name, tensor in toy.reduced(step).items()}
        toy.apply(step)
        after = toy.residual()
        offered = {}
        for info in toy.infos:
            part = whole[info.name] if info.tp_shard is None else info.tp_shard.of(whole[info.name])
            mask = toy.engine.layout.mask(info.name)
            exists = 1 if mask is None else mask[: info.local_entries]
            offered[info.name] = part.reshape(-1) * exists + before[info.name] - after[info.name]
        found.append({"reduced": reduced, "sent": offered, "dp": toy.groups.dp.rank})
    return found


@pytest.mark.parametrize("pruned", [False, True], ids=["dense", "pruned"])
@pytest.mark.parametrize("case", [PAPER, ROLLING], ids=str)
def test_2_3_on_a_grid_the_mean_is_equal_and_nothing_is_lost(
    ranks: Ranks, case: PathCase, pruned: bool
) -> None:
    by_rank = ranks.run(4, on_rank_conserved, "TP2xDP2", case, pruned)
    for number in range(10):
        for tp in (0, 1):
            first, second = by_rank[tp][number], by_rank[tp + 2][number]
            for name, mean in first["reduced"].items():
                assert torch.equal(mean, second["reduced"][name])
                sent = (first["sent"][name] + second["sent"][name]) / 2
                torch.testing.assert_close(mean, sent, rtol=1e-5, atol=1e-5)


def on_rank_resumed(groups: ProcessGroups, case: PathCase, folder: Path) -> list[list[str]]:
    """Return for each position of an interval the names that differ after a resume there."""
    grid = on_grid(groups, "TP2xDP2")
    through = GridToy(grid, case)
    resumed = []
    for number in range(12):
        through.step(through.share(number), clip_norm=1.0)
        if number in (3, 4, 5, 6, 7):
            through.save(folder)
            again = GridToy(grid, case)
            again.load(folder, number + 1)
            resumed.append((number + 1, again))
    found = []
    for start, again in resumed:
        for number in range(start, 12):
            again.step(again.share(number), clip_norm=1.0)
        found.append(differing(through.state(), again.state()))
    return found


def test_11_parts_of_rows_are_those_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    on_rank_saved(_alone(), "1", IN_TURNS, False, tmp_path / "1")
    one = logical(tmp_path / "1", STEPS)
    assert sum(name.startswith("residual/") for name in one) == MATRICES
    for grid in ("TP2", "TP2xPP2", "TP2xDP2"):
        ranks.run(world_of(grid), on_rank_saved, grid, IN_TURNS, False, tmp_path / grid)
        other = logical(tmp_path / grid, STEPS)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            kept = name.startswith("residual/")
            mine, alone = (other[name].mean(0), tensor[0]) if kept else (other[name], tensor)
            torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-4)
            if kept:
                assert torch.equal(mine == 0, alone == 0), "the same rows were sent last"


@pytest.mark.parametrize("case", [PAPER, ROLLING], ids=str)
def test_10_saved_and_resumed_on_a_grid_equals_uninterrupted(
    ranks: Ranks, tmp_path: Path, case: PathCase
) -> None:
    assert ranks.run(4, on_rank_resumed, case, tmp_path) == [[[]] * 5] * 4


def on_rank_drifted(groups: ProcessGroups, name: str, rank: int) -> str:
    toy = GridToy(on_grid(groups, "TP2xPP2"), PAPER)
    toy.step(toy.share(0))
    compare_replicas(toy.optimizer, toy.groups, step=1)
    for info, weight in toy.optimizer.weights():
        if info.name == name and groups.world.rank == rank:
            weight[1] += 1
    with pytest.raises(NumericsError) as caught:
        compare_replicas(toy.optimizer, toy.groups, step=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "rank", "said"),
    [
        ("position.weight", 1, "position.weight on rank 1"),
        (EMBEDDING, 3, "embedding.weight on rank 3"),
        ("2.second.bias", 2, "2.second.bias on rank 3, or"),
    ],
)
def test_2_what_drifts_apart_over_tensor_parallel_ranks_or_stages_is_named(
    ranks: Ranks, name: str, rank: int, said: str
) -> None:
    """Either of two differing copies may be the right one, so both are named."""
    found = ranks.run(4, on_rank_drifted, name, rank)
    assert len(set(found)) == 1 and said in found[0]


def on_rank_baseline(groups: ProcessGroups, case: PathCase, folder: Path) -> Any:
    toy = GridToy(on_grid(groups, "TP2xDP2"), case)
    for number in range(4):
        toy.step(toy.share(number))
    toy.save(folder)
    again = GridToy(toy.groups, case)
    again.load(folder, 4)
    for number in range(4, 6):
        toy.step(toy.share(number))
        again.step(again.share(number))
    return differing(toy.state(), again.state()), toy.engine.stats(full=True).density


@pytest.mark.parametrize(
    "case",
    [
        PathCase("topk", {"topk_density": 0.1}),
        PathCase("powersgd", {"powersgd_rank": 2}),
        PathCase("powersgd", {"powersgd_rank_share": 0.15}),
        PathCase("lowrank+sparse", LOWRANK),
        IN_TURNS,
        PathCase("demo", DEMO),
        PathCase("demo"),
    ],
    ids=str,
)
def test_10_baselines_compress_parts_and_go_on_from_them(
    ranks: Ranks, tmp_path: Path, case: PathCase
) -> None:
    found = ranks.run(4, on_rank_baseline, case, tmp_path)
    assert [names for names, _ in found] == [[]] * 4
    assert len({density for _, density in found}) == 1 and found[0][1] < 0.9
