"""Flash attention over documents of different lengths, which has no CPU kernel, by its parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

Documents = Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    longest: int,
    *arguments: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    """Play `_flash_attention_forward`: contexts [tokens, heads, d], log-sums [heads, tokens]."""
    _check(query, offsets, key_offsets, longest)
    context, log_sums = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for place, scores, _, values in _documents(query, key, value, offsets):
        log_sums[:, place] = scores.logsumexp(-1)
        context[place] = (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype)
    nothing = torch.empty(0)
    return context, log_sums, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: torch.Tensor,
    log_sums: torch.Tensor,
    offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    longest: int,
    *arguments: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    """Play `_flash_attention_backward`: gradients of queries, keys and values."""
    _check(query, offsets, key_offsets, longest)
    grads = tuple(torch.empty_like(heads) for heads in (query, key, value))
    groups, scale = key.shape[1], 1 / math.sqrt(query.shape[-1])
    for place, scores, keys, values in _documents(query, key, value, offsets):
        weights = (scores - log_sums[:, place, None]).exp()
        above, below = (part[place].float().transpose(0, 1) for part in (grad, context))
        sums = (above * below).sum(-1, keepdim=True)
        inner = weights * (above @ values.transpose(1, 2) - sums) * scale
        queries = query[place].float().transpose(0, 1)
        found = inner @ keys, inner.transpose(1, 2) @ queries, weights.transpose(1, 2) @ above
        for target, heads in zip(grads, found, strict=True):
            count = len(heads) if target is grads[0] else groups
            summed = heads.unflatten(0, (count, -1)).sum(1)
            target[place] = summed.transpose(0, 1).to(target.dtype)
    return grads


def _check(
    query: torch.Tensor, offsets: torch.Tensor, key_offsets: torch.Tensor, longest: int
) -> None:
    assert query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0
    assert offsets.dtype == torch.int32 and torch.equal(offsets, key_offsets)
    assert offsets[0] == 0 and offsets[-1] == len(query) and offsets.diff().max() == longest


def _documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor
) -> Documents:
    """Yield the place of each document, its causal scores, and keys and values of each head."""
    each = query.shape[1] // key.shape[1]
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        place = slice(start, stop)
        queries, keys, values = (
            part[place].float().transpose(0, 1) for part in (query, key, value)
        )
        keys, values = (part.repeat_interleave(each, 0) for part in (keys, values))
        scores = queries @ keys.transpose(1, 2) / math.sqrt(query.shape[-1])
        future = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        yield place, scores.masked_fill(future, -math.inf), keys, values
