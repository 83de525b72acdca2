"""Bottleneck residual networks with torchvision's names: wide_resnet101_2.

The network is that of He et al. 2016 with 3 x 3 convolutions twice as wide (Zagoruyko and Komodakis
2016). The stride of a block is in its 3 x 3 convolution, as in torchvision. The network has
126,886,696 parameters with 1,000 classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.low_memory.activation_checkpoint import Block, Operator, run_blocks
from megatron.low_memory.checkpoint_interval import runs_by_operators
from megatron.model.batch_norm import BatchNorm2d
from megatron.model.convolution import convolution, fill, linear
from megatron.model.image_shapes import RESNET101_BLOCKS, RESNET_EXPANSION, RESNET_PLANES, scaled

if TYPE_CHECKING:
    from megatron.config import RecomputeConfig


class Bottleneck(nn.Module):
    """Three normalized convolutions beside a shortcut, with a ReLU behind the sum."""

    def __init__(
        self,
        inputs: int,
        planes: int,
        *,
        stride: int,
        projects: bool,
        norm: dict[str, Any],
        **placed: Any,
    ) -> None:
        super().__init__()
        inner, outputs = 2 * planes, RESNET_EXPANSION * planes
        self.conv1 = convolution(inputs, inner, 1, **placed)
        self.bn1 = BatchNorm2d(inner, **norm)
        self.conv2 = convolution(inner, inner, 3, stride=stride, **placed)
        self.bn2 = BatchNorm2d(inner, **norm)
        self.conv3 = convolution(inner, outputs, 1, **placed)
        self.bn3 = BatchNorm2d(outputs, **norm)
        self.downsample: nn.Module = nn.Identity()
        if projects:
            self.downsample = nn.Sequential(
                convolution(inputs, outputs, 1, stride=stride, **placed),
                BatchNorm2d(outputs, **norm),
            )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [b, inputs, h, w] to [b, 4 planes, ceil(h / stride), ceil(w / stride)]."""
        (hidden,) = run_blocks([self.operators()], hidden, recompute=None)
        return hidden

    def operators(self) -> Block:
        """Return `forward` as operators on the input of the block and its branch."""

        def add(hidden: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor]:
            return (F.relu(branch + hidden),)

        return (
            Operator(lambda hidden: (hidden, self.conv1(hidden)), "product"),
            Operator(lambda hidden, branch: (hidden, self.bn1(branch)), "norm"),
            Operator(lambda hidden, branch: (hidden, F.relu(branch)), "other"),
            Operator(lambda hidden, branch: (hidden, self.conv2(branch)), "product"),
            Operator(lambda hidden, branch: (hidden, self.bn2(branch)), "norm"),
            Operator(lambda hidden, branch: (hidden, F.relu(branch)), "other"),
            Operator(lambda hidden, branch: (hidden, self.conv3(branch)), "product"),
            Operator(lambda hidden, branch: (hidden, self.bn3(branch)), "other"),
            Operator(lambda hidden, branch: (self.downsample(hidden), branch), "product"),
            Operator(add, "other"),
        )


class WideResNet101(nn.Module):
    """The network wide_resnet101_2, for images of any size of at least 32 x 32 pixels.

    Args:
        classes: Number of classes.
        seed: Seed of the initial values, which are drawn from torchvision's distributions.
        width: A factor of all hidden channels, 1 for the published network.
        dtype: The dtype of the parameters; those of batch normalizations are fp32.
        device: The device of the parameters.
        recompute: The activations to recompute in backward. What precedes the first block belongs
            to it, and what follows the last block is a block of its own.
        norm_group: Images that a batch normalization takes together in training; None for all.
    """

    def __init__(
        self,
        *,
        classes: int,
        seed: int,
        width: float = 1.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        recompute: RecomputeConfig | None = None,
        norm_group: int | None = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        placed: dict[str, Any] = {"dtype": dtype, "device": device}
        norm: dict[str, Any] = {"device": device, "group_size": norm_group}
        planes_of_stages = scaled(RESNET_PLANES, width)
        channels = planes_of_stages[0]
        self.conv1 = convolution(3, channels, 7, stride=2, **placed)
        self.bn1 = BatchNorm2d(channels, **norm)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self._stages = [f"layer{number}" for number in range(1, len(RESNET101_BLOCKS) + 1)]
        for name, count, planes in zip(
            self._stages, RESNET101_BLOCKS, planes_of_stages, strict=True
        ):
            made = []
            for block in range(count):
                stride = 2 if name != "layer1" and not block else 1
                options: dict[str, Any] = {"stride": stride, "projects": not block, "norm": norm}
                made.append(Bottleneck(channels, planes, **options, **placed))
                channels = RESNET_EXPANSION * planes
            self.add_module(name, nn.Sequential(*made))
        self.fc = linear(channels, classes, **placed)
        fill(self, seed=seed, convolutions="fan-out normal", linears="fan-in uniform")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores [b, classes] of images [b, 3, h, w] of the parameters' dtype."""
        if runs_by_operators(self.recompute):
            (scores,) = run_blocks(self.blocks(), images, recompute=self.recompute)
            return scores
        hidden = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        for name in self._stages:
            hidden = self.get_submodule(name)(hidden)
        return self.fc(hidden.mean(dim=(2, 3)))

    def blocks(self) -> list[Block]:
        """Return `forward` as operators, by residual block."""
        first, *others = [
            module.operators() for module in self.modules() if isinstance(module, Bottleneck)
        ]
        stem = (
            Operator(lambda images: (self.conv1(images),), "product"),
            Operator(lambda hidden: (self.bn1(hidden),), "norm"),
            Operator(lambda hidden: (F.relu(hidden),), "other"),
            Operator(lambda hidden: (self.maxpool(hidden),), "other"),
        )
        head = (
            Operator(lambda hidden: (hidden.mean(dim=(2, 3)),), "other"),
            Operator(lambda pooled: (self.fc(pooled),), "product"),
        )
        return [(*stem, *first), *others, head]
