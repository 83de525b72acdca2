"""Causal attention on the CPU by batched matrix products over blocks of queries.

torch's fused CPU kernel reaches about a sixth of the rate of its own bf16 matrix products where the
CPU multiplies bf16, and its backward takes eight times as long as in fp32 where the CPU does not.
Here each block of queries is multiplied with the keys up to its end, which skips most of the masked
half, and scores exist for one block of a few heads, in cache. Backward recomputes the scores, so
memory grows linearly with the sequence.

On a CPU that multiplies the input dtype, scores are rounded to that dtype before the softmax, as in
Megatron's unfused attention; the softmax and the sums in products are fp32. Other CPUs widen each
block to fp32, and round only contexts and gradients.

Shapes: b batch, s sequence, g query groups, p query heads of a group, d head size; n = b * g.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron.low_memory.activation_checkpoint import product_result
from megatron.processor import multiplies_natively

_BLOCK_QUERIES = 128
_SCORES_IN_CACHE = 1 << 20
_softmax_backward = torch.ops.aten._softmax_backward_data


def blocked_attention_serves(query: torch.Tensor) -> bool:
    """Return whether `blocked_attention` is faster: for 16-bit tensors on a CPU, uncompiled.

    torch.compile cannot trace it, and torch's fused kernel is faster in fp32, with AVX2 and AVX512.
    """
    return (
        not torch.compiler.is_compiling()
        and query.device.type == "cpu"
        and query.dtype in (torch.bfloat16, torch.float16)
    )


def blocked_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute causal softmax(q k^T / sqrt(d)) v.

    Args:
        query: [b, s, g * p, d]; the first p heads belong to the first group, and so on.
        key: [b, s, g, d].
        value: [b, s, g, d].

    Returns:
        The contiguous context, [b, s, g * p, d].
    """
    return _BlockedAttention.apply(query, key, value)


class _Block(NamedTuple):
    """A block of groups [n] and query positions, with the key positions that these may see."""

    groups: slice
    queries: slice
    keys: slice
    mask: torch.Tensor
    """Additive mask in the products' dtype, 0 or -inf: [p * queries, keys]."""


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        queries, keys, values = (_by_group(part, key.shape[2]) for part in (query, key, value))
        context = product_result(_contexts, queries, keys, values)
        ctx.save_for_backward(queries, keys, values)
        return _by_position(context, query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        queries, keys, values = ctx.saved_tensors
        batch, length, heads, size = grads[0].shape
        kv_shape = (batch, length, keys.shape[0] // batch, size)
        grad_context = _by_group(grads[0], kv_shape[2])
        grad_queries = torch.empty_like(queries)
        # Accumulated over blocks of queries, in fp32.
        grad_keys = torch.zeros_like(keys, dtype=torch.float32)
        grad_values = torch.zeros_like(values, dtype=torch.float32)
        scale = 1 / math.sqrt(size)
        for block in _blocks(queries):
            seen = block.groups, 0, block.keys
            weights = _weights(queries, keys, block)
            grad = _take(grad_context, block)
            grad_values[seen] += torch.bmm(weights.transpose(1, 2), grad)
            grad_weights = torch.bmm(grad, _seen(values, block).transpose(1, 2))
            grad_scores = _softmax_backward(grad_weights, weights, -1, weights.dtype)
            _put(grad_queries, block, torch.bmm(grad_scores, _seen(keys, block)).mul_(scale))
            grad_keys[seen] += torch.bmm(grad_scores.transpose(1, 2), _take(queries, block))
        grad_keys.mul_(scale)
        return (
            _by_position(grad_queries, grads[0].shape),
            _by_position(grad_keys.to(keys.dtype), kv_shape),
            _by_position(grad_values.to(values.dtype), kv_shape),
        )


def _contexts(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    context = torch.empty_like(queries)
    for block in _blocks(queries):
        weights = _weights(queries, keys, block)
        _put(context, block, torch.bmm(weights, _seen(values, block)))
    return context


def _blocks(queries: torch.Tensor) -> Iterator[_Block]:
    """Split queries [n, p, s, d] into blocks whose scores stay in cache."""
    num_groups, per_group, length, _ = queries.shape
    dtype = queries.dtype if multiplies_natively(queries.dtype) else torch.float32
    rows = min(_BLOCK_QUERIES, length)
    together = max(1, _SCORES_IN_CACHE // (rows * per_group * length))
    future = torch.full((rows, rows), -math.inf, dtype=dtype).triu_(1)
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        causal = torch.zeros(per_group, stop - start, stop, dtype=dtype)
        causal[:, :, start:] = future[: stop - start, : stop - start]
        causal = causal.flatten(0, 1)
        for first in range(0, num_groups, together):
            groups = slice(first, min(first + together, num_groups))
            yield _Block(groups, slice(start, stop), slice(0, stop), causal)


def _weights(queries: torch.Tensor, keys: torch.Tensor, block: _Block) -> torch.Tensor:
    """Return the attention weights of a block, [groups, p * queries, keys]."""
    query, key = _take(queries, block), _seen(keys, block)
    scale = 1 / math.sqrt(query.shape[-1])
    return torch.baddbmm(block.mask, query, key.transpose(1, 2), alpha=scale).softmax(-1)


def _take(heads: torch.Tensor, block: _Block) -> torch.Tensor:
    """Return the query rows of a block: [n, p, s, d] -> [groups, p * queries, d]."""
    return heads[block.groups, :, block.queries].flatten(1, 2).to(block.mask.dtype)


def _seen(heads: torch.Tensor, block: _Block) -> torch.Tensor:
    """Return the key or value rows of a block: [n, 1, s, d] -> [groups, keys, d]."""
    return heads[block.groups, 0, block.keys].to(block.mask.dtype)


def _put(heads: torch.Tensor, block: _Block, rows: torch.Tensor) -> None:
    """Write the query rows of a block, reversing `_take`."""
    target = heads[block.groups, :, block.queries]
    target.copy_(rows.view(target.shape))


def _by_group(heads: torch.Tensor, groups: int) -> torch.Tensor:
    """Reorder [b, s, g * p, d] to contiguous [b * g, p, s, d]."""
    return heads.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous()


def _by_position(heads: torch.Tensor, shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
    """Reorder [b * g, p, s, d] to contiguous [b, s, g * p, d] of this shape."""
    batch = shape[0]
    return heads.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).reshape(shape)
