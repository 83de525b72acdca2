"""Training steps on a device, compared with the same steps on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron.checkpoint.find import CheckpointSource, find_checkpoint
from megatron.config import parse, resolve
from megatron.data.batches import Reader
from megatron.data_parallel.reducer import StepContext
from megatron.launch import Launch, Runtime
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.pretrain import build_trainer, open_metrics
from megatron.tensor_parallel.cross_entropy import token_losses
from megatron.training import Trainer
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS
from tests.gpu import sizes
from tests.gpu.sizes import fitting

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data "
    "--vocab-size 500 --micro-batch-size 2 --global-batch-size 8 --train-iters 8 --lr 3e-3 "
    "--eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --log-interval 100 --compile false"
)


SMALL = (
    "--hidden-size 32 --seq-length 16 --vocab-size 100 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 12"
)


def make_trainer(
    device: torch.device, run_dir: Path, more: str = "", checkpoint: Path | None = None
) -> Trainer:
    origin = CheckpointSource(checkpoint, own=True) if checkpoint is not None else None
    flags = f"{FLAGS} {SMALL if sizes.small else ''} {more}"
    config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), 1)
    launch = Launch(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)
    runtime = Runtime(launch=launch, device=device, backend="gloo")
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    metrics = open_metrics(GPT_TASK, config, runtime, run_dir, origin)
    return build_trainer(
        GPT_TASK, GRADIENT_PATHS, config, runtime, groups, run_dir, metrics, origin
    )


def train_reader(trainer: Trainer) -> Reader:
    assert trainer.readers.train is not None
    return trainer.readers.train


def losses(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.train_step()[0].loss for _ in range(steps)]


def states(trainer: Trainer) -> dict[tuple[str, str], torch.Tensor]:
    return {(kind, name): t.cpu().clone() for kind, name, t in trainer.optimizer.tensors()}


@contextmanager
def no_host_sync(device: torch.device) -> Iterator[None]:
    """Any wait of the host for the device is an error inside."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")


def test_fp32_steps_equal_those_on_the_cpu(device: torch.device, tmp_path: Path) -> None:
    here = make_trainer(device, tmp_path / "device")
    there = make_trainer(torch.device("cpu"), tmp_path / "cpu")
    for mine, wanted in zip(losses(here, 4), losses(there, 4), strict=True):
        assert abs(mine - wanted) < 1e-3
    expected = states(there)
    for key, tensor in states(here).items():
        if key[0] == "exp_avg":
            torch.testing.assert_close(tensor, expected[key], atol=1e-3, rtol=1e-2)


def test_bf16_learns_and_keeps_fp32_masters(device: torch.device, tmp_path: Path) -> None:
    trainer = make_trainer(device, tmp_path, "--bf16")
    found = losses(trainer, 8)
    assert found[-1] < found[0] - 0.3
    for info, bucket, where in trainer.engine.slices():
        master = where.of(trainer.optimizer.states[bucket.index].master)
        assert master.dtype == torch.float32 and info.param.dtype == torch.bfloat16
        assert torch.equal(master.bfloat16().view(info.param.shape), info.param.detach())


def test_recomputation_repeats_the_dropout(device: torch.device, tmp_path: Path) -> None:
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1"
    plain = make_trainer(device, tmp_path / "plain", dropout)
    again = make_trainer(device, tmp_path / "again", f"{dropout} --recompute-granularity full")
    assert abs(losses(plain, 1)[0] - losses(again, 1)[0]) < 1e-5


def test_nothing_waits_for_the_device_before_finish(device: torch.device, tmp_path: Path) -> None:
    trainer = make_trainer(device, tmp_path, "--bf16")
    losses(trainer, 2)
    batches = list(train_reader(trainer).read(0, fitting(8, 2)))
    trainer.engine.begin(StepContext(t=3))
    with no_host_sync(device):
        for batch in batches:
            trainer.stage.forward(3, batch)
            if batch is batches[-1]:
                trainer.engine.expect_last_backward()
            trainer.stage.backward(batch.index, 1e-3)
    step = trainer.engine.finish(tag=3, clip_norm=1.0)
    assert step.ok
    with no_host_sync(device):
        trainer.optimizer.step(step, lr=1e-3, weight_decay=0.1)
        trainer.engine.commit(step)


def test_non_finite_gradient_changes_nothing(device: torch.device, tmp_path: Path) -> None:
    trainer = make_trainer(device, tmp_path, "--bf16")
    losses(trainer, 2)
    before = states(trainer)
    (batch, *_) = train_reader(trainer).read(0, fitting(8, 2))
    trainer.engine.begin(StepContext(t=3))
    trainer.stage.forward(3, batch)
    trainer.engine.expect_last_backward()
    trainer.stage.backward(batch.index, float("nan"))
    assert not trainer.engine.finish(tag=3).ok
    trainer.engine.abort()
    assert all(torch.equal(before[key], tensor) for key, tensor in states(trainer).items())


def test_checkpoint_brings_every_state_back(device: torch.device, tmp_path: Path) -> None:
    trainer = make_trainer(device, tmp_path, "--bf16")
    losses(trainer, 3)
    trainer.saver.save(trainer.progress, wait=True)
    path = find_checkpoint(tmp_path / "checkpoints", log=print)
    assert path is not None
    resumed = make_trainer(device, tmp_path, "--bf16", checkpoint=path)
    assert resumed.progress.iteration == 3
    expected = states(trainer)
    assert all(torch.equal(expected[key], tensor) for key, tensor in states(resumed).items())
    assert abs(losses(trainer, 1)[0] - losses(resumed, 1)[0]) < 1e-3


def test_cross_entropy_equals_torch(device: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for dtype, rounding in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        logits = torch.randn(fitting(300, 20), 5000, device=device).mul(4).to(dtype)
        targets = torch.randint(0, 4990, (len(logits),), device=device)
        exact = logits.double().requires_grad_()
        wanted = F.cross_entropy(exact[:, :4990], targets, reduction="none")
        (wanted * 3).sum().backward()
        leaf = logits.clone().requires_grad_()
        found = token_losses(leaf * 1, targets, vocab_size=4990)
        (found * 3).sum().backward()
        assert leaf.grad is not None and exact.grad is not None
        torch.testing.assert_close(found.double(), wanted.detach(), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(leaf.grad.double(), exact.grad, atol=1e-5, rtol=rounding)
