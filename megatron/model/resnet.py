"""Bottleneck residual networks with torchvision's names: wide_resnet101_2.

The network is that of He et al. 2016 with 3 x 3 convolutions twice as wide (Zagoruyko and Komodakis
2016). The stride of a block is in its 3 x 3 convolution, as in torchvision. The network has
126,886,696 parameters with 1,000 classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.batch_norm import BatchNorm2d
from megatron.model.convolution import convolution, fill, linear
from megatron.model.image_shapes import RESNET101_BLOCKS, RESNET_EXPANSION, RESNET_PLANES, scaled


class Bottleneck(nn.Module):
    """Three normalized convolutions beside a shortcut, with a ReLU behind the sum."""

    def __init__(
        self, inputs: int, planes: int, *, stride: int, projects: bool, **placed: Any
    ) -> None:
        super().__init__()
        inner, outputs = 2 * planes, RESNET_EXPANSION * planes
        self.conv1 = convolution(inputs, inner, 1, **placed)
        self.bn1 = BatchNorm2d(inner, device=placed["device"])
        self.conv2 = convolution(inner, inner, 3, stride=stride, **placed)
        self.bn2 = BatchNorm2d(inner, device=placed["device"])
        self.conv3 = convolution(inner, outputs, 1, **placed)
        self.bn3 = BatchNorm2d(outputs, device=placed["device"])
        self.downsample: nn.Module = nn.Identity()
        if projects:
            self.downsample = nn.Sequential(
                convolution(inputs, outputs, 1, stride=stride, **placed),
                BatchNorm2d(outputs, device=placed["device"]),
            )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [b, inputs, h, w] to [b, 4 planes, ceil(h / stride), ceil(w / stride)]."""
        branch = F.relu(self.bn1(self.conv1(hidden)))
        branch = F.relu(self.bn2(self.conv2(branch)))
        return F.relu(self.bn3(self.conv3(branch)) + self.downsample(hidden))


class WideResNet101(nn.Module):
    """The network wide_resnet101_2, for images of any size of at least 32 x 32 pixels.

    Args:
        classes: Number of classes.
        seed: Seed of the initial values, which are drawn from torchvision's distributions.
        width: A factor of all hidden channels, 1 for the published network.
        dtype: The dtype of the parameters; those of batch normalizations are fp32.
        device: The device of the parameters.
    """

    def __init__(
        self,
        *,
        classes: int,
        seed: int,
        width: float = 1.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        placed: dict[str, Any] = {"dtype": dtype, "device": device}
        planes_of_stages = scaled(RESNET_PLANES, width)
        channels = planes_of_stages[0]
        self.conv1 = convolution(3, channels, 7, stride=2, **placed)
        self.bn1 = BatchNorm2d(channels, device=placed["device"])
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self._stages = [f"layer{number}" for number in range(1, len(RESNET101_BLOCKS) + 1)]
        for name, count, planes in zip(
            self._stages, RESNET101_BLOCKS, planes_of_stages, strict=True
        ):
            made = []
            for block in range(count):
                stride = 2 if name != "layer1" and not block else 1
                options = {"stride": stride, "projects": not block}
                made.append(Bottleneck(channels, planes, **options, **placed))
                channels = RESNET_EXPANSION * planes
            self.add_module(name, nn.Sequential(*made))
        self.fc = linear(channels, classes, **placed)
        fill(self, seed=seed, convolutions="fan-out normal", linears="fan-in uniform")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores [b, classes] of images [b, 3, h, w] of the parameters' dtype."""
        hidden = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        for name in self._stages:
            hidden = self.get_submodule(name)(hidden)
        return self.fc(hidden.mean(dim=(2, 3)))
