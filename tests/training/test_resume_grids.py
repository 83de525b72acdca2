"""On a grid too, a run that was left and started again is the run that was not, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.store import Checkpoint
from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks, grid
from tests.training.harness import TINY, metrics_of, train
from tests.training.test_resume import check_left_and_resumed

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
}


def on_rank(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    return train(grid(groups, tp=2, pp=2), flags, run_dir)


def last_saved(run_dir: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(run_dir / "checkpoints" / f"step_{STEPS:08d}") as saved:
        return {name: saved.read(name) for name in saved.names()}


@pytest.mark.parametrize("path", PATHS)
def test_left_and_resumed_is_uninterrupted(ranks: Ranks, tmp_path: Path, path: str) -> None:
    """Dropout is on. What gradient paths keep is in the last checkpoints."""
    flags = f"{TINY} --train-iters {STEPS} --grad-path {path} {PATHS[path]} {SIZES}"
    check_left_and_resumed(ranks, 4, flags, (LEFT_AT,), tmp_path, on_rank)
    through, left = last_saved(tmp_path / "through"), last_saved(tmp_path / "left")
    assert through.keys() == left.keys()
    assert [name for name in left if not torch.equal(left[name], through[name])] == []
    if "radius" in path:
        assert any(x.any() for name, x in left.items() if name.startswith("residual/"))
        sent = metrics_of(tmp_path / "left", "density")
        assert [density < 1 for density in sent] == [False] * 3 + [True, True, False, True, True]
