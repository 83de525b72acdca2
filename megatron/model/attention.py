"""Causal self-attention with grouped queries.

Shapes: b batch, s sequence, h hidden, g query groups, q query heads of a group, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.blocked_attention import blocked_attention, blocked_attention_serves
from megatron.model.linear import linear
from megatron.model.rotary import Rotary, rotate

if TYPE_CHECKING:
    from megatron.config import ModelConfig


class KeyValueCache:
    """Keys and values of one layer for the positions generated so far, [b, g, capacity, d]."""

    def __init__(self, shape: tuple[int, int, int, int], *, like: torch.Tensor) -> None:
        self.keys = like.new_empty(shape)
        self.values = like.new_empty(shape)
        self.length = 0

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [b, g, new, d]; return all so far."""
        stop = self.length + keys.shape[2]
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class SelfAttention(nn.Module):
    """Attention of each position to itself and those before it: [b, s, h] -> [b, s, h].

    The rows of `query_key_value` are grouped as Megatron's: for each query group its query heads,
    then its key, then its value, so that cutting rows over ranks keeps groups whole.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_groups = config.query_groups
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        inner = self.num_heads * self.head_dim
        self.query_key_value = linear(
            config.hidden_size,
            inner + 2 * self.num_groups * self.head_dim,
            bias=config.bias,
            dtype=dtype,
            device=device,
        )
        self.dense = linear(inner, config.hidden_size, bias=config.bias, dtype=dtype, device=device)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary | None = None,
        mask: torch.Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]. `mask`: bool [b, 1, s, s], True where attention is allowed,
        in place of the causal one. `cache`: generation only; a pass of several positions must
        start with an empty one."""
        batch, length, _ = hidden.shape
        per_group = self.num_heads // self.num_groups
        mixed = self.query_key_value(hidden).view(
            batch, length, self.num_groups, per_group + 2, self.head_dim
        )
        query, key, value = mixed.split([per_group, 1, 1], dim=3)
        query = query.reshape(batch, length, self.num_heads, self.head_dim)
        key, value = key.squeeze(3), value.squeeze(3)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        context = self._attend(query, key, value, mask, cache)
        return self.dense(context)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """Heads [b, s, *, d] to their contexts side by side, [b, s, heads * d]."""
        dropout = self.dropout if self.training else 0.0
        if mask is None and cache is None and dropout == 0 and blocked_attention_serves(query):
            return blocked_attention(query, key, value).flatten(2)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # [b, *, s, d]
        if cache is not None:
            key, value = cache.extend(key, value)
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and query.shape[2] > 1,
            enable_gqa=self.num_heads != self.num_groups,
        )
        return context.transpose(1, 2).flatten(2)


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Block-causal mask from [b, s] ids: bool [b, 1, s, s], True where position i may see j, that
    is j <= i and both lie in the same document."""
    length = document_ids.shape[1]
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril_()
