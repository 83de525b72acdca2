"""Causal attention of whole sequences, or inside each of the documents that are packed into them.

No implementation makes a mask of s x s entries: documents of different lengths are one call of
torch's kernel for them where `_varlen_serves`, and separate calls elsewhere, which skip the scores
between documents.

    tokens     a a a b b c c | d e e e e e e      s = 7, b = 2
    lengths    3     2   2     1 6                a call each for a, b and c, d, e

Shapes: b batch, s sequence, g query groups, d head size.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F

from megatron.config.gpt import LARGEST_FLASH_HEAD
from megatron.documents import Documents
from megatron.model.blocked_attention import blocked_attention, blocked_attention_serves
from megatron.tensor_parallel.collectives import uncompiled


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents | None = None,
    *,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute softmax(q k^T / sqrt(d)) v of each position and the positions before it.

    Args:
        query: [b, s, heads, d]; the first heads / g heads belong to the first group, and so on.
        key: [b, s, g, d].
        value: [b, s, g, d].
        documents: The documents in which attention stays; None for one document a sample.
        dropout: Probability to drop an attention weight.

    Returns:
        The context, [b, s, heads, d].
    """
    if documents is None:
        return _whole(query, key, value, dropout)
    if _varlen_serves(query, documents, dropout):
        return _together(query, key, value, documents)
    return _one_by_one(query, key, value, documents, dropout)


def fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, dropout: float = 0.0
) -> torch.Tensor:
    """Compute causal attention by torch's function, which chooses the kernel.

    Shapes are those of `causal_attention`, but a single query may have keys before it.
    """
    context = F.scaled_dot_product_attention(
        *(heads.transpose(1, 2) for heads in (query, key, value)),  # [b, *, s, d]
        dropout_p=dropout,
        is_causal=query.shape[1] > 1,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return context.transpose(1, 2)


def _whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> torch.Tensor:
    if dropout == 0 and blocked_attention_serves(query):
        return blocked_attention(query, key, value)
    return fused_attention(query, key, value, dropout=dropout)


# Lengths differ between microbatches, and a compiled graph is made for one choice of them.
@uncompiled
def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    dropout: float,
) -> torch.Tensor:
    """Attend each document by itself; consecutive documents of one length are a batch."""
    runs = [(len(list(equal)), length) for length, equal in groupby(documents.lengths)]
    tokens = [count * length for count, length in runs]
    # Splitting copies nothing, and its backward concatenates the gradients once.
    queries, keys, values = (heads.flatten(0, 1).split(tokens) for heads in (query, key, value))
    contexts = [
        _whole(q.unflatten(0, run), k.unflatten(0, run), v.unflatten(0, run), dropout).flatten(0, 1)
        for run, q, k, v in zip(runs, queries, keys, values, strict=True)
    ]
    return torch.cat(contexts).view(query.shape)


def _together(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents
) -> torch.Tensor:
    """Attend all documents in one call of flash attention."""
    from torch.nn.attention.varlen import varlen_attn  # loads the compiler

    assert documents.offsets is not None, "`_varlen_serves`"
    context = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        documents.offsets,
        documents.offsets,
        documents.longest,
        documents.longest,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[2] != key.shape[2],
    )
    assert isinstance(context, torch.Tensor), "no log-sums are asked for"
    return context.view(query.shape)


def _varlen_serves(query: torch.Tensor, documents: Documents, dropout: float) -> bool:
    """Return whether torch's kernel for documents takes these heads."""
    size = query.shape[-1]
    return (
        documents.offsets is not None
        and dropout == 0
        and query.dtype in (torch.bfloat16, torch.float16)
        and size % 8 == 0
        and size <= LARGEST_FLASH_HEAD
    )
