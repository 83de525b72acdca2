"""Tests that attention by matrix products equals the fused kernel."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.model import blocked_attention as module
from megatron.model.blocked_attention import blocked_attention


def example(heads: int, groups: int, *, spread: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 21, heads, 8), (2, 21, groups, 8), (2, 21, groups, 8)]
    return [torch.randn(shape, generator=generator) * spread for shape in shapes]


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return context.transpose(1, 2)


@pytest.fixture(params=[True, False], ids=["native", "widened"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Patch whether the CPU multiplies 16-bit operands natively; return the setting."""
    monkeypatch.setattr(module, "multiplies_natively", lambda dtype: request.param)
    return request.param


@pytest.mark.parametrize("scores", [1, 200, 1 << 19])
@pytest.mark.parametrize("rows", [4, 21, 128])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
def test_values_and_gradients(
    heads: int, groups: int, rows: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_QUERIES", rows)
    monkeypatch.setattr(module, "_SCORES_IN_CACHE", scores)
    weight = torch.randn(2, 21, heads, 8, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (reference, blocked_attention):
        leaves = [part.requires_grad_() for part in example(heads, groups)]
        context = function(*leaves)
        (context * weight).sum().backward()
        results.append([context, *(leaf.grad for leaf in leaves)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_strided_heads_of_one_projection() -> None:
    mixed = torch.randn(2, 21, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    query, key, value = mixed.unbind(3)
    torch.testing.assert_close(
        blocked_attention(query, key, value), reference(query, key, value), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_16_bit_error_is_that_of_rounding(spread: float, dtype: torch.dtype, native: bool) -> None:
    rounded = [part.to(dtype).requires_grad_() for part in example(4, 4, spread=spread)]
    exact = [part.detach().double().requires_grad_() for part in rounded]
    expected, got = reference(*exact), blocked_attention(*rounded)
    expected.sum().backward()
    got.sum().backward()
    # Scores near 9 * sqrt(8) round by 2^-9 of themselves.
    bound = 0.01 * max(1.0, spread**2 / math.sqrt(8))
    pairs = [(got, expected), *((r.grad, e.grad) for r, e in zip(rounded, exact, strict=True))]
    for one, other in pairs:
        assert one is not None and other is not None
        assert (one.double() - other).norm() < bound * other.norm()
