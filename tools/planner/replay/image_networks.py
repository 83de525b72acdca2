"""The image networks of the SAMO paper (Table I) as numbers: layers, parameters, stored entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.model.image_shapes import (
    Layer,
    parameter_shapes,
    training_flops,
    vgg19_layers,
    wide_resnet101_layers,
)
from samo.schedule import stored_count

CLASSES = 1000
IMAGE = 224
"""Pixels of a side of an ImageNet image."""
_LAYERS: dict[str, tuple[str, Callable[..., list[Layer]]]] = {
    "vgg19": ("VGG-19", vgg19_layers),
    "wide_resnet101": ("WideResnet-101", wide_resnet101_layers),
}
NAMES = tuple(_LAYERS)
SLOWER = 1.5
"""Ratio of the computing times of WideResnet-101 and VGG-19, by the paper (section VI-B)."""


@dataclass(frozen=True, kw_only=True)
class ImageNetwork:
    """A network by its layers in the order of the forward pass; `title` is the paper's name."""

    name: str
    title: str
    layers: Sequence[Layer]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by its logical name."""
        return dict(parameter_shapes(self.layers))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def training_flops(self) -> int:
        """Operations of one image, forward and backward."""
        return training_flops(self.layers)

    def stored(self, sparsity: Fraction) -> int:
        """Return the number of stored entries at `sparsity`, which spares biases and norms."""
        return sum(
            stored_count(math.prod(shape), sparsity) if len(shape) > 1 else math.prod(shape)
            for shape in self.shapes.values()
        )


def network(name: str, image: int = IMAGE, *, width: float = 1.0) -> ImageNetwork:
    """Return a network of `NAMES` for images of `image` x `image` pixels and 1,000 classes.

    `width` is a factor of the hidden channels, 1 for the paper's network.
    """
    title, layers = _LAYERS[name]
    made = layers(classes=CLASSES, width=width, height=image, image_width=image)
    return ImageNetwork(name=name, title=title, layers=made)
