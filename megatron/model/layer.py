"""The pre-norm transformer layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.documents import Documents
from megatron.low_memory.activation_checkpoint import Block, Operator
from megatron.model.attention import KeyValueCache, SelfAttention
from megatron.model.mlp import MLP
from megatron.model.norm import NORMALIZATIONS
from megatron.model.rotary import Rotary
from megatron.tensor_parallel.collectives import UNCUT, TensorParallel
from megatron.tensor_parallel.rng import LayerStream

if TYPE_CHECKING:
    from megatron.config import ModelConfig


class TransformerLayer(nn.Module):
    """A transformer layer: x + attention(norm(x)), then x + mlp(norm(x)), both with dropout."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        recomputes_attention: bool = False,
        tp: TensorParallel = UNCUT,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        norm = NORMALIZATIONS[config.normalization]
        size, epsilon = config.hidden_size, config.norm_epsilon
        self.dropout = config.hidden_dropout
        self.input_norm = norm(size, epsilon=epsilon, dtype=dtype, device=device)
        self.attention = SelfAttention(
            config, recomputes=recomputes_attention, tp=tp, dtype=dtype, device=device
        )
        self.post_attention_norm = norm(size, epsilon=epsilon, dtype=dtype, device=device)
        self.mlp = MLP(config, tp=tp, dtype=dtype, device=device)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary | None = None,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
        stream: LayerStream | None = None,
    ) -> torch.Tensor:
        """Apply the layer: [b, s, h] -> [b, s, h], or [b, s/tp, h] with sequence parallelism.

        Dropout draws from the default generator. `stream` is entered again if attention is
        recomputed, or if hidden states have another stream than heads.
        """
        branch = self.attention(self.input_norm(hidden), rotary, documents, cache, stream)
        if stream is not None:
            stream.hidden()
        hidden = hidden + self._drop(branch)
        branch = self.mlp(self.post_attention_norm(hidden))
        return hidden + self._drop(branch)

    def operators(
        self, rotary: Rotary | None, documents: Documents | None, stream: LayerStream | None
    ) -> Block:
        """Return `forward` as operators on hidden states and the output of a branch.

        The first operator takes hidden states [b, s, h] alone, and the last one returns them. The
        operators enter `stream` themselves.
        """

        def attend(hidden: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if stream is not None:
                stream.heads()
            return hidden, self.attention.core(mixed, rotary, documents)

        def add_attention(hidden: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor]:
            branch = self.attention.output(context)
            if stream is not None:
                stream.hidden()
            return (hidden + self._drop(branch),)

        def add_mlp(hidden: torch.Tensor, inner: torch.Tensor) -> tuple[torch.Tensor]:
            return (hidden + self._drop(self.mlp.dense_4h_to_h(inner)),)

        return (
            Operator(lambda hidden: (hidden, self.input_norm(hidden)), "norm"),
            Operator(lambda hidden, normed: (hidden, self.attention.mixed(normed)), "product"),
            Operator(attend, "other"),
            Operator(add_attention, "product"),
            Operator(lambda hidden: (hidden, self.post_attention_norm(hidden)), "norm"),
            Operator(lambda hidden, normed: (hidden, self.mlp.dense_h_to_4h(normed)), "product"),
            Operator(lambda hidden, inner: (hidden, self.mlp.activate(inner)), "other"),
            Operator(add_mlp, "product"),
        )

    def _drop(self, branch: torch.Tensor) -> torch.Tensor:
        return F.dropout(branch, self.dropout, self.training)
