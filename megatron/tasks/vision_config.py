"""The configuration of an image classifier: its sections `model` and `data`, and their rules.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megatron.config import Config
from megatron.config.fields import above, at_least, below_one, between, option, section
from megatron.config.rules import (
    Alternatives,
    Complaint,
    RefusedPair,
    nearest_multiples,
    refused_pair,
)
from megatron.model.image_shapes import (
    SMALLEST_IMAGE,
    Layer,
    vgg19_layers,
    wide_resnet101_layers,
    wide_resnet_layers,
)

WIDE_RESNET_DEPTH, WIDE_RESNET_WIDTH = 28, 2.0
"""WRN-28-2, the network of Sohoni et al. 2019."""
LARGEST_IMAGE = 4096
CIFAR10_MEAN, CIFAR10_STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
"""Grey levels of the training images by channel, as Mostafa and Wang's program has them."""


@section
class VisionModelConfig:
    """Kind and shape of the network, and the size of its images."""

    vision_backbone_type: Literal["wide-resnet", "vgg19", "wide-resnet101"] = option(
        default="wide-resnet",
        help="Network: wide-resnet (pre-activation, identity shortcuts, for small images), vgg19, "
        "or wide-resnet101 (torchvision's wide_resnet101_2).",
    )
    num_layers: int | None = option(
        default=None,
        help=f"Layers of a wide-resnet, 6 n + 4 (none = {WIDE_RESNET_DEPTH}).",
        within=between(10, 10_000),
    )
    width_factor: float | None = option(
        default=None,
        help="Factor of the hidden channels; the first layer of a wide-resnet keeps its 16 (ours; "
        f"none = {WIDE_RESNET_WIDTH:g} for wide-resnet, 1 for others).",
        within=between(1 / 16, 64),
    )
    num_classes: int = option(
        default=1000, help="Classes of the images.", within=between(1, 1_000_000)
    )
    img_h: int = option(
        default=224,
        help="Height of the images, in pixels.",
        within=between(SMALLEST_IMAGE, LARGEST_IMAGE),
    )
    img_w: int = option(
        default=224,
        help="Width of the images, in pixels.",
        within=between(SMALLEST_IMAGE, LARGEST_IMAGE),
    )
    hidden_dropout: float = option(
        default=0.5,
        help="Probability of dropping a hidden unit of vgg19's classifier (0 = off).",
        within=below_one(),
    )

    simulated_micro_batch_size: int | None = option(
        default=None,
        help="Images that a batch normalization takes together in training, as if they were a "
        "microbatch of their own (ours; none = micro_batch_size).",
        within=at_least(1),
    )

    @property
    def depth(self) -> int:
        """Layers of a wide-resnet."""
        return self.num_layers or WIDE_RESNET_DEPTH

    @property
    def width(self) -> float:
        """Factor of the channels, with the default of the network filled in."""
        if self.width_factor is not None:
            return self.width_factor
        return WIDE_RESNET_WIDTH if self.vision_backbone_type == "wide-resnet" else 1.0

    @property
    def title(self) -> str:
        """The name of the network, with its size where that is not the published one."""
        if self.vision_backbone_type == "wide-resnet":
            return f"WRN-{self.depth}-{self.width:g}"
        name = {"vgg19": "VGG-19", "wide-resnet101": "WideResnet-101"}[self.vision_backbone_type]
        return name if self.width == 1 else f"{name} of width {self.width:g}"

    def layers(self) -> Sequence[Layer]:
        """Return the layers with parameters, in forward order."""
        size = {"classes": self.num_classes, "height": self.img_h, "image_width": self.img_w}
        if self.vision_backbone_type == "vgg19":
            return vgg19_layers(width=self.width, **size)
        if self.vision_backbone_type == "wide-resnet101":
            return wide_resnet101_layers(width=self.width, **size)
        return wide_resnet_layers(depth=self.depth, width=self.width, **size)


@section
class VisionDataConfig:
    """The images, their augmentation and normalization."""

    data_path: str | None = option(
        default=None,
        help="Folder of the images: CIFAR-10's binary files, its JPEG archives train.npz and "
        "test.npz, or train/ and val/ with one folder for each class (none = off).",
    )
    mock_data: bool = option(default=False, help="Train on generated images; no file is read.")
    mock_images: int = option(
        default=10_000,
        help="Generated training images, beside a fifth as many for the test (ours).",
        within=between(1, 1_000_000_000),
    )
    held_out_images: int = option(
        default=0,
        help="Training images to validate on instead of training on them, the same ones for every "
        "seed (ours; 0 = validate on val/ or on the test images).",
        within=at_least(0),
    )
    augmentation: Literal["flip-crop", "none"] = option(
        default="flip-crop",
        help="Change of training images (ours). flip-crop: flip every second one, and crop at a "
        "random place of the image, reflected by 4 pixels or resized to 8/7.",
    )
    image_mean: tuple[float, float, float] = option(
        default=CIFAR10_MEAN,
        help="Mean of red, green and blue, in grey levels, which is subtracted (ours; CIFAR-10's).",
        within=between(0, 255),
    )
    image_std: tuple[float, float, float] = option(
        default=CIFAR10_STD,
        help="Standard deviation of red, green and blue, in grey levels, by which the rest is "
        "divided (ours; CIFAR-10's).",
        within=above(0),
    )


VISION_PAIRS: tuple[RefusedPair, ...] = (
    refused_pair(
        "num_layers with a vision_backbone_type other than wide-resnet",
        lambda c: c.model.num_layers is not None and c.model.vision_backbone_type != "wide-resnet",
        "the depth of that network is fixed",
        "leave --num-layers out",
    ),
    refused_pair(
        "simulated_micro_batch_size with vision_backbone_type vgg19",
        lambda c: (
            c.model.simulated_micro_batch_size is not None
            and c.model.vision_backbone_type == "vgg19"
        ),
        "that network has no batch normalization",
        "leave --simulated-micro-batch-size out",
    ),
    refused_pair(
        "recompute_granularity full or selective",
        lambda c: c.recompute.recompute_granularity in ("full", "selective"),
        "an image classifier has no transformer layers",
        "give --recompute-granularity residual",
    ),
    refused_pair(
        "recompute_granularity other than every with vision_backbone_type vgg19",
        lambda c: (
            c.recompute.recompute_granularity not in (None, "every", "full", "selective")
            and c.model.vision_backbone_type == "vgg19"
        ),
        "that network has neither norms nor residual blocks, and its ReLUs hold what the next "
        "convolution needs",
        "give --recompute-granularity every",
    ),
    refused_pair(
        "full_validation with eval_iters 0",
        lambda c: c.evaluation.full_validation and c.evaluation.eval_iters == 0,
        "nothing is evaluated",
        "drop one of them",
    ),
)

VISION_ALTERNATIVES: tuple[Alternatives, ...] = ((("data_path",), ("mock_data",)),)


def _depth_is_whole_blocks(c: VisionConfig) -> Complaint:
    depth = c.model.depth
    if c.model.vision_backbone_type != "wide-resnet" or depth % 6 == 4:
        return None
    below = depth - (depth - 4) % 6
    return f"num_layers {depth} is not 6 n + 4; nearest: {below}, {below + 6}"


def _batch_norm_has_a_variance(c: VisionConfig) -> Complaint:
    size = c.model.simulated_micro_batch_size or c.training.micro_batch_size
    if size > 1 or c.training.skip_train:
        return None
    norms = (layer for layer in c.model.layers() if layer.kind == "norm")
    single = [norm.name for norm in norms if norm.positions == 1]
    if not single:
        return None
    field = "simulated_micro_batch_size"
    if c.model.simulated_micro_batch_size is None:
        field = "micro_batch_size"
    return (
        f"{field} 1 with vision_backbone_type {c.model.vision_backbone_type}, img_h "
        f"{c.model.img_h} and img_w {c.model.img_w}: batch normalization {single[0]} has one value "
        f"of each channel, and needs two; give --{field.replace('_', '-')} 2 or larger images"
    )


def _simulated_microbatches_are_whole(c: VisionConfig) -> Complaint:
    size, group = c.training.micro_batch_size, c.model.simulated_micro_batch_size
    if group is None or size % group == 0:
        return None
    return (
        f"simulated_micro_batch_size {group} does not divide micro_batch_size {size}; nearest "
        f"micro_batch_size: {nearest_multiples(size, group)}"
    )


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Config):
    """Every setting of a run that trains an image classifier."""

    model: VisionModelConfig
    data: VisionDataConfig = field(default_factory=VisionDataConfig)
    name: str = field(default="vision", compare=False)

    task: ClassVar[str] = "vision"
    example: ClassVar[str] = "configs/wrn28_2_cifar10.yaml"
    refused_pairs: ClassVar[tuple[RefusedPair, ...]] = VISION_PAIRS
    alternatives: ClassVar[tuple[Alternatives, ...]] = VISION_ALTERNATIVES
    recomputes: ClassVar[bool] = True
    rules: ClassVar = (
        _depth_is_whole_blocks,
        _simulated_microbatches_are_whole,
        _batch_norm_has_a_variance,
    )

    def own_notices(self) -> Iterator[str]:
        """Yield lines about settings that are not read."""
        if self.data.mock_data and self.data.data_path is not None:
            yield "mock_data is on: data_path is not read"

    def resolved(self) -> VisionConfig:
        """Return the configuration with the depth and the width filled in."""
        wide = self.model.vision_backbone_type == "wide-resnet"
        model = dataclasses.replace(
            self.model,
            num_layers=self.model.depth if wide else None,
            width_factor=self.model.width,
        )
        return dataclasses.replace(self, model=model)

    def data_paths(self) -> list[str]:
        """Return a path in the folder of the images, since no run may write into that folder."""
        return [] if self.data.data_path is None else [f"{self.data.data_path}/train"]
