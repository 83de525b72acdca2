"""Radius on the shards of a node computes what Radius computes on the mean gradients of the nodes.

The mean of two gradients of a node is exact, so checkpoints of both runs are equal bit by bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.node_reducer import NodeReducer
from megatron.optimizer.state_formats import StateFormats
from megatron.parallel.groups import Group, ProcessGroups
from megatron.sparse import selection
from tests.contract.grid import GridToy, gradients, logical
from tests.contract.harness import FEW, SHORT, PathCase, Toy, same
from tests.contract.harness import gradients as toy_gradients
from tests.ranks import Ranks, grid

NODES, STEPS, LEFT_AT = 2, 10, 6
"""Step 4 is the first resample; entries wait when the run is left and after its last step."""
PAPER = PathCase("radius", SHORT)
ROLLING = PathCase("radius", SHORT | {"radius_schedule": "rolling"})
OFFSETS = PathCase("radius", SHORT | FEW)
BY_GRADIENT = PathCase("radius", SHORT | {"radius_select": "gradient"})
DRAWN = PathCase("radius", SHORT | {"radius_schedule": "rolling", "radius_select": "seeded"})
DROPPING = PathCase("radius", SHORT | {"radius_residual": "none"})
PER_STEP = PathCase("radius", SHORT | {"radius_schedule": "rolling", "radius_clip": "per-step"})
BF16_MOMENTS = {"exp_avg": "bf16", "exp_avg_sq": "bf16"}


def on_rank(
    groups: ProcessGroups,
    case: PathCase,
    pruned: bool,
    moments: dict[str, Any],
    together: int,
    folder: Path,
) -> list[dict[str, float]]:
    """Train, save and load in between; return the norm and the statistics of each step.

    With more data-parallel ranks than nodes, each node has several ranks, with a gradient each. A
    rank that is a node has the mean of these gradients.
    """
    inner = groups.world.size // NODES
    mine = grid(groups, inner=inner)
    formats = StateFormats(**moments) if moments else None
    toy = GridToy(mine, case, pruned=pruned, formats=formats)
    assert isinstance(toy.engine.reducer, NodeReducer) == (inner > 1)
    found = []
    before, selection.TOGETHER = selection.TOGETHER, together
    try:
        for number in range(STEPS):
            if number == LEFT_AT:
                toy.save(folder)
                toy = GridToy(mine, case, pruned=pruned, formats=formats)
                toy.load(folder, LEFT_AT)
            step = toy.step([_gradient(number, mine.dp.rank, inner)])
            found.append({"norm": step.norm, **toy.engine.stats(full=True).extra})
    finally:
        selection.TOGETHER = before
    toy.save(folder)
    return found


def _gradient(number: int, rank: int, inner: int) -> dict[str, torch.Tensor]:
    if inner > 1:
        return gradients(number, rank)
    first, second = gradients(number, 2 * rank), gradients(number, 2 * rank + 1)
    return {name: (one + second[name]) / 2 for name, one in first.items()}


@pytest.mark.parametrize(
    ("case", "pruned", "moments", "together"),
    [
        (PAPER, False, {}, 0),
        (PAPER, True, {}, 1 << 17),
        (ROLLING, False, {}, 0),
        (ROLLING, True, BF16_MOMENTS, 0),
        (OFFSETS, False, {}, 1 << 17),
        (BY_GRADIENT, False, BF16_MOMENTS, 0),
        (DRAWN, False, {}, 0),
        (DROPPING, False, {}, 0),
        (PER_STEP, False, {}, 0),
    ],
)
def test_shards_select_send_and_keep_what_whole_gradients_would(
    ranks: Ranks,
    tmp_path: Path,
    case: PathCase,
    pruned: bool,
    moments: dict[str, Any],
    together: int,
) -> None:
    args = case, pruned, moments, together
    wanted = ranks.run(NODES, on_rank, *args, tmp_path / "whole")
    found = ranks.run(2 * NODES, on_rank, *args, tmp_path / "shards")
    for rank, steps in enumerate(found):
        # Each node has a residual of its own.
        for ours, theirs in zip(steps, wanted[rank // 2], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
    for step in (LEFT_AT, STEPS):
        whole, shards = (logical(tmp_path / name, step) for name in ("whole", "shards"))
        kept = [name for name in whole if name.startswith("residual/")]
        assert kept or case is DROPPING
        assert all(whole[name].shape[0] == NODES and whole[name].any() for name in kept)
        assert same(whole, shards) == []


@pytest.mark.push
def test_no_bound_of_one_rank_holds_for_sums_between_nodes() -> None:
    inner, outer = Exchange(Group((0, 1), 0)), Exchange(Group((0, 2), 0))
    assert AllReduceReducer(inner).overflow_bound == 1.0
    assert NodeReducer(inner, AllReduceReducer(outer)).overflow_bound is None


def on_rank_limit(groups: ProcessGroups) -> list[str]:
    """Return what differs between dense and density 1 after some steps."""
    nodes = grid(groups, inner=2)
    toys = [
        Toy(nodes, case, dtype=torch.bfloat16)
        for case in (PathCase("dense"), PathCase("radius", {"radius_density": 1.0}))
    ]
    for number in range(5):
        for toy in toys:
            toy.step([toy_gradients(number, groups.dp.rank)], clip_norm=0.5)
    assert all(toy.engine.buckets[0].lends_grad for toy in toys)
    return same(*(toy.state() for toy in toys))


@pytest.mark.push
def test_9_density_1_is_dense_with_the_same_nodes(ranks: Ranks) -> None:
    assert ranks.run(4, on_rank_limit) == [[]] * 4
