"""What one pipeline stage computes on a microbatch. Knows nothing of order or transport."""

from __future__ import annotations

import torch

from megatron.data.loader import DeviceMicrobatch
from megatron.model.gpt import GPT


class Stage:
    """The whole model as a single stage: forward ends in a loss, backward starts from it.

    `forward` keeps the graph of its microbatch until `backward` of the same microbatch.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        self._graphs: dict[int, torch.Tensor] = {}

    def forward(self, iteration: int, batch: DeviceMicrobatch) -> torch.Tensor:
        """Sum of the microbatch's token losses, an fp32 scalar without graph."""
        self.model.streams.at(iteration, batch.index)
        loss = self.model.loss(
            batch.tokens,
            batch.labels,
            batch.loss_mask,
            position_ids=batch.position_ids,
            document_ids=batch.document_ids,
        )
        if torch.is_grad_enabled():
            self._graphs[batch.index] = loss
        return loss.detach()

    def backward(self, index: int, scale: float) -> None:
        """Gradients of `scale` times that microbatch's loss, through the engine's hooks."""
        loss = self._graphs.pop(index)
        loss.backward(torch.full_like(loss, scale))
