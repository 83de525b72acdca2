"""Planned model and path state against the tensors of real trainers, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.planning.state import state_bytes
from tests.planning.grids import MODEL, on_rank, planned, run
from tests.ranks import Ranks

SAMO = "--grad-path samo --samo-sparsity 0.7 --samo-pruning random"
RADIUS = "--radius-density 0.3 --radius-interval 2 --radius-start-iter 1"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CASES = {
    "dense": (1, ""),
    "dense sgd": (1, "--optimizer sgd --bf16"),
    "dense bf16": (2, "--bf16 --grad-reduce-in-bf16"),
    "gated": (2, f"--swiglu --group-query-attention --num-query-groups 2 --bf16 {TP} "
              "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
              "--untie-embeddings-and-output-weights"),
    "sequence": (4, f"{TP} --sequence-parallel --bf16"),
    "grid": (4, f"{TP} {PP} --bf16"),
    "in turns": (2, f"{PP} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    "zero": (4, f"--use-distributed-optimizer --bf16 {PP}"),
    "zero fp32": (2, "--use-distributed-optimizer"),
    "samo": (1, SAMO),
    "samo bf16": (4, f"{SAMO} --bf16 {PP} --grad-reduce-in-bf16"),
    "samo kept": (2, f"{SAMO} --bf16 {TP} --samo-keep-embeddings"),
    "samo zero": (2, f"{SAMO} --use-distributed-optimizer --bf16"),
    "samo early": (1, "--grad-path samo --samo-sparsity 0.5 --samo-pruning early-bird "
                   "--samo-early-bird-interval 1 --bf16"),
    "radius": (2, f"--grad-path radius {RADIUS}"),
    "radius bf16": (4, f"--grad-path radius {RADIUS} --bf16 {PP}"),
    "radius in place": (2, f"--grad-path radius {RADIUS} --radius-residual in-place"),
    "radius cut": (4, f"--grad-path radius {RADIUS} --bf16 {TP}"),
    "both": (2, f"{SAMO} --grad-path samo+radius {RADIUS} --bf16"),
    "topk": (4, f"--grad-path topk --topk-density 0.1 --bf16 {TP}"),
    "powersgd": (4, f"--grad-path powersgd --powersgd-rank 2 --bf16 {TP}"),
}  # fmt: skip
SPREAD = ("index", "values")
"""Of what is chosen from cut tensors, kinds that depend on which entries are large."""


@pytest.mark.parametrize("case", CASES)
def test_state_is_planned_to_the_byte(ranks: Ranks, tmp_path: Path, case: str) -> None:
    world, flags = CASES[case]
    grid = planned(f"{MODEL} {flags}", world)
    found = run(ranks, world, on_rank, f"{MODEL} {flags}", 3, tmp_path)
    uneven = dict[str, int]()
    for each in found:
        stage, tp_rank = each["place"]
        # Which entries a random mask leaves on a rank of several is known once it is drawn.
        rank = grid.rank(stage, tp_rank, stored=each["stored"])
        shapes = [
            (p.name, p.logical_shape, p.cut, p.partial, p.tied, p.numel)
            for p in rank.params.values()
        ]
        assert shapes == each["params"]
        assert [(tuple(b.slices.items()), b.numel) for b in rank.buckets] == each["buckets"]
        kept = {kind: size for kind, size in state_bytes(grid, rank).kept.items() if size}
        real = {kind: size for kind, size in each["kept"].items() if size}
        if "radius" in flags and grid.dims.tp > 1:
            for kind in SPREAD:
                uneven[kind] = uneven.get(kind, 0) + kept.pop(kind) - real.pop(kind)
        assert kept == real
    assert not any(uneven.values()), "what is chosen differs between the ranks, not over them"


def test_shares_before_a_mask_is_drawn_add_up(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{MODEL} {SAMO} --bf16 {TP}"
    grid = planned(flags, 2)
    found = ranks.run(2, on_rank, flags, 1, tmp_path)
    ours = [state_bytes(grid, grid.rank(0, tp_rank)).kept for tp_rank in range(2)]
    for kind in ("index", "parameters"):
        assert sum(each[kind] for each in ours) == sum(each["kept"][kind] for each in found)
    for kind, each in (("master", 4), ("gradients", 4)):
        gaps = each * 64 * 2 * len(found[0]["params"])
        real = sum(rank["kept"][kind] for rank in found)
        assert abs(sum(rank[kind] for rank in ours) - real) < gaps
