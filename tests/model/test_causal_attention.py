"""Tests that attention inside documents equals attention with a mask, which is never made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from megatron import documents as packing
from megatron.config import RecomputeConfig
from megatron.documents import Documents
from megatron.model import attention as attention_module
from megatron.model import blocked_attention as blocks
from megatron.model import causal_attention as module
from megatron.model.attention import SelfAttention
from megatron.model.causal_attention import causal_attention
from tests.model.models import (
    VARIANTS,
    gradients,
    random_tokens,
    sharpen,
    small_config,
    small_model,
)

CPU = torch.device("cpu")
LENGTH = 21
LENGTHS = {
    "one": [[21], [21]],
    "ends": [[1, 20], [20, 1]],
    "single tokens": [[1] * 21, [1] * 21],
    "some": [[5, 9, 7], [7, 7, 7]],
    "random": None,
}


def ids_of(lengths: list[list[int]]) -> NDArray[np.int64]:
    return np.stack([np.repeat(np.arange(len(each)), each) for each in lengths])


def drawn(seed: int, batch: int = 2, length: int = LENGTH) -> NDArray[np.int64]:
    return (np.random.default_rng(seed).random((batch, length)) < 0.3).cumsum(1)


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ids: NDArray[np.int64]
) -> torch.Tensor:
    """Return attention with a mask, bool [b, 1, s, s]: j <= i in the same document."""
    same = torch.from_numpy(ids[:, None, :, None] == ids[:, None, None, :])
    mask = same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()
    heads = (part.transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def played_varlen(query, key, value, offsets, same, longest, again, *, window_size, enable_gqa):
    """Play `varlen_attn`, which has no CPU kernel, one document at a time."""
    assert window_size == (-1, 0) and longest == again == offsets.diff().max() and same is offsets
    assert offsets.dtype == torch.int32 and enable_gqa == (query.shape[1] != key.shape[1])
    contexts = []
    for start, stop in zip(offsets[:-1], offsets[1:], strict=True):
        heads = (part[None, start:stop].transpose(1, 2) for part in (query, key, value))
        context = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=enable_gqa)
        contexts.append(context[0].transpose(0, 1))
    return torch.cat(contexts)


@pytest.fixture(params=["fused", "blocks", "small blocks", "varlen"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose the kernel, also where it would not serve fp32 on a CPU."""
    monkeypatch.setattr(module, "blocked_attention_serves", lambda query: "bl" in request.param)
    if request.param == "small blocks":
        monkeypatch.setattr(blocks, "_BLOCK_QUERIES", 4)
        monkeypatch.setattr(blocks, "_SCORES_IN_CACHE", 200)
    if request.param == "varlen":
        monkeypatch.setattr(packing, "has_document_kernel", lambda device: True)
        monkeypatch.setattr(module, "_varlen_serves", lambda *heads: True)
        monkeypatch.setattr(varlen, "varlen_attn", played_varlen)
    return request.param


def with_gradients(
    function: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]], where: Any
) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    context = function(*leaves, where)
    context.square().sum().backward()
    return [context, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_values_and_gradients(kernel: str, lengths: str, heads: int, groups: int) -> None:
    shapes = [(2, LENGTH, heads, 8), (2, LENGTH, groups, 8), (2, LENGTH, groups, 8)]
    chosen = LENGTHS[lengths]
    for ids in [ids_of(chosen)] if chosen else [drawn(seed) for seed in range(5)]:
        expected = with_gradients(masked, shapes, ids)
        got = with_gradients(causal_attention, shapes, Documents.of(ids, CPU))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_documents_are_runs_of_equal_ids() -> None:
    documents = Documents.of(np.array([[3, 3, 1, 3], [3, 3, 3, 4]]), CPU)
    assert documents.lengths == (2, 1, 1, 3, 1) and documents.longest == 3
    assert documents.offsets is None, "a CPU has no kernel for documents"


def test_the_real_varlen_attn_takes_these_arguments() -> None:
    """torch has its shapes, and the gradient's, for tensors without memory."""
    query, key, value = heads = [
        torch.empty(2, 8, count, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for count in (4, 2, 2)
    ]
    offsets = torch.empty(5, dtype=torch.int32, device="meta")
    documents = Documents((5, 3, 7, 1), 7, offsets)
    context = causal_attention(query, key, value, documents)
    assert context.grad_fn is not None
    assert "varlen" in str(context.grad_fn.next_functions[0][0]).lower()
    assert context.shape == (2, 8, 4, 16)
    context.sum().backward()
    for leaf in heads:
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape


@pytest.mark.parametrize(
    ("dtype", "size", "dropout", "serves"),
    [
        (torch.bfloat16, 64, 0.0, True),
        (torch.float16, 256, 0.0, True),
        (torch.float32, 64, 0.0, False),
        (torch.bfloat16, 64, 0.1, False),
        (torch.bfloat16, 60, 0.0, False),
        (torch.bfloat16, 264, 0.0, False),
    ],
)
def test_when_one_kernel_takes_all_documents(
    dtype: torch.dtype, size: int, dropout: float, serves: bool
) -> None:
    query = torch.empty(1, 4, 2, size, dtype=dtype, device="meta")
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    assert module._varlen_serves(query, Documents((4,), 4, offsets), dropout) == serves
    assert not module._varlen_serves(query, Documents((4,), 4, None), dropout)


def test_a_document_ignores_the_others_with_dropout() -> None:
    ids = ids_of([[5, 9, 7], [7, 7, 7]])
    documents = Documents.of(ids, CPU)
    heads = [torch.randn(2, LENGTH, 2, 8) for _ in range(3)]
    changed = [torch.where(torch.from_numpy(ids == 1)[..., None, None], 9.0, h) for h in heads]

    def attend(parts: list[torch.Tensor], dropout: float) -> torch.Tensor:
        torch.manual_seed(3)
        query, key, value = parts
        return causal_attention(query, key, value, documents, dropout=dropout)

    whole, other = attend(heads, 0.5), attend(changed, 0.5)
    assert torch.equal(whole[ids != 1], other[ids != 1])
    assert not torch.equal(whole, attend(heads, 0.0))
    assert torch.equal(whole, attend(heads, 0.5))


class Largest(TorchDispatchMode):
    """The entries of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.entries = max(self.entries, each.untyped_storage().nbytes() // each.itemsize)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_has_an_entry_for_each_pair_of_positions(dtype: torch.dtype) -> None:
    length = 256
    config = small_config(hidden_size=16, num_attention_heads=2, seq_length=length)
    layer = SelfAttention(config, dtype=dtype, device=CPU)
    documents = Documents.of(np.arange(length)[None] // 32, CPU)
    hidden = torch.randn(1, length, 16, dtype=dtype, requires_grad=True)
    with Largest() as largest:
        layer(hidden, documents=documents).sum().backward()
    assert 0 < largest.entries < length**2


@pytest.mark.parametrize("granularity", [None, "selective", "full", "ops"])
@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_training_equals_that_with_a_mask(
    variant: str, granularity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of gradient descent have the losses of masked attention, and its gradients."""
    recompute = RecomputeConfig(recompute_granularity=granularity)
    tokens, labels = random_tokens(), random_tokens(seed=1)
    results = []
    for expected in (True, False):
        model = sharpen(small_model(recompute=recompute, **VARIANTS[variant]))
        losses = []
        for seed in range(3):
            ids = drawn(seed, *tokens.shape)
            if expected:
                attend = lambda q, k, v, _, dropout, ids=ids: masked(q, k, v, ids)  # noqa: E731
                monkeypatch.setattr(attention_module, "causal_attention", attend)
            loss = model.loss(tokens, labels, document_ids=ids) / labels.numel()
            loss.backward()
            losses.append(loss.detach())
            found = gradients(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        monkeypatch.undo()
        results.append((torch.stack(losses), found))
    (wanted, expected_gradients), (losses, found) = results
    torch.testing.assert_close(losses, wanted, atol=1e-5, rtol=1e-5)
    assert losses.unique().numel() == 3
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected_gradients[name], atol=1e-5, rtol=1e-5)
