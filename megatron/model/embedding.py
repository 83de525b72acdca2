"""Token and position embeddings, and the output layer that may share the token table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.linear import multiply

if TYPE_CHECKING:
    from megatron.config import ModelConfig


class Table(nn.Module):
    """A matrix of rows to look up or to multiply with; values are left for `init` to fill."""

    def __init__(
        self, num_rows: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size, dtype=dtype, device=device))


class Embedding(nn.Module):
    """Token plus, if learned, position embedding, with dropout: tokens [b, s] -> [b, s, h]."""

    def __init__(
        self, config: ModelConfig, *, padded_vocab: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.word_embeddings = Table(padded_vocab, config.hidden_size, dtype=dtype, device=device)
        self.position_embeddings: Table | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = Table(
                config.positions, config.hidden_size, dtype=dtype, device=device
            )

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[b, s] int64 -> [b, s, h]. `position_ids` [b, s]: None stands for 0..s-1."""
        hidden = F.embedding(tokens, self.word_embeddings.weight)
        if self.position_embeddings is not None:
            table = self.position_embeddings.weight
            if position_ids is None:
                hidden = hidden + table[: tokens.shape[1]]
            else:
                hidden = hidden + F.embedding(position_ids, table)
        return F.dropout(hidden, self.dropout, self.training)


class OutputLayer(nn.Module):
    """Hidden states to logits, without bias: [..., h] -> [..., padded vocabulary].

    `tied_to` is the token table to share: the weight is then a second leaf over the same storage,
    so that each use accumulates a gradient of its own and no dense sum is formed by autograd.
    """

    def __init__(
        self,
        num_rows: int,
        size: int,
        *,
        tied_to: nn.Parameter | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        if tied_to is None:
            self.weight = nn.Parameter(torch.empty(num_rows, size, dtype=dtype, device=device))
        else:
            self.weight = nn.Parameter(tied_to.detach())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., h] -> [..., padded vocabulary]; padding columns are 0."""
        return multiply(hidden, self.weight)
