"""Wide residual networks for small images, with identity shortcuts.

Zagoruyko and Komodakis 2016, in the form of Mostafa and Wang 2019 and of Sohoni et al. 2019: every
shortcut is an identity, which skips pixels and adds channels of zeros where the shape changes (with
a width below 1, the first group drops channels of the stem instead). WRN-28-2 has 1,456,858
parameters with 10 classes.

    image -> conv0 -> [block ... block] x 3 groups -> bn -> ReLU -> mean over pixels -> fc
    block:   bn1 -> ReLU -> conv1 -> bn2 -> ReLU -> conv2 -> + shortcut
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
from megatron.model.image_shapes import (
    WIDE_RESNET_GROUPS,
    WIDE_RESNET_STEM,
    blocks_of_group,
    scaled,
)

if TYPE_CHECKING:
    from megatron.config import RecomputeConfig


class PreActivationBlock(nn.Module):
    """Two normalized convolutions beside an identity shortcut."""

    def __init__(
        self, inputs: int, outputs: int, *, stride: int, norm: dict[str, Any], **placed: Any
    ) -> None:
        super().__init__()
        self.bn1 = BatchNorm2d(inputs, **norm)
        self.conv1 = convolution(inputs, outputs, 3, stride=stride, **placed)
        self.bn2 = BatchNorm2d(outputs, **norm)
        self.conv2 = convolution(outputs, outputs, 3, **placed)
        self.stride = stride
        self.added_channels = outputs - inputs

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [b, inputs, h, w] to [b, outputs, ceil(h / stride), ceil(w / stride)]."""
        (hidden,) = run_blocks([self.operators()], hidden, recompute=None)
        return hidden

    def operators(self) -> Block:
        """Return `forward` as operators on the input of the block and its branch."""
        return (
            Operator(lambda hidden: (hidden, self.bn1(hidden)), "norm"),
            Operator(lambda hidden, branch: (hidden, F.relu(branch)), "other"),
            Operator(lambda hidden, branch: (hidden, self.conv1(branch)), "product"),
            Operator(lambda hidden, branch: (hidden, self.bn2(branch)), "norm"),
            Operator(lambda hidden, branch: (hidden, F.relu(branch)), "other"),
            Operator(lambda hidden, branch: (self._add(self.conv2(branch), hidden),), "product"),
        )

    def _add(self, branch: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self.stride > 1:
            hidden = hidden[:, :, :: self.stride, :: self.stride]
        if self.added_channels:  # a negative number drops the last channels
            hidden = F.pad(hidden, (0, 0, 0, 0, 0, self.added_channels))
        return branch + hidden


class WideResNet(nn.Module):
    """A wide residual network of `depth` = 6 n + 4 layers.

    Args:
        depth: Number of layers; n blocks in each of three groups.
        width: The factor of the groups' channels 16, 32 and 64; products are rounded.
        classes: Number of classes.
        seed: Seed of the initial values: U(-1/sqrt(fan_in), 1/sqrt(fan_in)), as in Mostafa and
            Wang's program.
        dtype: The dtype of the parameters; those of batch normalizations are fp32.
        device: The device of the parameters.
        recompute: The activations to recompute in backward. The first convolution belongs to the
            first block, and what follows the last block is a block of its own.
        norm_group: Images that a batch normalization takes together in training; None for all.
    """

    def __init__(
        self,
        *,
        depth: int,
        width: float,
        classes: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        recompute: RecomputeConfig | None = None,
        norm_group: int | None = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        placed: dict[str, Any] = {"dtype": dtype, "device": device}
        norm: dict[str, Any] = {"device": device, "group_size": norm_group}
        channels, blocks = WIDE_RESNET_STEM, blocks_of_group(depth)
        self.conv0 = convolution(3, channels, 3, **placed)
        groups = []
        for group, outputs in enumerate(scaled(WIDE_RESNET_GROUPS, width)):
            made = []
            for block in range(blocks):
                stride = 2 if group and not block else 1
                made.append(
                    PreActivationBlock(channels, outputs, stride=stride, norm=norm, **placed)
                )
                channels = outputs
            groups.append(nn.Sequential(*made))
        self.groups = nn.Sequential(*groups)
        self.bn = BatchNorm2d(channels, **norm)
        self.fc = linear(channels, classes, **placed)
        fill(self, seed=seed, convolutions="fan-in uniform", linears="fan-in uniform")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores [b, classes] of images [b, 3, h, w] of the parameters' dtype."""
        if runs_by_operators(self.recompute):
            (scores,) = run_blocks(self.blocks(), images, recompute=self.recompute)
            return scores
        hidden = self.groups(self.conv0(images))
        return self.fc(F.relu(self.bn(hidden)).mean(dim=(2, 3)))

    def blocks(self) -> list[Block]:
        """Return `forward` as operators, by residual block."""
        first, *others = [
            module.operators()
            for module in self.modules()
            if isinstance(module, PreActivationBlock)
        ]
        stem = Operator(lambda images: (self.conv0(images),), "product")
        head = (
            Operator(lambda hidden: (self.bn(hidden),), "norm"),
            Operator(lambda hidden: (F.relu(hidden),), "other"),
            Operator(lambda hidden: (hidden.mean(dim=(2, 3)),), "other"),
            Operator(lambda pooled: (self.fc(pooled),), "product"),
        )
        return [(stem, *first), *others, head]
