"""Radius on a device: equal to the CPU, without host waits, and resumable."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.checkpoint.find import find_checkpoint
from megatron.data_parallel.reducer import StepContext
from tests.contract.harness import copies
from tests.gpu.sizes import fitting
from tests.gpu.test_training_on_cuda import (
    losses,
    make_trainer,
    no_host_sync,
    states,
    train_reader,
)

RADIUS = "--grad-path radius --radius-interval 3 --radius-start-iter 1 --train-iters 12"
KINDS = ("", "--radius-schedule rolling", "--bf16")


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference by the norm of `wanted`: single entries may cancel."""
    found, wanted = found.cpu().double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def test_steps_equal_those_on_the_cpu(device: torch.device, tmp_path: Path) -> None:
    """Drawn, since the largest updates of two devices are not always the same entries."""
    for number, kind in enumerate(KINDS):
        flags = f"{RADIUS} --radius-select seeded {kind}"
        here = make_trainer(device, tmp_path / f"device{number}", flags)
        there = make_trainer(torch.device("cpu"), tmp_path / f"cpu{number}", flags)
        for mine, wanted in zip(losses(here, 8), losses(there, 8), strict=True):
            assert abs(mine - wanted) < 2e-3
        chosen = copies(there.engine.reducer.shared_tensors())
        for name, tensor in copies(here.engine.reducer.shared_tensors()).items():
            assert torch.equal(tensor, chosen[name]), name
        rest = copies(there.engine.reducer.state_tensors())
        bound = 5e-2 if kind == "--bf16" else 1e-4
        for name, tensor in copies(here.engine.reducer.state_tensors()).items():
            assert relative_error(tensor, rest[name]) < bound, name


def test_it_learns(device: torch.device, tmp_path: Path) -> None:
    for number, kind in enumerate(KINDS):
        trainer = make_trainer(device, tmp_path / str(number), f"{RADIUS} {kind}")
        found = losses(trainer, 12)
        assert found[-1] < found[0] - 0.3, kind


def test_a_sparse_step_makes_no_wait(device: torch.device, tmp_path: Path) -> None:
    for number, kind in enumerate(KINDS):
        trainer = make_trainer(device, tmp_path / str(number), f"{RADIUS} {kind}")
        losses(trainer, 4)  # the kernels are compiled by now
        batches = list(train_reader(trainer).read(0, fitting(8, 2)))
        trainer.engine.begin(StepContext(t=5))
        with no_host_sync(device):
            for batch in batches:
                trainer.stage.forward(5, batch)
                if batch is batches[-1]:
                    trainer.engine.expect_last_backward()
                trainer.stage.backward(batch.index, 1e-3)
        step = trainer.engine.finish(tag=5, clip_norm=1.0)
        assert step.ok and any(reduced.index is not None for reduced in step.reduced)
        with no_host_sync(device):
            trainer.optimizer.step(step, lr=1e-3, weight_decay=0.1)
            trainer.engine.commit(step)


def test_a_checkpoint_brings_it_back(device: torch.device, tmp_path: Path) -> None:
    for number, kind in enumerate(KINDS):
        folder = tmp_path / str(number)
        trainer = make_trainer(device, folder, f"{RADIUS} {kind}")
        losses(trainer, 5)
        trainer.saver.save(trainer.progress, wait=True)
        path = find_checkpoint(folder / "checkpoints", log=print)
        assert path is not None
        resumed = make_trainer(device, folder, f"{RADIUS} {kind}", checkpoint=path)
        expected = states(trainer)
        assert all(torch.equal(expected[key], tensor) for key, tensor in states(resumed).items())
        first, second = trainer.engine.reducer, resumed.engine.reducer
        was = copies(first.state_tensors()) | copies(first.shared_tensors())
        found = copies(second.state_tensors()) | copies(second.shared_tensors())
        assert found.keys() == was.keys() and len(was) > 8
        assert all(torch.equal(found[name], was[name]) for name in was)
        assert abs(losses(trainer, 1)[0] - losses(resumed, 1)[0]) < 1e-3
