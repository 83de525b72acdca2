"""The image classifiers once more, as functions of named tensors in plain torch.

The functions follow the papers' descriptions and torchvision's names and share no code with
`megatron.model`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

Tensors = Mapping[str, torch.Tensor]


def normalised(hidden: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    """Batch norm of one batch, by the formula: biased variance, epsilon 1e-5."""
    mean = hidden.mean(dim=(0, 2, 3), keepdim=True)
    variance = hidden.var(dim=(0, 2, 3), keepdim=True, unbiased=False)
    weight = tensors[f"{name}.weight"].view(1, -1, 1, 1)
    bias = tensors[f"{name}.bias"].view(1, -1, 1, 1)
    return (hidden - mean) / torch.sqrt(variance + 1e-5) * weight + bias


def wide_resnet(tensors: Tensors, images: torch.Tensor, *, depth: int) -> torch.Tensor:
    hidden = F.conv2d(images, tensors["conv0.weight"], padding=1)
    for group in range(3):
        for block in range((depth - 4) // 6):
            name = f"groups.{group}.{block}"
            stride = 2 if group > 0 and block == 0 else 1
            out = torch.relu(normalised(hidden, tensors, f"{name}.bn1"))
            out = F.conv2d(out, tensors[f"{name}.conv1.weight"], stride=stride, padding=1)
            out = torch.relu(normalised(out, tensors, f"{name}.bn2"))
            out = F.conv2d(out, tensors[f"{name}.conv2.weight"], padding=1)
            shortcut = torch.zeros_like(out)
            kept = min(hidden.shape[1], out.shape[1])
            shortcut[:, :kept] = hidden[:, :kept, ::stride, ::stride]
            hidden = out + shortcut
    hidden = torch.relu(normalised(hidden, tensors, "bn"))
    return F.linear(hidden.mean((2, 3)), tensors["fc.weight"], tensors["fc.bias"])


def vgg19(tensors: Tensors, images: torch.Tensor) -> torch.Tensor:
    """VGG-19 without dropout."""
    hidden, index = images, 0
    for stage in (2, 2, 4, 4, 4):
        for _ in range(stage):
            name = f"features.{index}"
            weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
            hidden = torch.relu(F.conv2d(hidden, weight, bias, padding=1))
            index += 2
        hidden = F.max_pool2d(hidden, kernel_size=2, stride=2)
        index += 1
    hidden = F.adaptive_avg_pool2d(hidden, (7, 7)).reshape(images.shape[0], -1)
    for number in (0, 3, 6):
        name = f"classifier.{number}"
        hidden = F.linear(hidden, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        if number < 6:
            hidden = torch.relu(hidden)
    return hidden


def wide_resnet101(tensors: Tensors, images: torch.Tensor) -> torch.Tensor:
    def convolved(hidden: torch.Tensor, name: str, bn: str, stride: int = 1) -> torch.Tensor:
        weight = tensors[f"{name}.weight"]
        out = F.conv2d(hidden, weight, stride=stride, padding=weight.shape[-1] // 2)
        return normalised(out, tensors, bn)

    hidden = torch.relu(convolved(images, "conv1", "bn1", 2))
    hidden = F.max_pool2d(hidden, kernel_size=3, stride=2, padding=1)
    for stage, blocks in enumerate((3, 4, 23, 3), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            out = torch.relu(convolved(hidden, f"{name}.conv1", f"{name}.bn1"))
            out = torch.relu(convolved(out, f"{name}.conv2", f"{name}.bn2", stride))
            out = convolved(out, f"{name}.conv3", f"{name}.bn3")
            if block == 0:
                hidden = convolved(hidden, f"{name}.downsample.0", f"{name}.downsample.1", stride)
            hidden = torch.relu(out + hidden)
    return F.linear(hidden.mean((2, 3)), tensors["fc.weight"], tensors["fc.bias"])
