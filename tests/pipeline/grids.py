"""Trainers on the ranks of a grid, stepped by hand: nothing is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.data_parallel.bucket import Slice
from megatron.optimizer.bucket_optimizer import PARAM
from megatron.parallel.groups import ProcessGroups
from megatron.training import Trainer
from tests.ranks import grid
from tests.training.harness import make_trainer

SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--vocab-size 96 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 0.5 "
    "--optimizer sgd --sgd-momentum 0.5 --clip-grad 0.5 --eval-iters 2 --log-interval 1 "
    "--log-params-norm --log-num-zeros-in-grad --timing-log-level 2 --ddp-bucket-size 4000"
)


def trainer_on(
    groups: ProcessGroups, flags: str, pp: int, run_dir: Path, *, tp: int = 1
) -> Trainer:
    """The trainer of this rank of a grid with `pp` stages of `tp` ranks."""
    sizes = f"--pipeline-model-parallel-size {pp} --tensor-model-parallel-size {tp}"
    return make_trainer(grid(groups, pp=pp, tp=tp), f"{SMALL} {sizes} {flags}", run_dir)


def masters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Master weights of this rank, flat, without what only fills up a slice."""
    return {
        name: Slice(0, trainer.engine.infos[name].local_entries).of(flat).clone()
        for kind, name, flat in trainer.optimizer.tensors()
        if kind == PARAM
    }


def train_by_hand(
    groups: ProcessGroups, flags: str, pp: int, run_dir: Path, tp: int = 1
) -> dict[str, Any]:
    """Run three steps with an evaluation in between, and return each rank's results."""
    trainer = trainer_on(groups, flags, pp, run_dir, tp=tp)
    launched: list[int] = []
    backward, finish = trainer.stage.backward, trainer.engine.finish

    def watched_backward(*args: Any, **kwargs: Any) -> Any:
        launched.append(len(trainer.engine._work))
        return backward(*args, **kwargs)

    def watched_finish(*args: Any, **kwargs: Any) -> Any:
        launched.append(len(trainer.engine._work))
        return finish(*args, **kwargs)

    trainer.stage.backward = watched_backward  # type: ignore[method-assign]
    trainer.engine.finish = watched_finish  # type: ignore[method-assign]
    records = []
    for number in range(3):
        record, _ = trainer.train_step()
        trainer.metrics.step(record)
        records.append(record)
        if number == 1:
            trainer._evaluate("valid", trainer.readers.valid)
    trainer.metrics.close()
    trainer.engine.detach()
    trainer.pipeline.transport.close()
    return {
        "losses": [record.loss for record in records],
        "norms": [record.grad_norm for record in records],
        "params_norms": [record.params_norm for record in records],
        "zeros": [record.num_zeros for record in records],
        "skipped": [record.skipped for record in records],
        "tokens": [record.counted for record in records],
        "sent": [dict(record.axis_bytes) for record in records],
        "timers": set(records[-1].timers),
        "params": masters(trainer),
        "cuts": {name: info.tp_shard for name, info in trainer.engine.infos.items()},
        "shapes": {name: info.logical_shape for name, info in trainer.engine.infos.items()},
        "launched": launched,
        "buckets": len(trainer.engine.buckets),
        "tied": sum(bucket.tied for bucket in trainer.engine.buckets),
        "kept": len(trainer.stage._graphs),
    }
