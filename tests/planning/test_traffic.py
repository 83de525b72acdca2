"""Planned bytes against those that real runs count and log."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.planning.traffic import step_bytes
from tests.planning.grids import MODEL, on_rank, planned
from tests.planning.test_state import PP, RADIUS, SAMO, TP
from tests.ranks import Ranks

FULL = "--recompute-granularity full"
CASES = {
    "dense": "",
    "dense 16 bit": "--bf16 --grad-reduce-in-bf16",
    "tensor": f"{TP} --bf16",
    "sequence": f"{TP} --sequence-parallel --bf16 {FULL}",
    "recomputed": f"{TP} {FULL} --recompute-method block --recompute-num-layers 2",
    "four": "--tensor-model-parallel-size 4 --untie-embeddings-and-output-weights",
    "stages": f"{PP} --bf16",
    "grid": f"{TP} {PP} --sequence-parallel",
    "in turns": f"{PP} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    "zero": f"--use-distributed-optimizer --bf16 {PP}",
    "samo": f"{SAMO} --bf16 {PP}",
    "samo zero": f"{SAMO} --use-distributed-optimizer --bf16",
    "radius": f"--grad-path radius {RADIUS} --bf16",
    "radius rolling": f"--grad-path radius {RADIUS} --radius-schedule rolling {PP}",
    "both": f"{SAMO} --grad-path samo+radius {RADIUS} --bf16",
    "topk": f"--grad-path topk --topk-density 0.1 --topk-start-iter 3 --bf16 {PP}",
    "powersgd": f"--grad-path powersgd --powersgd-rank 2 --powersgd-start-iter 2 {TP}",
}
QUESTIONS = 128
"""Bytes at most by which a path's questions to the other ranks of its model go beyond the plan."""


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_a_step_are_those_logged(ranks: Ranks, tmp_path: Path, case: str) -> None:
    flags = f"{MODEL} --train-iters 5 {CASES[case]}"
    grid = planned(flags, 4)
    for each in ranks.run(4, on_rank, flags, 5, tmp_path):
        stage, tp_rank = each["place"]
        rank = grid.rank(stage, tp_rank, stored=each["stored"])
        found = step_bytes(grid, stage, rank)
        sent = sorted(k.bytes_sent(grid.dims.dp) for k in found.dp for _ in range(k.steps))
        if "rolling" in case:
            # Parts of a matrix differ by an entry, and chosen entries lie unevenly in them.
            assert sent == pytest.approx(sorted(each["sent"]), rel=0.05)
        else:
            assert sent == sorted(each["sent"])
        slack = QUESTIONS if each["stored"] == {} and "grad-path" in flags else 0
        for name, wanted in (("bytes_tp", found.tp), ("bytes_pp", found.pp)):
            for axes in each["axes"]:
                assert wanted <= axes.get(name, 0) <= wanted + slack, name
