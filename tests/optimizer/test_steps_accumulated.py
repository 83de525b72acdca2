"""Tests of update rules that take sums of several steps' gradients."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.optimizer.update_rules import SGD, AdamW, Hyper, accumulation_factors

HYPER = Hyper(t=40, lr=1e-2, weight_decay=0.1)


def _state(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    weight, grad, mean, square = torch.randn(4, 256, generator=generator)
    return weight, grad, [mean, square.square()]


@pytest.mark.parametrize("beta2", [0.999, 0.95, 0.0])
def test_a_sum_of_c_gradients_ages_the_second_moment_by_c_steps(beta2: float) -> None:
    rule = AdamW(beta1=0.9, beta2=beta2, eps=1e-8)
    weight, grad, moments = _state(torch.Generator().manual_seed(0))
    steps = torch.randint(1, 60, (256,), generator=torch.Generator().manual_seed(1)).float()
    mean = 0.9 * moments[0].double() + 0.1 * grad.double()
    share = 1 - beta2 ** steps.double()
    square = (1 - share) * moments[1].double() + share * grad.double().square() / steps
    update = mean / (1 - 0.9**40) / ((square / (1 - beta2**40)).sqrt() + 1e-8)
    expected = weight.double() * (1 - 1e-3) - 1e-2 * update
    rule.apply(weight, grad.clone(), moments, HYPER, steps)
    torch.testing.assert_close(moments[0], mean.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments[1], square.float(), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(weight, expected.float(), rtol=1e-5, atol=1e-6)


def test_gradients_of_one_step_are_taken_as_without_a_count_bit_by_bit() -> None:
    rule = AdamW(beta1=0.9, beta2=0.999, eps=1e-8)
    plain, counted = (_state(torch.Generator().manual_seed(2)) for _ in range(2))
    rule.apply(plain[0], plain[1], plain[2], HYPER)
    rule.apply(counted[0], counted[1], counted[2], HYPER, torch.ones(256))
    assert torch.equal(plain[0], counted[0])
    assert all(map(torch.equal, plain[2], counted[2]))


@pytest.mark.parametrize("beta2", [0.999, 0.95, 0.0])
def test_factors_of_a_count_do_not_depend_on_the_others(beta2: float) -> None:
    counts = torch.tensor([1.0, 7.0, 2.0, 500.0, 1.0])
    aged, root = accumulation_factors(counts, beta2)
    for place, c in enumerate(counts.tolist()):
        assert float(aged[place]) == pytest.approx(beta2 ** (c - 1), rel=1e-7)
        wanted = math.sqrt((1 - beta2**c) / (c * (1 - beta2)))
        assert float(root[place]) == pytest.approx(wanted, rel=1e-7)
        alone = accumulation_factors(counts[place : place + 1], beta2)
        assert (aged[place], root[place]) == alone
    assert aged[0] == aged[4] == root[0] == root[4] == 1.0


def test_noise_that_waited_leaves_the_second_moment_where_noise_that_did_not_would() -> None:
    """Bias correction by 200 steps is exact for T = 10 flushes of 20 steps each, from zero."""
    rule = AdamW(beta1=0.9, beta2=0.999, eps=1e-8)
    generator = torch.Generator().manual_seed(3)
    weight, moments = torch.zeros(4096), [torch.zeros(4096), torch.zeros(4096)]
    for flush in range(1, 11):
        waited = math.sqrt(20) * torch.randn(4096, generator=generator)
        hyper = Hyper(t=20 * flush, lr=0.0, weight_decay=0.0)
        rule.apply(weight, waited, moments, hyper, torch.full((4096,), 20.0))
    assert float(moments[1].mean()) / (1 - 0.999**200) == pytest.approx(1.0, rel=0.03)


def test_momentum_takes_a_sum_as_it_is() -> None:
    plain, counted = (torch.ones(64), torch.ones(64)), (torch.ones(64), torch.ones(64))
    grad = torch.full((64,), 3.0)
    SGD(momentum=0.9).apply(plain[0], grad, [plain[1]], HYPER)
    SGD(momentum=0.9).apply(counted[0], grad, [counted[1]], HYPER, torch.full((64,), 7.0))
    assert torch.equal(plain[0], counted[0]) and torch.equal(plain[1], counted[1])
