"""A GPT saved by any grid loads on any other bit by bit, and trains on equally."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, reduce
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.format import DATA_PARALLEL
from megatron.checkpoint.store import Checkpoint
from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks, grid
from tests.tiers import sampled
from tests.training.harness import NO_DROPOUT, make_trainer

pytestmark = pytest.mark.push

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --swiglu "
    "--vocab-size 97 --micro-batch-size 1 --global-batch-size 4 --train-iters 8 --lr 1e-3 "
    f"--eval-iters 0 --log-interval 100 --ddp-bucket-size 4000 {NO_DROPOUT}"
)

"""The vocabulary divides by no number of ranks, and a gate lies beside its value."""
LEFT_AT, MORE = 3, 2
"""Inside an interval of Radius: step 2 sends everything, step 3 leaves entries waiting."""
RADIUS = "--radius-density 0.3 --radius-interval 2 --radius-start-iter 0"
PRUNED = "--samo-sparsity 0.5 --samo-pruning random"
PATHS = {
    "radius": f"--grad-path radius {RADIUS}",
    # Its masks are no longer those that a start would draw.
    "samo": f"--grad-path samo {PRUNED} --dsr-interval 1 --dsr-fraction 0.1 --dsr-threshold 0.01",
    "samo+radius": f"--grad-path samo+radius {PRUNED} {RADIUS}",
}
GRIDS = {
    "1": (1, 1, 1, ""),
    "DP4": (1, 1, 4, ""),
    "TP2": (2, 1, 1, ""),
    "TP4": (4, 1, 1, ""),
    "PP2": (1, 2, 1, ""),
    "PP2, in turns": (1, 2, 1, "--num-layers-per-virtual-pipeline-stage 1"),
    "PP4": (1, 4, 1, ""),
    "TP2xDP2": (2, 1, 2, "--sequence-parallel"),
    "PP2xDP2": (1, 2, 2, ""),
    "TP2xPP2": (2, 2, 1, ""),
    "DP2, sharded": (1, 1, 2, "--use-distributed-optimizer"),
    "DP4, nodes": (1, 1, 4, "--dp-inner-size 2"),
    "TP2xDP4, nodes": (2, 1, 4, "--dp-inner-size 2 --sequence-parallel"),
}
"""Sizes of TP, PP and DP, and what else goes with them."""
ALL_KINDS = {"param", "exp_avg", "exp_avg_sq", "mask", "entries", "residual"}
PAIRS = [
    ("1", "TP2xPP2", "samo+radius"),
    ("DP4", "TP4", "samo+radius"),
    ("TP2", "PP2, in turns", "samo+radius"),
    ("TP4", "DP4", "samo+radius"),
    ("PP2", "TP2xDP2", "samo+radius"),
    ("PP4", "PP2xDP2", "samo+radius"),
    ("TP2xDP2", "PP4", "samo+radius"),
    ("PP2xDP2", "TP2", "samo+radius"),
    ("TP2xPP2", "1", "samo+radius"),
    ("PP2, in turns", "PP2", "samo+radius"),
    ("TP2xPP2", "DP4", "radius"),
    ("DP2, sharded", "TP2xPP2", "samo"),
    ("PP4", "DP2, sharded", "samo"),
    ("DP2, sharded", "DP4", "samo+radius"),
    ("DP4, nodes", "TP2", "samo"),
    ("DP2, sharded", "DP4, nodes", "samo"),
    ("TP4", "DP2, sharded", "radius"),
    ("DP4, nodes", "TP2", "radius"),
    ("DP4, nodes", "DP4", "samo+radius"),
    ("TP2xDP2", "DP4, nodes", "samo+radius"),
    ("DP2, sharded", "DP4, nodes", "radius"),
    ("DP4, nodes", "TP2xDP4, nodes", "samo+radius"),
    ("TP2xDP4, nodes", "TP2", "radius"),
]
ON_PUSH = [
    ("1", "TP2xPP2", "samo+radius"),
    ("DP4", "TP4", "samo+radius"),
    ("TP2xPP2", "1", "samo+radius"),
    ("PP2, in turns", "PP2", "samo+radius"),
    ("DP2, sharded", "TP2xPP2", "samo"),
    ("TP4", "DP2, sharded", "radius"),
    ("DP4, nodes", "TP2", "radius"),
    ("TP2xDP2", "DP4, nodes", "samo+radius"),
]
"""Each axis as source and as target."""


def on_rank(groups: ProcessGroups, where: str, flags: str, run_dir: Path) -> list[float]:
    """Train to `LEFT_AT` if the run starts at 0, save, train on: the losses after the save."""
    tp, pp, _, more = GRIDS[where]
    sizes = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    mine = grid(groups, tp=tp, pp=pp, inner=2 if "--dp-inner-size" in more else 1)
    trainer = make_trainer(mine, f"{MODEL} {flags} {sizes} {more}", run_dir)
    while trainer.progress.iteration < LEFT_AT:
        trainer.train_step()
    trainer.saver.save(trainer.progress, wait=True)
    losses = [float(trainer.train_step()[0].loss) for _ in range(MORE)]
    trainer.metrics.close()
    trainer.engine.detach()
    return losses


def run(ranks: Ranks, where: str, flags: str, run_dir: Path) -> list[float]:
    tp, pp, dp, _ = GRIDS[where]
    losses, *others = ranks.run(tp * pp * dp, on_rank, where, flags, run_dir)
    assert all(other == losses for other in others)
    return losses


@pytest.fixture(scope="module")
def saved(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, list[float]]]:
    """The run of a grid under a path: its folder, and its losses after the save."""

    @cache
    def source(where: str, path: str) -> tuple[Path, list[float]]:
        folder = tmp_path_factory.mktemp("source")
        return folder, run(ranks, where, PATHS[path], folder)

    return source


def digests(run_dir: Path) -> dict[str, str]:
    """SHA-256 of every logical tensor: of what each data-parallel rank has of its own, the mean as
    a load by another number of ranks takes it."""
    found = {}
    with Checkpoint.open(run_dir / "checkpoints" / f"step_{LEFT_AT:08d}") as step:
        for name in step.names():
            tensor = step.read(name)
            if step.manifest.tensors[name].scope == DATA_PARALLEL:
                tensor = reduce(torch.Tensor.add, tensor.unbind(0)) / tensor.shape[0]
            content = f"{tensor.dtype} {list(tensor.shape)} {step.mask(name)}".encode()
            content += tensor.numpy().tobytes()
            found[name] = hashlib.sha256(content).hexdigest()
            if name.startswith("residual/"):
                assert tensor.any(), f"nothing waits in {name}"
    return found


@pytest.mark.parametrize(("source", "target", "path"), sampled(PAIRS, ON_PUSH))
def test_a_model_moves_to_another_grid(
    ranks: Ranks, tmp_path: Path, saved: Callable, source: str, target: str, path: str
) -> None:
    folder, losses = saved(source, path)
    again = run(ranks, target, f"{PATHS[path]} --load {folder}", tmp_path)
    was = digests(folder)
    assert digests(tmp_path) == was
    kinds = {name.partition("/")[0] for name in was}
    assert kinds >= ALL_KINDS if path == "samo+radius" else kinds >= {"param", "exp_avg"}
    assert again == pytest.approx(losses, rel=0, abs=1e-4)
