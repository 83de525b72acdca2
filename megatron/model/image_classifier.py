"""A network that classifies images, as the one chunk of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.buffers import BufferInfo
from megatron.model.batch_norm import batch_norm_buffers
from megatron.tensor_parallel.rng import DropoutStreams

if TYPE_CHECKING:
    from megatron.data.image_reader import ImageBatch


class ImageClassifier(nn.Module):
    """A chunk that returns the sum of the cross-entropies and the number of correct predictions.

    Args:
        network: Maps images [b, 3, h, w] to scores [b, classes], in its parameters' dtype.
        device: The device of the parameters.
        dtype: The dtype to which images are cast for the network.
        streams: The streams from which the network draws dropout.
    """

    begins = True

    def __init__(
        self,
        network: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        streams: DropoutStreams,
    ) -> None:
        super().__init__()
        self.network = network
        self.device, self.dtype = device, dtype
        self.streams = streams

    def run(self, iteration: int, batch: ImageBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return the fp32 sums [2] over a microbatch: cross-entropy, correct predictions.

        Images with the label `IGNORED` count in neither. A prediction is the class with the largest
        score (top-1), the first one among equal scores.
        """
        self.streams.at(iteration, batch.index)
        scores = self.network(batch.images.to(self.dtype)).float()
        loss = F.cross_entropy(scores, batch.labels, reduction="sum")
        correct = (scores.detach().argmax(dim=1) == batch.labels).sum()
        return torch.stack([loss, correct.float()])

    def parameter_infos(self) -> list[ParamInfo]:
        """Return every parameter, in the order of the modules.

        Weight decay applies to parameters of two or more axes: not to norms and biases.
        """
        return [
            ParamInfo(
                name=name,
                leaves=(param,),
                logical_shape=tuple(param.shape),
                weight_decay=param.dim() > 1,
            )
            for name, param in self.network.named_parameters()
        ]

    def buffer_infos(self) -> list[BufferInfo]:
        """Return the running statistics of every batch normalization."""
        return batch_norm_buffers(self.network)
