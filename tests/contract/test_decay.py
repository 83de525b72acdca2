"""Tests that no gradient path loses or repeats weight decay, which needs no gradient."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.optimizer.update_rules import SGD, AdamW, UpdateRule
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import SHAPES, PathCase, Toy
from tests.contract.pairs import cases
from tests.ranks import Ranks

STEPS = 17
SKIPPED = (6, 11)
"""Steps with a non-finite gradient, which apply no decay."""
RULES = [AdamW(beta1=0.9, beta2=0.99, eps=1e-8), SGD(momentum=0.9)]


def on_rank_decay(
    groups: ProcessGroups, case: PathCase, rule: UpdateRule
) -> dict[str, list[torch.Tensor]]:
    """Return by parameter the always-stored weights, of the path and of the dense path."""
    toys = [Toy(groups, each, weight_decay=1.0, rule=rule) for each in (case, PathCase("dense"))]
    always = {
        name: torch.ones(math.prod(shape), dtype=torch.bool) for name, shape in SHAPES.items()
    }
    for number in range(STEPS):
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        if number in SKIPPED:
            zeros["norm.weight"][0] = math.nan
        for toy in toys:
            toy.lr = 0.005 * (1 + number % 5)
            assert toy.step([zeros]).ok == (number not in SKIPPED)
        for name, stored in always.items():
            stored &= toys[0].exists(name)
    by_toy = [{info.name: info.param.detach().view(-1) for info in toy.infos} for toy in toys]
    return {name: [weights[name][always[name]] for weights in by_toy] for name in SHAPES}


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
    for found in ranks.run(world, on_rank_decay, case, rule):
        for name, (weights, dense) in found.items():
            assert weights.numel() >= math.prod(SHAPES[name]) // 8
            torch.testing.assert_close(weights, dense, rtol=1e-5, atol=1e-7)
