"""Train an image classifier. The gradient paths are those of `pretrain_gpt.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.pretrain import begin, leave, pretrain
from megatron.tasks.vision import VisionTask
from pretrain_gpt import GRADIENT_PATHS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from megatron.data.images import ImageSplits
    from megatron.tasks.vision_config import VisionConfig
    from megatron.tensor_parallel.rng import DropoutStreams


def model_provider(
    config: VisionConfig, device: torch.device, streams: DropoutStreams
) -> nn.Module:
    """Build the network, which maps images [b, 3, h, w] to scores [b, classes].

    Args:
        config: The checked configuration.
        device: The device of the parameters.
        streams: Streams of random numbers for dropout.
    """
    import torch

    from megatron.model.resnet import WideResNet101
    from megatron.model.vgg import VGG19
    from megatron.model.wide_resnet import WideResNet

    model = config.model
    dtype = getattr(torch, config.precision.param_dtype)
    options = {
        "classes": model.num_classes,
        "width": model.width,
        "seed": config.training.seed,
        "dtype": dtype,
        "device": device,
        "recompute": config.recompute,
    }
    if model.vision_backbone_type == "vgg19":
        return VGG19(dropout=model.hidden_dropout, streams=streams, **options)
    options["norm_group"] = model.simulated_micro_batch_size
    if model.vision_backbone_type == "wide-resnet101":
        return WideResNet101(**options)
    return WideResNet(depth=model.depth, **options)


def train_valid_test_datasets_provider(config: VisionConfig) -> ImageSplits:
    """Open the images of training, validation and test.

    Raises:
        ConfigError: No images are named.
        DataError: Files are missing or damaged.
    """
    from megatron.data.images import mock_splits, open_images
    from megatron.errors import ConfigError

    model, data = config.model, config.data
    if data.mock_data:
        return mock_splits(
            seed=config.training.seed,
            classes=model.num_classes,
            height=model.img_h,
            width=model.img_w,
            count=data.mock_images,
            held_out=data.held_out_images,
        )
    if data.data_path is None:
        raise ConfigError("data_path: not given; name a folder of images, or use --mock-data")
    return open_images(data.data_path, classes=model.num_classes, held_out=data.held_out_images)


VISION_TASK = VisionTask(model_provider, train_valid_test_datasets_provider)


def main(argv: Sequence[str]) -> int:
    """Train as `argv` asks and return the exit code."""
    return pretrain(VISION_TASK, GRADIENT_PATHS, argv)


if __name__ == "__main__":
    leave(main(begin()))
