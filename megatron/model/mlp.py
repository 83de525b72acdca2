"""The feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.gelu import gelu_tanh
from megatron.tensor_parallel.collectives import UNCUT, TensorParallel
from megatron.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from megatron.config import ModelConfig


class MLP(nn.Module):
    """GELU or SwiGLU between two projections: [b, s, h] -> [b, s, h].

    With SwiGLU the first projection gives gate and value one after the other, as in Megatron:
    silu(first half) * second half. Each tensor-parallel rank has a share of what is between, the
    same one of gate and value.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: TensorParallel = UNCUT,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.swiglu = config.swiglu
        self.activation = gelu_tanh if config.gelu == "tanh" else F.gelu
        blocks = 2 if config.swiglu else 1
        common: dict[str, Any] = {"bias": config.bias, "tp": tp, "dtype": dtype, "device": device}
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size, blocks * config.ffn_size, blocks=blocks, **common
        )
        self.dense_4h_to_h = RowParallelLinear(config.ffn_size, config.hidden_size, **common)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]; [b, s/tp, h] both where the sequence is cut."""
        inner = self.dense_h_to_4h(hidden)
        if self.swiglu:
            gate, value = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * value
        else:
            inner = self.activation(inner)
        return self.dense_4h_to_h(inner)
