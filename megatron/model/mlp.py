"""The feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.gelu import gelu_tanh
from megatron.model.linear import linear

if TYPE_CHECKING:
    from megatron.config import ModelConfig


class MLP(nn.Module):
    """GELU or SwiGLU between two projections: [b, s, h] -> [b, s, h].

    With SwiGLU the first projection gives gate and value one after the other, as in Megatron:
    silu(first half) * second half.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.swiglu = config.swiglu
        self.activation = gelu_tanh if config.gelu == "tanh" else F.gelu
        inner = config.ffn_size * (2 if config.swiglu else 1)
        self.dense_h_to_4h = linear(
            config.hidden_size, inner, bias=config.bias, dtype=dtype, device=device
        )
        self.dense_4h_to_h = linear(
            config.ffn_size, config.hidden_size, bias=config.bias, dtype=dtype, device=device
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]."""
        inner = self.dense_h_to_4h(hidden)
        if self.swiglu:
            gate, value = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * value
        else:
            inner = self.activation(inner)
        return self.dense_4h_to_h(inner)
