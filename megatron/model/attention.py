"""Causal self-attention with grouped queries.

Shapes: b batch, s sequence, h hidden, g query groups, q query heads of a group, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.documents import Documents
from megatron.low_memory.activation_checkpoint import recomputed
from megatron.model.causal_attention import causal_attention, fused_attention
from megatron.model.norm import NORMALIZATIONS
from megatron.model.rotary import Rotary, rotate
from megatron.tensor_parallel.collectives import UNCUT, TensorParallel, uncompiled
from megatron.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.rng import LayerStream

if TYPE_CHECKING:
    from megatron.config import ModelConfig


class KeyValueCache:
    """Keys and values of one layer at the positions generated so far, [b, g, capacity, d]."""

    def __init__(self, shape: tuple[int, int, int, int], *, like: torch.Tensor) -> None:
        self.keys = like.new_empty(shape)
        self.values = like.new_empty(shape)
        self.length = 0

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [b, g, new, d] in place, and return views of all so far."""
        stop = self.length + keys.shape[2]
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class SelfAttention(nn.Module):
    """Causal self-attention: [b, s, h] -> [b, s, h].

    The rows of `query_key_value` are grouped as in Megatron: for each query group its query heads,
    its key, its value, so that tensor shards hold whole groups. `num_heads` and `num_groups` count
    the heads and groups of this rank. With `recomputes`, backward recomputes everything between the
    two projections.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        recomputes: bool = False,
        tp: TensorParallel = UNCUT,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.recomputes = recomputes
        self.num_heads = config.num_attention_heads // tp.size
        self.num_groups = config.query_groups // tp.size
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        inner = config.num_attention_heads * self.head_dim
        keys_and_values = 2 * config.query_groups * self.head_dim
        common: dict[str, Any] = {"bias": config.bias, "tp": tp, "dtype": dtype, "device": device}
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size, inner + keys_and_values, **common
        )
        # Each rank normalizes its own heads with norm weights that are replicated.
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            norm = NORMALIZATIONS[config.normalization]
            like: dict[str, Any] = {
                "epsilon": config.norm_epsilon,
                "dtype": dtype,
                "device": device,
            }
            self.q_layernorm = norm(self.head_dim, **like)
            self.k_layernorm = norm(self.head_dim, **like)
        self.dense = RowParallelLinear(inner, config.hidden_size, **common)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary | None = None,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
        stream: LayerStream | None = None,
    ) -> torch.Tensor:
        """Apply attention: [b, s, h] -> [b, s, h], or [b, s/tp, h] with sequence parallelism.

        Args:
            rotary: cosines and sines of the whole sequence.
            documents: the documents in which attention stays; None for one document a sample.
            cache: for generation; must be empty for a pass of several positions. Not used if the
                attention is recomputed.
            stream: the dropout stream that the recomputed part enters in each of its two passes.
        """
        mixed = self.mixed(hidden)
        if self.recomputes and torch.is_grad_enabled():
            context = _recomputed_core(self, mixed, rotary, documents, stream)
        else:
            context = self.core(mixed, rotary, documents, cache)
        return self.output(context)

    def mixed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project to this rank's queries, keys and values of the whole sequence: [b, s, rows]."""
        return self.tp.by_position(self.query_key_value(hidden))

    def output(self, context: torch.Tensor) -> torch.Tensor:
        """Project this rank's contexts [b, s, heads * d] to [b, s, h], or [b, s/tp, h]."""
        return self.dense(self.tp.by_rank(context))

    def core(
        self,
        mixed: torch.Tensor,
        rotary: Rotary | None,
        documents: Documents | None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Map the output of `query_key_value` to this rank's contexts [b, s, heads * d].

        `mixed` is [b, s, g * (q + 2) * d] with this rank's groups.
        """
        batch, length, _ = mixed.shape
        per_group = self.num_heads // self.num_groups
        mixed = mixed.view(batch, length, self.num_groups, per_group + 2, self.head_dim)
        query, key, value = mixed.split([per_group, 1, 1], dim=3)
        query = query.reshape(batch, length, self.num_heads, self.head_dim)
        key, value = key.squeeze(3), value.squeeze(3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        return self._attend(query, key, value, documents, cache)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Documents | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """Return concatenated contexts [b, s, heads * d] of heads [b, s, *, d]."""
        dropout = self.dropout if self.training else 0.0
        if cache is None:
            return causal_attention(query, key, value, documents, dropout=dropout).flatten(2)
        key, value = cache.extend(key.transpose(1, 2), value.transpose(1, 2))
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        return fused_attention(query, key, value, dropout=dropout).flatten(2)


# Seeding would break a compiled graph, so the core runs uncompiled.
@uncompiled
def _recomputed_core(
    attention: SelfAttention,
    mixed: torch.Tensor,
    rotary: Rotary | None,
    documents: Documents | None,
    stream: LayerStream | None,
) -> torch.Tensor:
    def core(
        mixed: torch.Tensor, rotary: Rotary | None, documents: Documents | None
    ) -> torch.Tensor:
        if stream is not None:
            stream.heads()
        return attention.core(mixed, rotary, documents)

    return recomputed(core, mixed, rotary, documents)
