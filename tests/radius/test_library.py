"""Radius in other people's loops: the examples run, and the DDP hook trains as our trainer does."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.gradient_path import PathParts
from megatron.data_parallel.layout import DenseLayout
from megatron.data_parallel.reducer import StepContext
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.update_rules import AdamW
from megatron.parallel.groups import ProcessGroups
from radius.ddp_hook import RadiusHook, radius_hook
from radius.reducer import RadiusReducer, RadiusSettings
from tests.model.models import random_tokens, small_model
from tests.radius.loops import INTERVAL, START, Loop
from tests.ranks import Ranks

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((REPO / "docs" / "examples").glob("radius_*.py"))
by_name = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


# ---- the examples -------------------------------------------------------------------------------


def on_rank_example(groups: ProcessGroups, path: str) -> list[float]:
    return runpy.run_path(path)["main"]()


@pytest.mark.push
@by_name
def test_example_learns(ranks: Ranks, example: Path) -> None:
    for losses in ranks.run(2, on_rank_example, str(example)):
        assert sum(losses[-5:]) < 0.2 * sum(losses[:5])


# Two interpreters that torch's threads may abort on their way out: not for each change.
@pytest.mark.full
@by_name
def test_example_runs_under_torchrun(example: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(example)],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d(?=: loss)", done.stdout)) == ["rank 0", "rank 1"]


# ---- the hook and our own trainer are one method ------------------------------------------------

STEPS = 3 * INTERVAL + 1
DECAY, LR, DENSITY = 0.1, 1e-3, 0.4
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


def _gpt() -> Any:
    return small_model(
        num_layers=2,
        hidden_size=32,
        untie_embeddings_and_output_weights=True,
        make_vocab_size_divisible_by=1,
    )


def _gpt_loss(model: Any, groups: ProcessGroups, step: int) -> torch.Tensor:
    tokens = random_tokens(2, 17, seed=10 * step + groups.dp.rank)
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def on_rank_hook_gpt(groups: ProcessGroups) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _gpt()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(BETA1, BETA2),
        eps=EPSILON,
        fused=True,
    )
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state = RadiusHook(optimizer, density=DENSITY, interval=INTERVAL, start=START)
    wrapped.register_comm_hook(state, radius_hook)
    losses = []
    for step in range(STEPS):
        loss = _gpt_loss(wrapped, groups, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert set(state.kept) == {p for p in params if p.dim() > 1}
    return losses, {name: value.clone() for name, value in model.logical_values().items()}


def on_rank_engine_gpt(groups: ProcessGroups) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _gpt()
    infos = model.parameter_infos()
    matrices = {i.name: i.param.numel() for i in infos if i.param.dim() > 1}
    settings = RadiusSettings(density=Fraction(str(DENSITY)), interval=INTERVAL, start=START)
    parts = PathParts(
        layout=DenseLayout(), reducer=RadiusReducer(Exchange(groups.dp), matrices, settings)
    )
    engine = GradientEngine(infos, parts, groups, cap=4096, grad_dtype=torch.float32)
    optimizer = BucketOptimizer(engine, AdamW(beta1=BETA1, beta2=BETA2, eps=EPSILON))
    losses = []
    for number in range(STEPS):
        engine.begin(StepContext(t=number + 1))
        engine.expect_last_backward()
        loss = _gpt_loss(model, groups, number)
        loss.backward()
        step = engine.finish(tag=number)
        optimizer.step(step, lr=LR, weight_decay=DECAY)
        engine.commit(step)
        losses.append(loss.item())
    engine.detach()
    return losses, {name: value.clone() for name, value in model.logical_values().items()}


def test_hook_trains_a_gpt_as_our_trainer_does(ranks: Ranks) -> None:
    """Dense steps, the switch and two intervals after it."""
    theirs, ours = ranks.run(2, on_rank_hook_gpt), ranks.run(2, on_rank_engine_gpt)
    for (losses, weights), (our_losses, our_weights) in zip(theirs, ours, strict=True):
        torch.testing.assert_close(losses, our_losses, rtol=1e-5, atol=0.0)
        assert weights.keys() == our_weights.keys()
        for name, weight in weights.items():
            error = (weight - our_weights[name]).norm() / our_weights[name].norm()
            assert error < 1e-5, name
    assert all(torch.equal(theirs[0][1][name], theirs[1][1][name]) for name in theirs[0][1])


def on_rank_dense(groups: ProcessGroups, density: float | None) -> dict[str, torch.Tensor]:
    loop = Loop(groups, density=density)
    for number in range(STEPS):
        loop.step(number)
    return {n: t for n, t in loop.tensors().items() if not n.startswith("hook.")}


def test_density_1_is_ddp_without_the_hook(ranks: Ranks) -> None:
    hooked, plain, sparse = (ranks.run(2, on_rank_dense, d)[1] for d in (1.0, None, 0.4))
    assert all(torch.equal(hooked[name], plain[name]) for name in plain)
    assert not torch.equal(sparse["parameter.2"], plain["parameter.2"])
