"""Whole runs with shared-out optimizer states: those of plain data parallelism, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.reader import FolderReader
from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks, grid
from tests.tiers import sampled
from tests.training.harness import NO_DROPOUT, TINY, make_trainer, metrics_of, train

pytestmark = pytest.mark.push

SHARED = "--use-distributed-optimizer"
RADIUS = "--grad-path radius --radius-density 0.3 --radius-interval 3 --radius-start-iter 2"
PRUNED = "--grad-path samo --samo-sparsity 0.5 --samo-pruning random --dsr-interval 1"


def on_nodes(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    return train(grid(groups, inner=2), flags, run_dir)


NODES = [
    "",
    f"--fp16 --initial-loss-scale 1024 {PRUNED}",
    RADIUS,
    f"--bf16 {RADIUS} --radius-schedule rolling --radius-select seeded",
]


@pytest.mark.parametrize("flags", sampled(NODES, [NODES[1], NODES[3]]))
def test_means_of_nodes_make_the_run_of_one_mean_up_to_rounding(
    ranks: Ranks, tmp_path: Path, flags: str
) -> None:
    base = f"{TINY} {NO_DROPOUT} {flags}"
    ranks.run(4, on_rank, 1, f"{base} {SHARED}", tmp_path / "plain")
    nodes = f"{base} --dp-inner-size 2 --check-weight-hash-across-dp-replicas-interval 2"
    through = ranks.run(4, on_nodes, nodes, tmp_path / "nodes")
    for key, close in (("lm_loss", 1e-3), ("grad_norm", 1e-2)):
        plain, ours = (metrics_of(tmp_path / name, key) for name in ("plain", "nodes"))
        assert ours == pytest.approx(plain, rel=close)
    # Left and resumed, it makes the same bits.
    ranks.run(4, on_nodes, f"{nodes} --exit-interval 5", tmp_path / "left")
    for mine, theirs in zip(through, ranks.run(4, on_nodes, nodes, tmp_path / "left"), strict=True):
        for name, weight in mine["params"].items():
            assert torch.equal(weight, theirs["params"][name]), name


def on_rank(groups: ProcessGroups, tp: int, flags: str, run_dir: Path) -> dict[str, Any]:
    return train(grid(groups, tp=tp), f"{flags} --tensor-model-parallel-size {tp}", run_dir)


SHARED_OUT = [
    (2, 1, f"--fp16 --initial-loss-scale 1024 {PRUNED} --log-interval 1"),
    (4, 2, "--bf16 --sequence-parallel --swiglu"),
    (2, 1, f"--bf16 {RADIUS} --exp-avg-dtype bf16 --exp-avg-sq-dtype int8"),
    (4, 2, RADIUS),
]


@pytest.mark.parametrize(
    ("world", "tp", "flags"),
    sampled(SHARED_OUT, SHARED_OUT[:3:2]),
    ids=[
        "dp2, pruned, rewired, fp16",
        "tp2 x dp2, bf16",
        "dp2, radius, coded",
        "tp2 x dp2, radius",
    ],
)
def test_states_that_are_shared_out_change_no_bit(
    ranks: Ranks, tmp_path: Path, world: int, tp: int, flags: str
) -> None:
    base = f"{TINY} {NO_DROPOUT} --check-weight-hash-across-dp-replicas-interval 2 {flags}"
    plain = ranks.run(world, on_rank, tp, base, tmp_path / "plain")
    halves = f"{base} {SHARED} --exit-interval 5"
    ranks.run(world, on_rank, tp, halves, tmp_path / "shared")
    # What it saved is read with states that are whole, too.
    for after in (f"{base} {SHARED}", base):
        folder = tmp_path / str(len(after))
        other = f"--load {tmp_path / 'shared'} --save {folder}"
        shared = ranks.run(world, on_rank, tp, f"{after} {other}", folder)
        for mine, theirs in zip(plain, shared, strict=True):
            assert mine["iteration"] == theirs["iteration"]
            for name, weight in mine["params"].items():
                assert torch.equal(weight, theirs["params"][name]), name
    for key in ("lm_loss", "grad_norm"):
        assert metrics_of(tmp_path / "plain", key)[:5] == metrics_of(tmp_path / "shared", key)


def on_rank_resumes(groups: ProcessGroups, tp: int, flags: str, run_dir: Path) -> tuple[int, int]:
    """Return the bytes that a rank reads of weights and moments, and those that it keeps."""
    read = 0
    fill = FolderReader.fill

    def count(reader: FolderReader, out: Any, name: str, box: Any) -> None:
        nonlocal read
        read += out.nbytes * name.startswith(("param/", "exp_avg/", "exp_avg_sq/"))
        fill(reader, out, name, box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderReader, "fill", count)
        flags = f"{flags} --tensor-model-parallel-size {tp}"
        trainer = make_trainer(grid(groups, tp=tp), flags, run_dir)
    kept = sum(tensor.nbytes for _, _, tensor in trainer.optimizer.tensors())
    trainer.engine.detach()
    trainer.metrics.close()
    return read, kept


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (4, 1), (4, 2)])
def test_a_rank_reads_only_what_it_keeps(ranks: Ranks, tmp_path: Path, world: int, tp: int) -> None:
    flags = f"{TINY} {SHARED} --exit-interval 2"
    ranks.run(world, on_rank, tp, flags, tmp_path)
    for read, kept in ranks.run(world, on_rank_resumes, tp, flags, tmp_path):
        assert 0 < read <= 1.1 * kept
