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
    """Two projections with GELU or SwiGLU between them: [b, s, h] -> [b, s, h].

    With SwiGLU the first projection concatenates gate and value, as in Megatron: silu(first half) *
    second half. Tensor-parallel ranks hold the same shares of gate and value.
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
        """Apply the block: [b, s, h] -> [b, s, h], or [b, s/tp, h] with sequence parallelism."""
        return self.dense_4h_to_h(self.activate(self.dense_h_to_4h(hidden)))

    def activate(self, inner: torch.Tensor) -> torch.Tensor:
        """Apply the activation to the first projection: [..., columns] -> [..., f]."""
        if self.swiglu:
            gate, value = inner.chunk(2, dim=-1)
            return F.silu(gate) * value
        return self.activation(inner)
