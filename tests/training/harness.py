"""Whole training runs inside the shared rank processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.find import CheckpointSource, locate_checkpoint
from megatron.config import parse, resolve
from megatron.launch import Launch, Runtime
from megatron.metrics import cut_metrics
from megatron.parallel.groups import ProcessGroups
from megatron.pretrain import build_trainer, open_metrics
from megatron.tasks.task import Task
from megatron.training import Trainer
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data "
    "--vocab-size 96 --micro-batch-size 2 --global-batch-size 16 --train-iters 8 --lr 3e-3 "
    "--eval-iters 1 --eval-interval 100 --log-interval 4"
)
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
CPU = torch.device("cpu")


def make_trainer(
    groups: ProcessGroups,
    flags: str,
    run_dir: Path,
    device: torch.device = CPU,
    *,
    task: Task = GPT_TASK,
) -> Trainer:
    """The trainer that `pretrain_gpt.py {flags}`, or another task's script, would build here."""
    config = parse(flags.split(), paths=GRADIENT_PATHS, task=task.config)
    config = resolve(config, groups.world.size)
    rank, size = groups.world.rank, groups.world.size
    launch = Launch(
        launcher="test", rank=rank, world_size=size, local_rank=rank, local_world_size=size
    )
    runtime = Runtime(launch=launch, device=device, backend="gloo")

    def locate() -> str:
        # One rank for all: it renames what is damaged.
        found = None if rank else locate_checkpoint(config, run_dir, log=lambda text: None)
        return json.dumps([str(found.path), found.own] if found else None)

    found = json.loads(groups.world.all_gather_str(groups.world.raise_on_all_ranks(locate))[0])
    origin = CheckpointSource(Path(found[0]), own=found[1]) if found else None
    metrics = open_metrics(task, config, runtime, run_dir, origin)
    trainer = build_trainer(task, GRADIENT_PATHS, config, runtime, groups, run_dir, metrics, origin)
    if runtime.is_writer:
        cut_metrics(run_dir, trainer.progress.iteration)
    return trainer


def train(
    groups: ProcessGroups, flags: str, run_dir: Path, task: Task = GPT_TASK
) -> dict[str, Any]:
    """Run to the end; the state it ends in, and what `train` returned."""
    trainer = make_trainer(groups, flags, run_dir, task=task)
    outcome = trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    groups.world.barrier()
    return {
        "outcome": (outcome.exit_code, outcome.left),
        "iteration": trainer.progress.iteration,
        "consumed": trainer.progress.consumed_samples,
        "applied": trainer.optimizer.applied,
        "scale": trainer.scaler.scale,
        "scaler": trainer.scaler.state(),
        "state": {f"{kind}/{name}": t.clone() for kind, name, t in trainer.optimizer.tensors()},
        "params": {
            info.name: info.param.detach().clone() for info, _, _ in trainer.engine.slices()
        },
        "buffers": {name: tensor.clone() for name, tensor in trainer.buffers.tensors()},
    }


def metrics_of(run_dir: Path, key: str = "lm_loss") -> list[Any]:
    """One value for each line of metrics.jsonl that has this key, but for the lines of starts."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line and "ranks" not in line]
