"""Training steps of the ranks of a grid on devices, compared with the same steps on the CPU."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.data.data_loader import DeviceMicrobatch
from megatron.model.gpt import GPT
from megatron.parallel.groups import ProcessGroups
from megatron.training import Trainer
from tests.ranks import grid
from tests.rehearsal import device, nccl
from tests.rehearsal.findings import source
from tests.training.harness import CPU, NO_DROPOUT, make_trainer

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 100 "
    "--mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 12 --lr 3e-3 "
    f"--eval-iters 0 --compile false --ddp-bucket-size 20000 {NO_DROPOUT}"
)


def compare(groups: ProcessGroups, flags: str, tp: int, pp: int, steps: int) -> dict[str, Any]:
    """Train on both; returns the losses, every finding, the waits of the last step, the log of
    NCCL's calls, communicators that were made in a step, where the thread makes batches, and
    whether models mark their passes for a message-driven stage.
    """
    here, played = device.install(), nccl.install()
    flags = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} {flags}"
    groups = grid(groups, tp=tp, pp=pp)
    played.take()
    with trainer_on(groups, flags, current_device(groups)) as trainer:
        here.findings.take()  # building a model may wait
        calls = played.take()
        connected = {call.communicator for call in calls}
        losses, found = [], []
        for _ in range(steps):
            losses.append(trainer.train_step()[0].loss)
            found.append(here.findings.take())
        calls += played.take()
        made_on, marks = device_of_next_batch(trainer), marks_passes(trainer)
    del trainer
    gc.collect()
    here.memory.settle()
    found.append(here.findings.take())
    with trainer_on(groups, flags, CPU) as trainer:
        wanted = [trainer.train_step()[0].loss for _ in range(steps)]
    return {
        "losses": losses,
        "wanted": wanted,
        "wrong": [str(one) for some in found for one in some if one.kind != "wait"],
        "waits": [source(one) for one in found[steps - 1] if one.kind == "wait"],
        "made_on": made_on,
        "marks": marks,
        "calls": calls,
        "late": sorted({call.communicator for call in calls} - connected),
    }


def device_of_next_batch(trainer: Trainer) -> str:
    """Return the type of device on which a thread has made the next batch."""
    assert trainer._prefetcher is not None and trainer._prefetcher._ahead is not None
    _, ahead = trainer._prefetcher._ahead
    (first, *_) = ahead.result()
    assert isinstance(first, DeviceMicrobatch)
    return first.tokens.device.type


def marks_passes(trainer: Trainer) -> bool:
    """Return whether models mark their passes for a message-driven stage."""
    driven = trainer.pipeline.driven
    if driven is None or driven._marker is None:
        return False
    mark = driven._marker.mark
    return all(isinstance(c, GPT) and c.before_last_layer == mark for c in trainer.stage.chunks)


def current_device(groups: ProcessGroups) -> torch.device:
    """This rank's device, which is the current one from now on."""
    found = torch.device("cuda", groups.world.rank)
    torch.cuda.set_device(found)
    return found


@contextmanager
def trainer_on(groups: ProcessGroups, flags: str, where: torch.device) -> Iterator[Trainer]:
    """A trainer that is connected as a run's is, and let go at the end."""
    groups.connect(where)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(groups, f"{SMALL} {flags}", Path(folder), where)
        yield trainer
        trainer.optimizer.finish_param_gather()  # as a run's last save does
        trainer.metrics.close()
        trainer.engine.detach()
        trainer.pipeline.transport.close()
