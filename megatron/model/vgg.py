"""VGG-19 without batch normalization (Simonyan and Zisserman 2015, configuration E).

The network has 143,667,240 parameters with 1,000 classes. Parameter names and the distributions of
initial values are torchvision's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.low_memory.activation_checkpoint import Block, Operator, run_blocks
from megatron.low_memory.checkpoint_interval import runs_by_operators
from megatron.model.convolution import convolution, fill, linear
from megatron.model.image_shapes import VGG19_CHANNELS, VGG_HIDDEN, VGG_POOLED, scaled
from megatron.tensor_parallel.rng import DropoutStreams, StreamPosition

if TYPE_CHECKING:
    from megatron.config import RecomputeConfig


class Dropout(nn.Module):
    """Dropout that draws from a stream of its own, which depends on step and microbatch."""

    def __init__(self, probability: float, streams: DropoutStreams, *, layer: int) -> None:
        super().__init__()
        self.probability = probability
        self.streams, self.layer = streams, layer

    def forward(self, hidden: torch.Tensor, position: StreamPosition | None = None) -> torch.Tensor:
        """Drop entries in training, and scale the others by 1 / (1 - probability).

        `position` of the streams: None for the current one.
        """
        if not self.training or self.probability == 0:
            return hidden
        self.streams.enter(self.layer, position=position)
        return F.dropout(hidden, self.probability)


def pool(features: torch.Tensor) -> torch.Tensor:
    """Average features [b, c, h, w] over windows to 7 x 7, as `adaptive_avg_pool2d` does.

    The gradient of that function has no deterministic kernel on a GPU. In deterministic mode each
    window is averaged by itself.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return F.adaptive_avg_pool2d(features, VGG_POOLED)
    for axis in (2, 3):
        size = features.shape[axis]
        if size != VGG_POOLED:
            starts = [step * size // VGG_POOLED for step in range(VGG_POOLED)]
            stops = [-(-(step + 1) * size // VGG_POOLED) for step in range(VGG_POOLED)]
            windows = zip(starts, stops, strict=True)
            features = torch.stack(
                [features.narrow(axis, lo, hi - lo).mean(axis) for lo, hi in windows], axis
            )
    return features


class VGG19(nn.Module):
    """VGG-19 for images of any size of at least 32 x 32 pixels.

    Args:
        classes: Number of classes.
        dropout: Probability of dropping a hidden unit of the classifier.
        streams: Streams of random numbers for dropout.
        seed: Seed of the initial values.
        width: A factor of all hidden channels, 1 for the published network.
        dtype: The dtype of the parameters.
        device: The device of the parameters.
        recompute: The activations to recompute in backward; of the granularities that
            `run_blocks` serves only "every" saves memory.
    """

    def __init__(
        self,
        *,
        classes: int,
        dropout: float,
        streams: DropoutStreams,
        seed: int,
        width: float = 1.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        recompute: RecomputeConfig | None = None,
    ) -> None:
        super().__init__()
        self.recompute, self.streams = recompute, streams
        placed: dict[str, Any] = {"dtype": dtype, "device": device}
        inputs, features = 3, []
        for outputs in scaled(VGG19_CHANNELS, width):
            if outputs:
                features += [convolution(inputs, outputs, 3, bias=True, **placed), nn.ReLU()]
                inputs = outputs
            else:
                features.append(nn.MaxPool2d(2))
        (hidden,) = scaled([VGG_HIDDEN], width)
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(
            linear(inputs * VGG_POOLED**2, hidden, **placed),
            nn.ReLU(),
            Dropout(dropout, streams, layer=0),
            linear(hidden, hidden, **placed),
            nn.ReLU(),
            Dropout(dropout, streams, layer=1),
            linear(hidden, classes, **placed),
        )
        fill(self, seed=seed, convolutions="fan-out normal", linears="normal 0.01")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores [b, classes] of images [b, 3, h, w] of the parameters' dtype."""
        if runs_by_operators(self.recompute):
            (scores,) = run_blocks([self.operators()], images, recompute=self.recompute)
            return scores
        return self.classifier(pool(self.features(images)).flatten(1))

    def operators(self) -> Block:
        """Return `forward` as operators, one for each module."""
        # Recomputation may run after the streams have moved on, so the current position is kept.
        position = self.streams.position

        def flat(hidden: torch.Tensor) -> tuple[torch.Tensor]:
            return (pool(hidden).flatten(1),)

        def run(module: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor]:
            if isinstance(module, Dropout):
                return (module(hidden, position),)
            return (module(hidden),)

        features, classifier = (
            [Operator(partial(run, module), "other") for module in part]
            for part in (self.features, self.classifier)
        )
        return [*features, Operator(flat, "other"), *classifier]
