"""Tests that a resumed run on a grid equals the uninterrupted run bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.store import Checkpoint
from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks, grid
from tests.tiers import sampled
from tests.training.harness import NO_DROPOUT, TINY, metrics_of, train
from tests.training.test_resume import check_left_and_resumed

pytestmark = pytest.mark.push

SIZES = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
LEFT_AT, STEPS = 5, 8
"""Inside an interval of Radius, which sends everything in steps 3 and 6."""
RADIUS = "--radius-density 0.3 --radius-interval 3 --radius-start-iter 2"
PRUNED = "--samo-sparsity 0.5 --bf16"
PATHS = {
    "dense": "--sequence-parallel",
    "radius": RADIUS,
    "samo": f"{PRUNED} --dsr-interval 1 --dsr-fraction 0.05 --dsr-until 7",
    "samo+radius": f"{PRUNED} {RADIUS}",
    "topk": "--topk-density 0.1",
    "powersgd": "--powersgd-rank 2",
    "lowrank+sparse": "--lowrank-rank 2",
    "roundrobin": "--roundrobin-interval 3",
    "demo": "--demo-chunk 8 --demo-k 4 --optimizer sgd --sgd-momentum 0 --clip-grad 0",
}


def on_rank(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    return train(grid(groups, tp=2, pp=2), flags, run_dir)


def last_saved(run_dir: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(run_dir / "checkpoints" / f"step_{STEPS:08d}") as saved:
        return {name: saved.read(name) for name in saved.names()}


@pytest.mark.full
@pytest.mark.parametrize("path", PATHS)
def test_left_and_resumed_is_uninterrupted(ranks: Ranks, tmp_path: Path, path: str) -> None:
    """Dropout is on; the last checkpoints contain the state of gradient paths."""
    flags = f"{TINY} --train-iters {STEPS} --grad-path {path} {PATHS[path]} {SIZES}"
    check_left_and_resumed(ranks, 4, flags, (LEFT_AT,), tmp_path, on_rank)
    through, left = last_saved(tmp_path / "through"), last_saved(tmp_path / "left")
    assert through.keys() == left.keys()
    assert [name for name in left if not torch.equal(left[name], through[name])] == []
    if "radius" in path:
        assert any(x.any() for name, x in left.items() if name.startswith("residual/"))
        sent = metrics_of(tmp_path / "left", "density")
        assert [density < 1 for density in sent] == [False] * 3 + [True, True, False, True, True]


NEXT_TO_NOTHING = {
    "radius": "--radius-density 0.00001 --radius-interval 3 --radius-start-iter 2",
    "radius --use-distributed-optimizer": "--radius-density 0.00001 --radius-interval 3 "
    "--radius-start-iter 2",
    "samo": "--samo-sparsity 0.9999 --samo-pruning random",
    "samo --use-distributed-optimizer": "--samo-sparsity 0.9999 --samo-pruning random",
    "samo+radius": "--samo-sparsity 0.999 --samo-pruning random --radius-density 0.1 "
    "--radius-interval 3 --radius-start-iter 2",
}


def on_tensor_rank(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    return train(grid(groups, tp=groups.world.size // 2 or 1), flags, run_dir)


@pytest.mark.parametrize("path", sampled(NEXT_TO_NOTHING, ("samo+radius",)))
def test_a_tensor_parallel_rank_may_have_nothing_of_a_bucket(
    ranks: Ranks, tmp_path: Path, path: str
) -> None:
    """A matrix has one or two selected entries, all on one of its ranks: the other sends none."""
    flags = f"{TINY} {NO_DROPOUT} --grad-path {path} {NEXT_TO_NOTHING[path]}"
    ranks.run(1, on_tensor_rank, flags, tmp_path / "one")
    ranks.run(4, on_tensor_rank, f"{flags} --tensor-model-parallel-size 2", tmp_path / "four")
    assert metrics_of(tmp_path / "four") == pytest.approx(metrics_of(tmp_path / "one"), abs=2e-4)


def on_four_tensor_ranks(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    return train(grid(groups, tp=4), flags, run_dir)


def test_factors_that_do_not_pay_on_the_new_grid_are_left_behind(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A rank's quarter of a 32 x 32 projection is smaller than its two factors."""
    flags = f"{TINY} --grad-path powersgd --powersgd-rank 8"
    ranks.run(1, on_tensor_rank, flags, tmp_path)
    more = flags.replace("--train-iters 8", "--train-iters 10")
    cut = f"{more} --tensor-model-parallel-size 4"
    found = ranks.run(4, on_four_tensor_ranks, cut, tmp_path)
    assert [each["iteration"] for each in found] == [10] * 4
    log = (tmp_path / "log.txt").read_text()
    assert "sends layers.0.attention.dense.weight whole, what waited is dropped" in log
