"""Token and position embeddings, and the output layer that may share the token table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.tensor_parallel.collectives import UNCUT, TensorParallel
from megatron.tensor_parallel.layers import ShardedModule
from megatron.tensor_parallel.products import multiply
from megatron.tensor_parallel.sharded_products import multiply_by_columns
from megatron.tensor_parallel.vocabulary import VocabularyTable, padded_share, vocabulary_shard

if TYPE_CHECKING:
    from megatron.config import ModelConfig


class EmbeddingTable(nn.Module):
    """A lookup table whose values are filled by `init`."""

    def __init__(
        self, num_rows: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size, dtype=dtype, device=device))


class Embedding(nn.Module):
    """Token embedding plus, if learned, position embedding, with dropout."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        tp: TensorParallel = UNCUT,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.tp = tp
        self.word_embeddings = VocabularyTable(
            vocab_size,
            config.hidden_size,
            divisible_by=config.make_vocab_size_divisible_by,
            tp=tp,
            dtype=dtype,
            device=device,
        )
        self.position_embeddings: EmbeddingTable | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = EmbeddingTable(
                config.positions, config.hidden_size, dtype=dtype, device=device
            )

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embed int64 tokens [b, s] as [b, s, h], or [b, s/tp, h] with sequence parallelism.

        `position_ids` are int64 [b, s]; None means 0..s-1.
        """
        hidden = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            table = self.position_embeddings.weight
            here = self.tp.positions(tokens.shape[1])
            if position_ids is None:
                hidden = hidden + table[here]
            else:
                hidden = hidden + F.embedding(position_ids[:, here], table)
        return F.dropout(hidden, self.dropout, self.training)


class OutputLayer(ShardedModule):
    """Projection of hidden states [..., h] to this rank's padded logits, without bias.

    With a token table `tied_to` the weight is a second leaf over the same storage, so that each use
    accumulates its own gradient and autograd forms no dense sum.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        tied_to: nn.Parameter | None,
        tp: TensorParallel = UNCUT,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(tp)
        size = config.hidden_size
        if tied_to is None:
            multiple = config.make_vocab_size_divisible_by
            rows = padded_share(vocab_size, tp=tp, divisible_by=multiple)
            self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype, device=device))
        else:
            self.weight = nn.Parameter(tied_to.detach())
        if self.is_sharded:
            self.shards["weight"] = vocabulary_shard(vocab_size, size, tp=tp)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project [b, s, h] to logits [b, s, columns] of this rank's share, with padding columns.

        With sequence parallelism: [b, s/tp, h] -> [tp * b, s/tp, columns].
        """
        if self.is_sharded:
            return multiply_by_columns(hidden, self.weight, None, self.tp)
        return multiply(hidden, self.weight)
