"""The image networks of the SAMO paper on random images, the same batch at every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from megatron.data_parallel.bucket import ParamInfo
from megatron.model.resnet import WideResNet101
from megatron.model.vgg import VGG19
from megatron.tensor_parallel.rng import DropoutStreams
from tools.bench.common.emulated import infos_of
from tools.planner.replay.image_networks import CLASSES


@dataclass(frozen=True, kw_only=True)
class ImageTraining:
    """A network of `image_networks.NAMES` and the batch of one rank.

    A step takes `images` images of `side` x `side` pixels. `width` is a factor of the hidden
    channels. Dropout is off, since only the time of a step is measured.
    """

    name: str
    images: int
    side: int = 64
    width: float = 1.0

    def model(self, dtype: str, *, seed: int) -> ImageModel:
        """Return the network in a dtype of torch's name; the seed draws the images."""
        placed = {"dtype": getattr(torch, dtype), "device": "cpu"}
        made: torch.nn.Module
        if self.name == "vgg19":
            streams = DropoutStreams(1, device=torch.device("cpu"))
            made = VGG19(
                classes=CLASSES, dropout=0.0, streams=streams, seed=1, width=self.width, **placed
            )
        else:
            made = WideResNet101(classes=CLASSES, seed=1, width=self.width, **placed)
        generator = torch.Generator().manual_seed(seed)
        shape = (self.images, 3, self.side, self.side)
        images = torch.randn(*shape, generator=generator).to(placed["dtype"])
        labels = torch.randint(CLASSES, (self.images,), generator=generator)
        return ImageModel(made, images, labels)


class ImageModel(torch.nn.Module):
    """A network with one batch of images; its output is the mean cross-entropy."""

    def __init__(self, made: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__()
        self.network = made
        self._batch = images, labels

    def forward(self) -> torch.Tensor:
        """Return the mean cross-entropy of the fixed batch, an fp32 scalar."""
        images, labels = self._batch
        return cross_entropy(self.network(images).float(), labels)

    def infos(self) -> list[ParamInfo]:
        return infos_of(self.network.named_parameters())


SMOKE_WIDTH = 1 / 16


def smoke(training: ImageTraining) -> ImageTraining:
    """Return the same network, tiny."""
    return ImageTraining(name=training.name, images=2, side=32, width=SMOKE_WIDTH)
