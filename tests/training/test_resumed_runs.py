"""Whole runs that are left and resumed: each equals the unbroken run bit by bit.

The rows are a pairwise table of grids, wires, formats of the optimizer states and places of the
optimizer states; every gradient path is in it on a grid that cuts the model and on one that does
not. Contract 10 of tests/contract holds the states themselves to the same law in more combinations;
the runs show that trainer, data order, schedules and checkpoints go on with them.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron.checkpoint.store import Checkpoint
from megatron.config import parse, resolve
from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tests.ranks import Ranks, grid
from tests.training.harness import TINY, train
from tests.training.test_resume import check_left_and_resumed

STEPS = 8
_RADIUS = "--radius-density 0.3 --radius-interval 3 --radius-start-iter 2"
PATHS = {
    "dense": "",
    "radius": _RADIUS,
    "radius rolling": f"{_RADIUS} --radius-schedule rolling",
    "samo": "--samo-sparsity 0.5 --samo-pruning random",
    "samo DSR": "--samo-sparsity 0.5 --dsr-interval 1 --dsr-fraction 0.05 --dsr-until 7",
    "samo+radius": f"--samo-sparsity 0.5 --samo-pruning random {_RADIUS}",
    "topk": "--topk-density 0.1",
    "powersgd": "--powersgd-rank 2",
    "lowrank+sparse": "--lowrank-rank 2",
    "roundrobin": "--roundrobin-interval 3",
    "demo": "--demo-chunk 8 --demo-k 4 --optimizer sgd --sgd-momentum 0 --clip-grad 0",
    "diloco": "--local-steps 4",
}
GRIDS: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "DP 2": (2, {}),
    "TP 2": (2, {"tp": 2}),
    "PP 2": (2, {"pp": 2}),
    "DP 2, TP 2": (4, {"tp": 2}),
}
WIRES = ("none", "bf16", "int8", "int4")
FORMATS = {
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 1024",
    "bf16 states": "--bf16 --main-params-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "int8 states": "--bf16 --main-params-dtype bf16 --exp-avg-dtype int8 --exp-avg-sq-dtype int8",
}
PLACES = {
    "whole": "",
    "ZeRO-1": "--use-distributed-optimizer",
    "offloaded": "--optimizer-cpu-offload --offload-bucket-size 2048",
}
LEAVES = ((5,), (4,), (2, 7))
"""Steps to leave after, in turns: inside and at edges of intervals of three and rounds of four."""


class Row(NamedTuple):
    """The names of the settings of a run."""

    path: str = "dense"
    grid: str = "DP 2"
    wire: str = "none"
    format: str = "fp32"
    place: str = "whole"

    @property
    def pairs(self) -> set[Any]:
        """The pairs of values of two settings in the row, and its path on a cut or whole model."""
        is_cut = bool(GRIDS[self.grid][1])
        return {*combinations(enumerate(self[1:]), 2), (self.path, is_cut)}

    @property
    def flags(self) -> str:
        """The flags of the run."""
        _, cut = GRIDS[self.grid]
        name = self.path.split()[0]
        return (
            f"{TINY} --global-batch-size 8 --train-iters {STEPS} "
            f"--grad-path {name} {PATHS[self.path]} "
            f"--tensor-model-parallel-size {cut.get('tp', 1)} "
            f"--pipeline-model-parallel-size {cut.get('pp', 1)} --grad-wire {self.wire} "
            f"{FORMATS[self.format]} {PLACES[self.place]}"
        )

    @property
    def is_legal(self) -> bool:
        """Whether the program accepts the settings."""
        try:
            config = parse(self.flags.split(), paths=GRADIENT_PATHS)
            resolve(config, GRIDS[self.grid][0])
        except ConfigError:
            return False
        return True


ROWS = (
    Row("dense", "1", "int8", "bf16 states", "whole"),
    Row("dense", "1", "bf16", "fp32", "ZeRO-1"),
    Row("dense", "DP 2", "int4", "fp16", "whole"),
    Row("dense", "DP 2", "int8", "fp32", "ZeRO-1"),
    Row("dense", "DP 2", "int4", "int8 states", "offloaded"),
    Row("dense", "DP 2", "none", "bf16", "offloaded"),
    Row("dense", "DP 2", "bf16", "bf16", "whole"),
    Row("dense", "TP 2", "bf16", "fp16", "offloaded"),
    Row("dense", "TP 2", "int8", "int8 states", "offloaded"),
    Row("dense", "TP 2", "bf16", "bf16 states", "ZeRO-1"),
    Row("dense", "PP 2", "none", "bf16 states", "offloaded"),
    Row("dense", "PP 2", "bf16", "int8 states", "whole"),
    Row("dense", "PP 2", "int8", "fp16", "ZeRO-1"),
    Row("radius", "DP 2", "none", "bf16", "whole"),
    Row("radius", "DP 2, TP 2", "int8", "bf16", "whole"),
    Row("radius rolling", "DP 2", "bf16", "fp16", "whole"),
    Row("radius rolling", "PP 2", "int4", "fp32", "whole"),
    Row("samo", "1", "none", "fp16", "offloaded"),
    Row("samo", "1", "none", "bf16", "whole"),
    Row("samo", "1", "bf16", "int8 states", "whole"),
    Row("samo", "TP 2", "int4", "bf16", "whole"),
    Row("samo DSR", "DP 2", "bf16", "bf16 states", "whole"),
    Row("samo DSR", "DP 2, TP 2", "none", "int8 states", "ZeRO-1"),
    Row("samo+radius", "1", "int4", "bf16 states", "ZeRO-1"),
    Row("samo+radius", "PP 2", "none", "bf16", "ZeRO-1"),
    Row("topk", "DP 2", "none", "fp32", "whole"),
    Row("topk", "TP 2", "none", "bf16", "whole"),
    Row("powersgd", "DP 2", "none", "int8 states", "whole"),
    Row("powersgd", "TP 2", "none", "int8 states", "whole"),
    Row("lowrank+sparse", "DP 2", "none", "fp32", "whole"),
    Row("lowrank+sparse", "TP 2", "none", "fp32", "whole"),
    Row("roundrobin", "DP 2", "none", "fp32", "whole"),
    Row("roundrobin", "PP 2", "none", "fp32", "whole"),
    Row("demo", "DP 2", "none", "fp32", "whole"),
    Row("demo", "PP 2", "none", "fp16", "whole"),
    Row("diloco", "DP 2", "int8", "bf16", "whole"),
    Row("diloco", "TP 2", "none", "fp32", "whole"),
)


def on_rank(
    groups: ProcessGroups, flags: str, run_dir: Path, cut: dict[str, int]
) -> dict[str, Any]:
    return train(grid(groups, **cut), flags, run_dir)


def last_saved(run_dir: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(run_dir / "checkpoints" / f"step_{STEPS:08d}") as saved:
        return {name: saved.read(name) for name in saved.names()}


def test_every_pair_of_settings_that_the_program_accepts_has_a_row() -> None:
    """A pair without a row is refused where all other settings have their defaults.

    Grids of four ranks are not held to that: they take twice the time.
    """
    values = (GRIDS, WIRES, FORMATS, PLACES)
    pairs = {
        ((first, a), (second, b))
        for (first, left), (second, right) in combinations(enumerate(values), 2)
        for a in left
        if left is not GRIDS or GRIDS[a][0] < 4
        for b in right
    }
    tested = set[Any]().union(*(row.pairs for row in ROWS))
    for missing in sorted(pairs - tested):
        settings = ["DP 2", "none", "fp32", "whole"]
        for factor, value in missing:
            settings[factor] = value
        assert not Row("dense", *settings).is_legal, missing
    assert {(path, is_cut) for path in PATHS for is_cut in (False, True)} <= tested


@pytest.mark.push
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row))
def test_left_and_resumed_is_unbroken(ranks: Ranks, tmp_path: Path, row: Row) -> None:
    """Dropout is on; the last checkpoints have the states of gradient paths and of their wire."""
    world, cut = GRIDS[row.grid]

    leaves = LEAVES[ROWS.index(row) % len(LEAVES)]
    check_left_and_resumed(ranks, world, row.flags, leaves, tmp_path, on_rank, cut)
    through, left = last_saved(tmp_path / "through"), last_saved(tmp_path / "left")
    assert through.keys() == left.keys()
    assert [name for name in left if not torch.equal(left[name], through[name])] == []
    if "radius" in row.path and world > 1:
        assert any(x.any() for name, x in left.items() if name.startswith("residual/"))
