"""Cross-entropy against torch's, whole and cut over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.tensor_parallel import cross_entropy
from megatron.tensor_parallel.cross_entropy import token_losses

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(37, 60, generator=generator).mul(4).to(dtype)
    return logits, torch.randint(0, 50, (37,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 200, 1 << 19])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradient_equal_torch(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cross_entropy._CHUNK_ELEMENTS, "cpu", chunk)
    logits, targets = example(dtype)
    mask = torch.rand(37, generator=torch.Generator().manual_seed(1)).round()

    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact[:, :50], targets, reduction="none")
    (expected * mask * 3.0).sum().backward()

    leaf = logits.clone().requires_grad_()
    got = token_losses(leaf * 1, targets, vocab_size=50)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    (got * mask * 3.0).sum().backward()
    assert leaf.grad is not None and exact.grad is not None
    assert leaf.grad.dtype == dtype
    assert not leaf.grad[:, 50:].any() and not leaf.grad[mask == 0].any()
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(leaf.grad.double(), exact.grad, atol=2e-6, rtol=2 * rounding)


def test_small_probabilities_survive_fp16_under_a_loss_scale() -> None:
    logits = torch.zeros(1, 4, dtype=torch.float16)
    logits[0, 0] = 20.0
    leaf = logits.clone().requires_grad_()
    losses = token_losses(leaf * 1, torch.tensor([0]), vocab_size=4)
    (losses * 2.0**16).sum().backward()
    assert leaf.grad is not None
    expected = torch.softmax(logits.double(), 1)[0, 1] * 2.0**16
    assert leaf.grad[0, 1].item() == pytest.approx(expected.item(), rel=1e-3)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    losses = token_losses(logits, torch.tensor([0, 2]), vocab_size=3)
    torch.testing.assert_close(losses, torch.tensor([0.0, 1.0986123]))


def test_backward_writes_over_the_logits_once() -> None:
    logits, targets = example(torch.float32)
    leaf = logits.clone().requires_grad_()
    owned = leaf * 1
    loss = token_losses(owned, targets, vocab_size=50).sum()
    loss.backward(retain_graph=True)
    assert leaf.grad is not None
    assert torch.equal(owned.detach(), leaf.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("target", [50, 59, -1])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    logits, targets = example(torch.float32)
    targets[3] = target
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        token_losses(logits, targets, vocab_size=50)
