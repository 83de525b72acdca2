"""Label smoothing against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.model.label_smoothing import smoothed_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_sums_and_gradients_equal_torchs(smoothing: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = (3 * torch.randn(50, 17)).to(dtype).requires_grad_()
    targets = torch.randint(0, 17, (50,))
    targets[::7] = 5
    exact = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(
        exact, targets, reduction="sum", ignore_index=5, label_smoothing=smoothing
    )
    likelihood = F.cross_entropy(exact, targets, reduction="sum", ignore_index=5)
    sums = smoothed_sums(logits * 1.0, targets, smoothing=smoothing, ignored=5)
    torch.testing.assert_close(sums, torch.stack([wanted, likelihood]).float())
    (2.5 * sums[0]).backward()
    (2.5 * wanted).backward()
    assert exact.grad is not None
    # The gradient is computed in fp32 and rounded once to the dtype of the logits.
    close = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype), atol=1e-6, rtol=close)


def test_the_likelihood_has_no_gradient() -> None:
    logits = torch.randn(4, 6, requires_grad=True)
    smoothed_sums(logits * 1.0, torch.tensor([1, 2, 3, 4]), smoothing=0.1, ignored=0)[1].backward()
    assert logits.grad is not None and logits.grad.eq(0).all()


@pytest.mark.parametrize("content", [7.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_ignored_row_may_hold_anything(content: float, smoothing: float) -> None:
    """Its gradient is 0; the others are torch's with `ignore_index`, of rows that are finite."""
    torch.manual_seed(2)
    clean = torch.randn(4, 6, requires_grad=True)
    targets = torch.tensor([1, 0, 2, 0])
    likelihood, wanted = (
        F.cross_entropy(clean, targets, reduction="sum", ignore_index=0, label_smoothing=share)
        for share in (0.0, smoothing)
    )
    wanted.backward()
    assert clean.grad is not None and clean.grad[[1, 3]].eq(0).all()
    logits = clean.detach().clone()
    logits[1] = content
    logits.requires_grad_()
    sums = smoothed_sums(logits * 1.0, targets, smoothing=smoothing, ignored=0)
    torch.testing.assert_close(sums, torch.stack([wanted, likelihood]))
    sums[0].backward()
    assert logits.grad is not None and logits.grad[[1, 3]].eq(0).all()
    torch.testing.assert_close(logits.grad, clean.grad)


def test_16_bit_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(2000, 300).bfloat16()
    targets = torch.randint(1, 300, (2000,))
    wanted = F.cross_entropy(logits.double(), targets, reduction="sum", label_smoothing=0.1)
    found = smoothed_sums(logits, targets, smoothing=0.1, ignored=0)
    assert abs(found[0].item() / wanted.item() - 1) < 1e-5
