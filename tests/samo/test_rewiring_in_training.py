"""Tests of DSR with a real engine and optimizer: kept state, reset state, several ranks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.gradient_path import PathParts
from megatron.data_parallel.reducer import StepContext
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.update_rules import AdamW
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from samo.dsr import DsrMaskUpdater, RewiringSettings
from samo.layout import CompressedLayout
from samo.schedule import CONSTANT, RewiringSchedule
from tests.ranks import Ranks

ALONE = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
SHAPES = {"embedding": (24, 16), "first": (32, 16), "bias": (32,), "second": (16, 32)}
PRUNED = [name for name, shape in SHAPES.items() if len(shape) > 1]
SCHEDULE = RewiringSchedule(interval=2, until=12, periods=CONSTANT)


class SavedView(NamedTuple):
    """The content of a checkpoint."""

    applied: int
    masks: dict[str, torch.Tensor]
    states: dict[tuple[str, str], torch.Tensor]
    shared: dict[str, Any]


class RewiredNet:
    """A network that is rewired as it trains towards random gradients."""

    def __init__(
        self,
        groups: ProcessGroups = ALONE,
        *,
        dtype: torch.dtype = torch.bfloat16,
        reset: bool = False,
        saved: SavedView | None = None,
    ) -> None:
        random = torch.Generator().manual_seed(5)
        self.params = {
            name: torch.nn.Parameter((0.1 * torch.randn(shape, generator=random)).to(dtype))
            for name, shape in SHAPES.items()
        }
        draws = {n: torch.rand(math.prod(SHAPES[n]), generator=random) < 0.4 for n in PRUNED}
        infos = [
            ParamInfo(name=n, leaves=(p,), logical_shape=SHAPES[n]) for n, p in self.params.items()
        ]
        settings = RewiringSettings(
            schedule=SCHEDULE, target=80, threshold=0.02, reset_moments=reset, seed=3
        )
        parts = PathParts(
            layout=CompressedLayout(saved.masks if saved else draws),
            reducer=AllReduceReducer(Exchange(groups.dp)),
            mask_updater=DsrMaskUpdater(PRUNED, settings, CompressedLayout),
        )
        self.rank = groups.dp.rank
        self.engine = GradientEngine(infos, parts, groups, cap=800, grad_dtype=torch.float32)
        self.optimizer = BucketOptimizer(self.engine, AdamW(beta1=0.9, beta2=0.99, eps=1e-8))
        if saved:
            self.optimizer.applied = saved.applied
            for kind, name, tensor in self.optimizer.tensors():
                tensor.copy_(saved.states[kind, name])
            self.optimizer.finish_load()
            self.engine.load_state_tensors({}, saved.shared)

    def step(self) -> None:
        """Run a step without its rewiring."""
        t = self.optimizer.applied + 1
        self.engine.begin(StepContext(t=t))
        self.engine.expect_last_backward()
        random = torch.Generator().manual_seed(100 * t + self.rank)
        torch.stack(
            [(p * torch.randn(p.shape, generator=random)).sum() for p in self.params.values()]
        ).sum().backward()
        found = self.engine.finish(tag=t)
        self.optimizer.step(found, lr=3e-3, weight_decay=0.0)
        self.engine.commit(found)

    def whole(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return master weights and moments as flat dense tensors."""
        found = {}
        for kind, name, tensor in self.optimizer.tensors():
            found[kind, name] = torch.zeros(math.prod(SHAPES[name]))
            self.engine.layout.scatter(name, tensor, found[kind, name])
        return found

    def masks(self) -> dict[str, torch.Tensor]:
        found = {name: self.engine.layout.mask(name) for name in SHAPES}
        return {name: mask for name, mask in found.items() if mask is not None}

    def save(self) -> SavedView:
        states = {(kind, name): t.clone() for kind, name, t in self.optimizer.tensors()}
        return SavedView(
            self.optimizer.applied, self.masks(), states, dict(self.engine.shared_tensors())
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reset", [True, False])
def test_kept_weights_go_on_and_new_ones_begin_at_zero(reset: bool, dtype: torch.dtype) -> None:
    net = RewiredNet(reset=reset, dtype=dtype)
    stored = sum(int(mask.sum()) for mask in net.masks().values())
    for t in range(1, 15):
        net.step()
        before, old = net.whole(), net.masks()
        net.optimizer.update_masks()
        after, new = net.whole(), net.masks()
        assert new.keys() == set(PRUNED) and sum(int(m.sum()) for m in new.values()) == stored
        pruned = net.engine.stats().extra.get("dsr_pruned")
        assert (pruned is not None) is (t in range(2, 13, 2))
        if not pruned:
            assert all(torch.equal(before[key], after[key]) for key in before)
            continue
        assert any(not torch.equal(old[name], new[name]) for name in PRUNED)
        for (kind, name), values in after.items():
            if kind != "param" and reset:
                assert not values.any()
                continue
            kept = torch.ones(values.numel(), dtype=torch.bool)
            if name in PRUNED:
                kept = old[name] & new[name] & (after["param", name] != 0)
            assert torch.equal(values[kept], before[kind, name][kept])
            assert not values[~kept].any()
        for name, param in net.params.items():
            assert torch.equal(param.detach().view(-1), after["param", name].to(dtype))
    assert net.engine.mask_updater is not None and net.engine.mask_updater.layout_is_final


def test_resumed_at_any_update_is_the_run_that_was_not_interrupted() -> None:
    saved: dict[int, SavedView] = {}
    whole = RewiredNet()
    for _ in range(14):
        whole.step()
        whole.optimizer.update_masks()
        saved[whole.optimizer.applied] = whole.save()
    for t in (1, 2, 5, 6, 12):
        net = RewiredNet(saved=saved[t])
        while net.optimizer.applied < 14:
            net.step()
            net.optimizer.update_masks()
        end = net.save()
        assert all(torch.equal(end.masks[n], saved[14].masks[n]) for n in PRUNED)
        assert all(torch.equal(end.states[key], saved[14].states[key]) for key in end.states)
        assert all(torch.equal(end.shared[key], saved[14].shared[key]) for key in end.shared)


def test_ranks_with_other_data_are_rewired_alike(ranks: Ranks) -> None:
    first, second = ranks.run(2, _train)
    assert first == second and len(set(first)) == 1 + len(range(2, 13, 2))


def _train(groups: ProcessGroups) -> list[str]:
    net = RewiredNet(groups)
    found = []
    for _ in range(14):
        net.step()
        net.optimizer.update_masks()
        found.append(net.engine.fingerprint)
    return found
