"""Tests that no gradient path loses or repeats weight decay, which needs no gradient."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from megatron.optimizer.update_rules import SGD, AdamW, UpdateRule
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import SHAPES, PathCase, Toy
from tests.contract.pairs import cases
from tests.ranks import Ranks

pytestmark = pytest.mark.push

STEPS = 17
SKIPPED = (6, 11)
"""Steps with a non-finite gradient, which apply no decay."""
RULES = [AdamW(beta1=0.9, beta2=0.99, eps=1e-8), SGD(momentum=0.9)]
DENSE = PathCase("dense")
ALONE = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)


def on_rank_decay(
    groups: ProcessGroups, case: PathCase, rule: UpdateRule
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the flattened weights by parameter, and which of their entries were always stored."""
    toy = Toy(groups, case, weight_decay=1.0, rule=rule)
    always = {
        name: torch.ones(math.prod(shape), dtype=torch.bool) for name, shape in SHAPES.items()
    }
    for number in range(STEPS):
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        if number in SKIPPED:
            zeros["norm.weight"][0] = math.nan
        toy.lr = 0.005 * (1 + number % 5)
        assert toy.step([zeros]).ok == (number not in SKIPPED)
        for name, stored in always.items():
            stored &= toy.exists(name)
    return {info.name: info.param.detach().view(-1) for info in toy.infos}, always


@cache
def dense_weights(rule: UpdateRule) -> dict[str, torch.Tensor]:
    """Return the weights of the dense path on one rank: zeros have the same mean on any ranks."""
    return on_rank_decay(ALONE, DENSE, rule)[0]


def keeps_decay(case: PathCase, world: int) -> bool:
    """Return whether a step or a round applies exactly the decay of its replicas.

    Local steps send decay as a part of the change of weights: another outer step moves weights by
    more or less, and a wire that rounds, or largest entries alone, leave a part for later rounds.
    """
    if not case.local:
        return True
    is_whole = case.wire in (None, "fp32") and "outer_compression" not in case.options
    return is_whole and case.options.get("outer_lr") == 1


@cases(keeps_decay)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_without_gradients_every_stored_weight_decays_as_the_dense_path_s(
    ranks: Ranks, case: PathCase, rule: UpdateRule, world: int
) -> None:
    """The learning rate changes at every step, so the decay of each step must be applied."""
    for weights, always in ranks.run(world, on_rank_decay, case, rule):
        for name, dense in dense_weights(rule).items():
            stored = always[name]
            assert stored.sum() >= stored.numel() // 8
            torch.testing.assert_close(weights[name][stored], dense[stored], rtol=1e-5, atol=1e-7)
