"""The runs whose checkpoints are frozen, and the table of what those checkpoints hold."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.store import Checkpoint
from megatron.parallel.groups import ProcessGroups
from tests.training.harness import NO_DROPOUT, metrics_of, train

FOLDER = Path(__file__).resolve().parent
TABLE = FOLDER / "expected.json"
"""For each run: `losses`, one for each step after the checkpoint, and `tensors`, their hashes."""

WORLD = 2
SAVED_AT, STEPS = 5, 7
"""Step 5 lies inside an interval of Radius, so residuals are not zero, and ends a round of local
steps, so that other numbers of replicas may go on."""
FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 24 "
    "--make-vocab-size-divisible-by 4 --mock-data --micro-batch-size 1 --global-batch-size 4 "
    f"--train-iters {STEPS} --lr 5e-2 --lr-decay-style constant --eval-iters 0 --log-interval 1 "
    f"--device cpu {NO_DROPOUT}"
)
_RADIUS = "--radius-density 0.3 --radius-interval 3 --radius-start-iter 2"
RUNS = {
    "dense": "",
    "samo": "--grad-path samo --samo-sparsity 0.5",
    "radius": f"--grad-path radius {_RADIUS}",
    "radius-rolling": f"--grad-path radius {_RADIUS} --radius-schedule rolling",
    "samo-radius": f"--grad-path samo+radius --samo-sparsity 0.5 {_RADIUS}",
    "topk": "--grad-path topk --topk-density 0.1 --topk-start-iter 2",
    "powersgd": "--grad-path powersgd --powersgd-rank 2 --powersgd-start-iter 2",
    "lowrank-sparse": "--grad-path lowrank+sparse --lowrank-rank 2 --lowrank-start-iter 2",
    "roundrobin": "--grad-path roundrobin --roundrobin-interval 3 --roundrobin-start-iter 2",
    "demo": "--grad-path demo --demo-chunk 8 --demo-k 4 --demo-start-iter 2 --lr 1e-2 "
    "--optimizer sgd --sgd-momentum 0 --clip-grad 0",
    "diloco": "--grad-path diloco --local-steps 5",
    "zero": "--use-distributed-optimizer",
    "offload": "--bf16 --optimizer-cpu-offload --offload-bucket-size 500",
}


Expected = dict[str, dict[str, Any]]
"""The table, by the name of a run."""


def on_rank(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[int, float]:
    """Train a rank to the end; return the losses by step, on rank 0 alone."""
    train(groups, flags, run_dir)
    if groups.world.rank:
        return {}
    steps, losses = metrics_of(run_dir, "iteration"), metrics_of(run_dir)
    return dict(zip(steps, losses, strict=True))


def checkpoint_of(run_dir: Path) -> Path:
    """Return the folder of the frozen step of a run."""
    return run_dir / "checkpoints" / f"step_{SAVED_AT:08d}"


def hashes(folder: Path) -> dict[str, str]:
    """Return dtype, shape and SHA-256 of each tensor of a checkpoint, read whole, by name."""
    with Checkpoint.open(folder) as saved:
        return {name: _described(saved.read(name)) for name in saved.names()}


def _described(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {digest}"
