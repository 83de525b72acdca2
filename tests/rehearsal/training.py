"""Training steps of one rank on the device, beside the same steps on the CPU. Runs in a process
that has the device."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.gpu.test_training_on_cuda import SMALL, make_trainer
from tests.rehearsal.device import install
from tests.rehearsal.findings import source

STEPS = 5


def compare(flags: str) -> dict[str, Any]:
    """Train on both; returns the losses, every finding, and the waits of each step."""
    device = install()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(torch.device("cuda", 0), Path(folder, "cuda"), f"{SMALL} {flags}")
        device.findings.take()  # building a model may wait
        losses, steps = [], []
        for _ in range(STEPS):
            losses.append(trainer.train_step()[0].loss)
            steps.append(device.findings.take())
        del trainer
        gc.collect()
        device.memory.settle()
        found = [*sum(steps, []), *device.findings.take()]
        there = make_trainer(torch.device("cpu"), Path(folder, "cpu"), f"{SMALL} {flags}")
        wanted = [there.train_step()[0].loss for _ in range(STEPS)]
    return {
        "losses": losses,
        "wanted": wanted,
        "wrong": [str(one) for one in found if one.kind != "wait"],
        "waits": [[source(one) for one in step if one.kind == "wait"] for step in steps],
    }
