"""Saved by any grid, loaded by any other: the logical tensors are the same, entry by entry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.store import save_checkpoint, whole
from megatron.errors import CheckpointError
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tests.contract.grid import GRIDS, GridToy, differing, logical, on_grid, world_of
from tests.contract.harness import SHORT, PathCase
from tests.ranks import Ranks
from tests.tiers import sampled

pytestmark = pytest.mark.push

LEFT_AT, STEPS = 6, 13
CASE = PathCase("radius", SHORT)
PAIRS = [
    ("1", "TP4"),
    ("1", "TP2xPP2"),
    ("DP4", "TP2xDP2"),
    ("DP4", "1"),
    ("TP2", "TP4"),
    ("TP4", "TP2"),
    ("TP4", "PP4"),
    ("PP2", "TP2"),
    ("PP4", "DP4"),
    ("TP2xDP2", "DP4"),
    ("TP2xDP2", "PP2xDP2"),
    ("PP2xDP2", "TP2xDP2"),
    ("TP2xPP2", "1"),
]
ON_PUSH = [(*PAIRS[number], False) for number in (1, 2, 6, 8, 10, 12)]
"""From and to each grid of four ranks."""


def on_rank_saved(groups: ProcessGroups, grid: str, pruned: bool, folder: Path) -> None:
    toy = GridToy(on_grid(groups, grid), CASE, pruned=pruned, lr=1e-3)
    for number in range(LEFT_AT):
        toy.step(toy.share(number))
    toy.save(folder)
    for number in range(LEFT_AT, STEPS):
        toy.step(toy.share(number))
    toy.save(folder)


def on_rank_loaded(
    groups: ProcessGroups, grid: str, pruned: bool, source: Path, target: Path
) -> None:
    toy = GridToy(on_grid(groups, grid), CASE, pruned=pruned, lr=1e-3)
    toy.load(source, LEFT_AT)
    toy.save(target)
    for number in range(LEFT_AT, STEPS):
        toy.step(toy.share(number))
    toy.save(target)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """A run of each grid: its folder."""
    found = {}
    for grid, pruned in [*((name, False) for name in GRIDS), ("TP2", True), ("DP4", True)]:
        folder = tmp_path_factory.mktemp(grid)
        ranks.run(world_of(grid), on_rank_saved, grid, pruned, folder)
        found[grid, pruned] = folder
    return found


def on_rank_kept(groups: ProcessGroups, grid: str, pruned: bool, folder: Path) -> None:
    """A run that shards the optimizer's states, and one that does not."""
    for sharded in (True, False):
        case = PathCase("dense", sharded=sharded)
        toy = GridToy(on_grid(groups, grid), case, pruned=pruned, plain_cuts=True)
        for number in range(3):
            toy.step(toy.share(number))
        toy.save(folder / str(sharded))
        assert toy.optimizer.is_sharded == sharded
        other = PathCase("dense", sharded=not sharded)
        again = GridToy(toy.groups, other, pruned=pruned, plain_cuts=True)
        again.load(folder / str(sharded), 3)
        again.save(folder / f"{sharded} taken over")


@pytest.mark.parametrize("pruned", [False, True], ids=["dense", "pruned"])
@pytest.mark.parametrize("grid", ["DP4", "TP2xDP2", "PP2xDP2"])
def test_shards_of_states_are_the_logical_states(
    ranks: Ranks, tmp_path: Path, grid: str, pruned: bool
) -> None:
    ranks.run(4, on_rank_kept, grid, pruned, tmp_path)
    one, *others = (logical(folder, 3) for folder in sorted(tmp_path.iterdir()))
    assert len(others) == 3
    assert any(name.startswith("mask/") for name in one) == pruned
    for other in others:
        assert differing(one, other) == []


def test_a_choice_saved_in_an_earlier_form_is_refused(tmp_path: Path) -> None:
    toy = GridToy(ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0), CASE)
    toy.step(toy.share(0))
    packed = whole("path/index/0.first.weight", torch.zeros(96, dtype=torch.uint8))
    save_checkpoint(tmp_path, step=1, tensors=[*toy.tensors.shards(moments=True), packed], state={})
    with pytest.raises(CheckpointError, match="earlier version.*--reset-grad-state"):
        toy.load(tmp_path, 1)


@pytest.mark.parametrize(
    ("source", "target", "pruned"),
    [
        *sampled([(one, other, False) for one, other in PAIRS], ON_PUSH),
        ("TP2", "TP4", True),
        ("DP4", "TP2xPP2", True),
    ],
)
def test_another_grid_goes_on_from_the_same_state(
    ranks: Ranks,
    tmp_path: Path,
    saved: dict[tuple[str, bool], Path],
    source: str,
    target: str,
    pruned: bool,
) -> None:
    folder = saved[source, pruned]
    ranks.run(world_of(target), on_rank_loaded, target, pruned, folder, tmp_path)
    was, found = logical(folder, LEFT_AT), logical(tmp_path, LEFT_AT)
    assert was.keys() == found.keys()
    assert {name.partition("/")[0] for name in was} >= {"param", "exp_avg", "entries", "residual"}
    dp = GRIDS[source][2], GRIDS[target][2]
    for name, tensor in was.items():
        if name.startswith("residual/") and dp[0] != dp[1]:
            assert tensor.shape[0] == dp[0] and found[name].shape[0] == dp[1]
            mean = tensor.mean(0).expand_as(found[name])
            torch.testing.assert_close(found[name], mean, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(found[name], tensor), name
    assert any(tensor.any() for name, tensor in was.items() if name.startswith("residual/"))
    one, other = logical(folder, STEPS), logical(tmp_path, STEPS)
    for name, tensor in one.items():
        if name.startswith("param/"):
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-4)
