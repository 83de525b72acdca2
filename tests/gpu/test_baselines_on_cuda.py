"""The baselines on a device, compared with the CPU."""

from __future__ import annotations

import torch

from megatron.data_parallel.exchange import Exchange
from megatron.parallel.groups import Group
from megatron.sparse.selection import largest
from radius.baselines.demo import DeMoConfig, DeMoReducer
from radius.baselines.feedback import FeedbackReducer
from radius.baselines.powersgd import PowerSGDReducer
from radius.baselines.topk import TopKReducer
from tests.contract.harness import copies
from tests.radius.functional_ranks import bucket_of, infos_of, mean_of, random

SHAPES = {"wide": (60, 300), "small": (3, 4), "tall": (400, 90)}
ALONE = Group((0,), 0)
STEPS = 5


def test_ties_are_broken_alike(device: torch.device) -> None:
    values = torch.randn(100_003).mul_(8).round_()
    for k in (1, 1000, 60_000, values.numel()):
        assert torch.equal(largest(values.to(device), k).cpu(), largest(values, k))


def test_topk_is_the_same_to_the_bit(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        infos = infos_of(SHAPES)
        there = _states(TopKReducer(infos, Exchange(ALONE), density=0.1), device, dtype)
        here = _states(TopKReducer(infos, Exchange(ALONE), density=0.1), torch.device("cpu"), dtype)
        assert all(torch.equal(there[name], here[name]) for name in here)


def test_powersgd_is_the_same_but_for_rounding(device: torch.device) -> None:
    infos = infos_of(SHAPES)
    there = _states(PowerSGDReducer(infos, Exchange(ALONE), rank=4, seed=1), device, torch.float32)
    here = _states(
        PowerSGDReducer(infos, Exchange(ALONE), rank=4, seed=1), torch.device("cpu"), torch.float32
    )
    again = _states(PowerSGDReducer(infos, Exchange(ALONE), rank=4, seed=1), device, torch.float32)
    for name in here:
        torch.testing.assert_close(there[name], here[name], rtol=1e-2, atol=1e-2)
        assert torch.equal(there[name], again[name])


def test_demo_is_the_same_but_for_rounding(device: torch.device) -> None:
    infos, options = infos_of(SHAPES), DeMoConfig(demo_chunk=16, demo_k=8, demo_sign=False)
    there, again, here = (
        _states(DeMoReducer(infos, Exchange(ALONE), options), each, torch.float32)
        for each in (device, device, torch.device("cpu"))
    )
    for name in here:
        torch.testing.assert_close(there[name], here[name], rtol=0, atol=1e-4)
        assert torch.equal(there[name], again[name])


def _states(
    reducer: FeedbackReducer, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Last mean and residual by name, on the CPU, after some steps."""
    bucket = bucket_of(list(reducer.infos.values()), dtype=dtype, device=device)
    reducer.attach([bucket])
    for t in range(1, STEPS + 1):
        gradients = {n: g.to(device) for n, g in random(SHAPES, t, dtype=dtype).items()}
        mean = mean_of(reducer, bucket, gradients, t=t)
    found = {f"mean/{name}": tensor.cpu() for name, tensor in mean.items()}
    return found | {n: tensor.cpu() for n, tensor in copies(reducer.state_tensors()).items()}
