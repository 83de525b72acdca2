"""Tests of losses divided by the whole batch before backward, so that gradients are only summed."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.reduce_scatter import ReduceScatterReducer
from megatron.data_parallel.reducer import StepContext
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import RANDOM, PathCase, Toy, gradients, same
from tests.ranks import Ranks

DENSE = PathCase("dense")
SAMO = PathCase("samo", RANDOM)
FP32: dict[str, Any] = {"dtype": torch.float32, "grad_dtype": torch.float32}
FP16: dict[str, Any] = {"dtype": torch.float16, "grad_dtype": torch.float16}


def on_rank_both(
    groups: ProcessGroups, case: PathCase, kinds: dict[str, Any], clip: float, scatter: bool
) -> dict[str, Any]:
    """Return how a run with plain gradients and a run with predivided gradients differ."""
    pair = [
        Toy(groups, one, lr=1e-3, scatter=scatter or None, **kinds)
        for one in (case, replace(case, predivided=True))
    ]
    if case.sharded:
        pair[1].engine.reducer.divides = False  # type: ignore[attr-defined]
    norms, sent = [], []
    for number in range(6):
        mine = gradients(number, groups.dp.rank)
        for toy in pair:
            part = groups.dp.size if toy is pair[1] else 1
            step = toy.step([{n: g / part for n, g in mine.items()}], clip_norm=clip)
            norms.append(step.norm)
            sent.append(toy.engine.stats().bytes_sent)
    states = [toy.state() for toy in pair]
    far = [
        name
        for name, one in states[0].items()
        if not torch.allclose(one.float(), states[1][name].float(), rtol=1e-4, atol=1e-5)
    ]
    return {"differ": same(*states), "far": far, "norms": norms, "sent": sent}


@pytest.mark.parametrize(
    ("world", "case", "scatter"),
    [
        (2, DENSE, False),
        (3, DENSE, False),
        (4, SAMO, False),
        (2, replace(SAMO, sharded=True), True),
    ],
)
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_it_is_the_mean_to_rounding_and_to_the_bit_for_powers_of_two(
    ranks: Ranks, world: int, case: PathCase, scatter: bool, clip: float
) -> None:
    for found in ranks.run(world, on_rank_both, case, FP32, clip, scatter):
        assert found["far"] == []
        assert found["sent"][::2] == found["sent"][1::2]
        assert found["norms"][::2] == pytest.approx(found["norms"][1::2], rel=1e-5)
        if world != 3:
            assert found["differ"] == []


def on_rank_fp16(groups: ProcessGroups) -> list[Any]:
    """Return whether bytes are equal, and per sum: gradient unchanged, operation is SUM."""
    toys = [Toy(groups, one, **FP16) for one in (DENSE, replace(DENSE, predivided=True))]
    sent = []
    for toy in toys:
        toy.step([gradients(0)])
        sent.append(toy.engine.stats().bytes_sent)
    kept = []
    for kind in (AllReduceReducer, ReduceScatterReducer):
        for divides in (True, False):
            grad = torch.tensor([1.0, 3.0, 60000.0], dtype=torch.float16)
            seen: list[tuple[torch.Tensor, object]] = []

            def all_reduce(values: torch.Tensor, op: object, **_: object) -> None:
                seen.append((values.clone(), op))  # noqa: B023

            group: Any = SimpleNamespace(size=groups.dp.size, rank=0, all_reduce=all_reduce)
            facts = dict(index=0, numel=3, matrix=True, shard=None, storage=None)
            bucket: Any = SimpleNamespace(grad=grad, **facts)
            before = grad.clone()
            kind(Exchange(group), divides).reduce(bucket, StepContext(t=1))
            ((sent_values, operation),) = seen
            kept.append((torch.equal(sent_values, before), operation == dist.ReduceOp.SUM))
    return [sent[0] == sent[1], *kept]


def test_fp16_sums_send_the_same_bytes_without_a_pass_to_divide(ranks: Ranks) -> None:
    each = [(False, True), (True, True)]
    assert ranks.run(2, on_rank_fp16) == [[True, *each, *each]] * 2


def on_rank_overflow(groups: ProcessGroups, case: PathCase) -> list[Any]:
    """Run steps; the third has a bucket of finite terms whose sum overflows fp16."""
    toy, other = Toy(groups, case, **FP16), Toy(groups, case, **FP16)
    found: list[Any] = []
    for number in range(4):
        if number == 2:
            before = toy.state()
            huge = gradients(9)
            huge["second.weight"].fill_(0.0).view(-1)[toy.entry("second.weight")] = 30000.0
            step = toy.step([huge], clip_norm=1.0)
            found += [step.ok, math.isfinite(step.norm), same(before, toy.state())]
        for one in (toy, other):
            one.step([gradients(number, groups.dp.rank)], clip_norm=1.0)
    return [*found, same(toy.state(), other.state()), toy.optimizer.applied]


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("case", [DENSE, SAMO], ids=lambda case: case.name)
def test_a_sum_that_overflows_skips_the_step_on_every_rank(
    ranks: Ranks, case: PathCase, offloaded: bool
) -> None:
    case = replace(case, predivided=True, offloaded=offloaded)
    assert ranks.run(4, on_rank_overflow, case) == [[False, False, [], [], 4]] * 4
