"""Layers, parameter shapes and operations of the image classifiers. Imports no torch.

`wide_resnet.py`, `vgg.py` and `resnet.py` compute with these layers; the tests compare them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FORMULA = (
    "2 operations for each multiplication with an addition of convolutions and linear layers, "
    "forward, and twice as many backward, less the gradient of the image; normalizations, "
    "activations and pooling are not counted"
)
"""The terms of `training_flops`, to be printed with every number computed from it."""

VGG19_CHANNELS = (64, 64, 0, 128, 128, 0, *4 * (256,), 0, *4 * (512,), 0, *4 * (512,), 0)
"""Output channels of the convolutions of configuration E (Simonyan and Zisserman 2015, table 1).

A 0 is a maximum pooling, which halves both sides.
"""
VGG_POOLED = 7
"""Side of the images that VGG's first linear layer gets, whatever the input is."""
VGG_HIDDEN = 4096
RESNET101_BLOCKS = (3, 4, 23, 3)
RESNET_PLANES = (64, 128, 256, 512)
RESNET_EXPANSION = 4
"""Output channels of a bottleneck block for each of its planes."""
WIDE_RESNET_STEM = 16
"""Channels of the first convolution of a wide residual network."""
WIDE_RESNET_GROUPS = (16, 32, 64)
"""Output channels of the three groups of a wide residual network of width 1."""
SMALLEST_IMAGE = 32
"""Side in pixels of the smallest image that every network takes."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer with parameters.

    `positions` is the number of pixels of the layer's output, for which each weight is used once.
    """

    name: str
    kind: Literal["convolution", "norm", "linear"]
    inputs: int
    outputs: int
    kernel: int = 1
    bias: bool = False
    positions: int = 1

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by logical name."""
        vector = (self.outputs,)
        if self.kind == "norm":
            return {f"{self.name}.weight": vector, f"{self.name}.bias": vector}
        kernel = (self.kernel, self.kernel) if self.kind == "convolution" else ()
        weight = {f"{self.name}.weight": (self.outputs, self.inputs, *kernel)}
        return weight | ({f"{self.name}.bias": vector} if self.bias else {})

    @property
    def forward_flops(self) -> int:
        """Operations of one image, two for each multiplication with its addition."""
        if self.kind == "norm":
            return 0
        return 2 * self.inputs * self.outputs * self.kernel**2 * self.positions


def wide_resnet_layers(
    *, depth: int, width: float, classes: int, height: int = 32, image_width: int = 32
) -> list[Layer]:
    """Return the layers of a pre-activation wide residual network with identity shortcuts.

    Args:
        depth: 6 n + 4 layers for n blocks in each of three groups (Zagoruyko and Komodakis 2016).
        width: The factor of the groups' channels 16, 32 and 64, which are rounded.
        classes: Number of classes.
        height: Height of the images in pixels.
        image_width: Width of the images in pixels.

    Raises:
        ValueError: The depth is not 6 n + 4.
    """
    blocks = blocks_of_group(depth)
    size = (height, image_width)
    channels = WIDE_RESNET_STEM
    layers = [_convolution("conv0", 3, channels, 3, size)]
    for group, outputs in enumerate(scaled(WIDE_RESNET_GROUPS, width)):
        for block in range(blocks):
            name = f"groups.{group}.{block}"
            if group and not block:
                size = _halved(size)
            layers += [
                _norm(f"{name}.bn1", channels),
                _convolution(f"{name}.conv1", channels, outputs, 3, size),
                _norm(f"{name}.bn2", outputs),
                _convolution(f"{name}.conv2", outputs, outputs, 3, size),
            ]
            channels = outputs
    return [*layers, _norm("bn", channels), _linear("fc", channels, classes)]


def blocks_of_group(depth: int) -> int:
    """Return n of a wide residual network of 6 n + 4 layers.

    Raises `ValueError` for a depth that is not 6 n + 4 with n of at least 1.
    """
    if depth < 10 or depth % 6 != 4:
        raise ValueError(f"depth {depth} is not 6 n + 4")
    return depth // 6


def scaled(channels: Sequence[int], width: float) -> tuple[int, ...]:
    """Return each number of channels times `width`, rounded to a whole number."""
    return tuple(round(count * width) for count in channels)


def vgg19_layers(
    *, classes: int, width: float = 1.0, height: int = 224, image_width: int = 224
) -> list[Layer]:
    """Return the layers of VGG-19 without batch normalization, with torchvision's names.

    `width` is a factor of all hidden channels, 1 for the published network.
    """
    size, channels, index = (height, image_width), 3, 0
    layers: list[Layer] = []
    for outputs in scaled(VGG19_CHANNELS, width):
        if outputs:
            layers.append(_convolution(f"features.{index}", channels, outputs, 3, size, bias=True))
            channels, index = outputs, index + 2  # a ReLU follows
        else:
            size, index = (size[0] // 2, size[1] // 2), index + 1
    pooled, (hidden,) = channels * VGG_POOLED**2, scaled([VGG_HIDDEN], width)
    return [
        *layers,
        _linear("classifier.0", pooled, hidden),
        _linear("classifier.3", hidden, hidden),
        _linear("classifier.6", hidden, classes),
    ]


def wide_resnet101_layers(
    *, classes: int, width: float = 1.0, height: int = 224, image_width: int = 224
) -> list[Layer]:
    """Return the layers of torchvision's wide_resnet101_2, with its names.

    `width` is a factor of all hidden channels, 1 for the published network.
    """
    size = _halved((height, image_width))
    planes_of_stages = scaled(RESNET_PLANES, width)
    channels = planes_of_stages[0]
    layers = [_convolution("conv1", 3, channels, 7, size), _norm("bn1", channels)]
    size = _halved(size)  # the maximum pooling
    stages = zip(RESNET101_BLOCKS, planes_of_stages, strict=True)
    for stage, (blocks, planes) in enumerate(stages, 1):
        inner, outputs = 2 * planes, RESNET_EXPANSION * planes
        for block in range(blocks):
            name, before = f"layer{stage}.{block}", size
            if stage > 1 and not block:
                size = _halved(size)
            layers += [
                _convolution(f"{name}.conv1", channels, inner, 1, before),
                _norm(f"{name}.bn1", inner),
                _convolution(f"{name}.conv2", inner, inner, 3, size),
                _norm(f"{name}.bn2", inner),
                _convolution(f"{name}.conv3", inner, outputs, 1, size),
                _norm(f"{name}.bn3", outputs),
            ]
            if not block:
                layers += [
                    _convolution(f"{name}.downsample.0", channels, outputs, 1, size),
                    _norm(f"{name}.downsample.1", outputs),
                ]
            channels = outputs
    return [*layers, _linear("fc", channels, classes)]


def parameter_shapes(layers: Sequence[Layer]) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every parameter by logical name, in forward order."""
    return {name: shape for layer in layers for name, shape in layer.shapes.items()}


def parameter_count(layers: Sequence[Layer]) -> int:
    """Return the number of parameters, running statistics excluded."""
    return sum(math.prod(shape) for shape in parameter_shapes(layers).values())


def training_flops(layers: Sequence[Layer]) -> int:
    """Return floating-point operations of one image, forward and backward, by `FORMULA`."""
    passes = [layer.forward_flops for layer in _products(layers)]
    return 3 * sum(passes) - passes[0]


def _products(layers: Sequence[Layer]) -> Iterator[Layer]:
    return (layer for layer in layers if layer.kind != "norm")


def _halved(size: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width after a stride of 2 with padding: half, rounded up."""
    return -(-size[0] // 2), -(-size[1] // 2)


def _convolution(
    name: str, inputs: int, outputs: int, kernel: int, size: tuple[int, int], *, bias: bool = False
) -> Layer:
    return Layer(
        name=name,
        kind="convolution",
        inputs=inputs,
        outputs=outputs,
        kernel=kernel,
        bias=bias,
        positions=math.prod(size),
    )


def _norm(name: str, channels: int) -> Layer:
    return Layer(name=name, kind="norm", inputs=channels, outputs=channels)


def _linear(name: str, inputs: int, outputs: int) -> Layer:
    return Layer(name=name, kind="linear", inputs=inputs, outputs=outputs, bias=True)
