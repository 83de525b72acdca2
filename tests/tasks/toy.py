"""A task for tests: a small convolutional net with batch norm on generated images.

Two classes of samples make it awkward on purpose: some do not count, so that ranks count
differently, and one may be poisoned, so that its step is skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from megatron.checkpoint.compatibility import identity
from megatron.checkpoint.find import CheckpointSource, locate_checkpoint
from megatron.config import Config, at_least, option, refused_pair, section
from megatron.data.batches import Readers, fingerprint_of
from megatron.data.sampler import MicrobatchSampler
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.buffers import BufferInfo
from megatron.data_parallel.gradient_path import GradientPath
from megatron.metrics import Measures, Workload
from megatron.model.batch_norm import BatchNorm2d, batch_norm_buffers
from megatron.model.init import initial_values, set_parameter
from megatron.parallel.groups import ProcessGroups

CLASSES, SIZE = 4, 8


@section
class ToyModelConfig:
    """Shape of the net."""

    width: int = option(default=8, help="Channels of a convolution.", within=at_least(1))


@section
class ToyDataConfig:
    """Generated images."""

    valid_images: int = option(default=21, help="Images for validation.", within=at_least(1))
    ignored_every: int | None = option(
        default=None,
        help="Each image whose number is a multiple does not count.",
        within=at_least(2),
    )
    poisoned_image: int | None = option(default=None, help="Number of a training image of NaN.")


def _some_image_is_seen(c: ToyConfig) -> str | None:
    if c.data.poisoned_image is None or c.data.poisoned_image < 128:
        return None
    return f"poisoned_image {c.data.poisoned_image} is never seen; must be less than 128"


@dataclass(frozen=True, kw_only=True)
class ToyConfig(Config):
    """Every setting of a toy run."""

    model: ToyModelConfig = field(default_factory=ToyModelConfig)
    data: ToyDataConfig = field(default_factory=ToyDataConfig)
    name: str = field(default="toy", compare=False)

    task: ClassVar[str] = "toy"
    refused_pairs = (
        refused_pair(
            "ignored_every with poisoned_image",
            lambda c: c.data.ignored_every and c.data.poisoned_image is not None,
            "one awkward thing at a time",
            "drop one of them",
        ),
    )
    rules = (_some_image_is_seen,)


@dataclass(frozen=True, kw_only=True)
class ToyBatch:
    """Images [n, 3, h, w] with labels [n], -100 where an image does not count."""

    images: torch.Tensor
    labels: torch.Tensor
    index: int
    counted: int
    uneven: bool


@dataclass(frozen=True, kw_only=True)
class ToyReader:
    """Images of a split, each a function of seed, split and number."""

    samples: int
    endless: bool
    seed: tuple[int, int]
    data: ToyDataConfig
    sampler: MicrobatchSampler

    def image(self, number: int) -> tuple[np.ndarray, int]:
        rng = np.random.default_rng([*self.seed, number])
        label = int(rng.integers(CLASSES))
        # Noise on a bright row.
        image = rng.normal(size=(3, SIZE, SIZE)).astype(np.float32)
        image[:, 2 * label] += 1.5
        if self.endless and number == self.data.poisoned_image:
            image[:] = np.nan
        every = self.data.ignored_every
        return image, -100 if every and number % every == 0 else label

    def read(self, first_sample: int, global_batch_size: int) -> Iterator[ToyBatch]:
        partial = not self.endless and first_sample + global_batch_size > self.samples
        indices = self.sampler.indices(first_sample, global_batch_size)
        for numbers, index in zip(indices, self.sampler.numbers(global_batch_size), strict=True):
            found = [self.image(number) for number in numbers]
            labels = torch.tensor([label for _, label in found])
            if partial:
                labels[torch.tensor([number >= self.samples for number in numbers])] = -100
            yield ToyBatch(
                images=torch.from_numpy(np.stack([image for image, _ in found])),
                labels=labels,
                index=index,
                counted=int((labels >= 0).sum()),
                uneven=partial or self.data.ignored_every is not None,
            )

    def fingerprint(self) -> str:
        return fingerprint_of(self.samples, lambda number: self.image(number)[0].tobytes())


class ToyNet(nn.Module):
    """Two convolutions with batch norm, mean over the image, a linear layer."""

    begins = True

    def __init__(self, config: ToyConfig, device: torch.device) -> None:
        super().__init__()
        width, dtype = config.model.width, getattr(torch, config.precision.param_dtype)
        placed: dict[str, Any] = {"dtype": dtype, "device": device}
        self.device = device
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False, **placed)
        self.bn1 = BatchNorm2d(width, device=device)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False, **placed)
        self.bn2 = BatchNorm2d(width, device=device)
        self.fc = nn.Linear(width * SIZE, CLASSES, **placed)
        for info in self.parameter_infos():
            std = 0.1 if len(info.logical_shape) > 1 else 0.0
            values = initial_values(config.training.seed, info.name, info.logical_shape, std)
            # The weights of norms begin with 1, biases with 0.
            ones = info.name.startswith("bn") and info.name.endswith("weight")
            set_parameter(info, values + float(ones))

    def parameter_infos(self) -> list[ParamInfo]:
        return [
            ParamInfo(
                name=name,
                leaves=(parameter,),
                logical_shape=tuple(parameter.shape),
                weight_decay=parameter.ndim >= 2,
            )
            for name, parameter in self.named_parameters()
        ]

    def buffer_infos(self) -> list[BufferInfo]:
        return batch_norm_buffers(self)

    def run(self, iteration: int, batch: ToyBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        features = F.relu(self.bn1(self.conv1(batch.images.to(self.conv1.weight.dtype))))
        features = F.relu(self.bn2(self.conv2(features)))
        logits = self.fc(features.mean(3).flatten(1)).float()
        loss = F.cross_entropy(logits, batch.labels, ignore_index=-100, reduction="sum")
        return torch.stack([loss, (logits.argmax(1) == batch.labels).sum()])


@dataclass(frozen=True)
class LoadedToy:
    """A toy run."""

    config: ToyConfig
    summary: str = "a toy"
    flops_per_sample: float = 1e6
    workload: Workload = field(default_factory=lambda: Workload(flops_per_sample=1e6))

    def identity(self) -> dict[str, Any]:
        return identity(self.config, free=("data.valid_images", "data.poisoned_image"))

    def data_files(self) -> dict[str, Any]:
        return {}

    def chunks(self, groups: ProcessGroups, device: torch.device) -> Sequence[ToyNet]:
        return [ToyNet(self.config, device)]

    def readers(
        self, groups: ProcessGroups, device: torch.device, *, log: Callable[[str], None]
    ) -> Readers:
        config = self.config
        sampler = MicrobatchSampler(
            config.training.micro_batch_size, groups.dp.rank, groups.dp.size
        )

        def reader(split: int, samples: int) -> ToyReader:
            return ToyReader(
                samples=samples,
                endless=split == 0,
                seed=(config.training.seed, split),
                data=config.data,
                sampler=sampler,
            )

        images = config.data.valid_images
        return Readers(train=reader(0, 100), valid=reader(1, images), test=reader(2, images))

    def message_shape(self, groups: ProcessGroups) -> tuple[int, ...]:
        return (1,)


@dataclass(frozen=True)
class ToyTask:
    """Toy training."""

    config: type[ToyConfig] = ToyConfig
    measures: Measures = Measures(
        unit="images", sums=("loss", "correct"), means=("loss", "accuracy")
    )
    formula: str = ""

    def check_files(
        self, config: ToyConfig, run_dir: Path, *, log: Callable[[str], None]
    ) -> CheckpointSource | None:
        return locate_checkpoint(config, run_dir, log=log, look=True)

    def logical_shapes(
        self, config: ToyConfig, path: GradientPath
    ) -> Mapping[str, tuple[int, ...]] | None:
        return None

    def open(self, config: ToyConfig) -> LoadedToy:
        return LoadedToy(config)


TOY_TASK = ToyTask()
TOY = (
    "--micro-batch-size 4 --global-batch-size 16 --train-iters 8 --lr 0.01 --eval-interval 100 "
    "--log-interval 4 --device cpu"
)
"""Flags of a short toy run."""


if __name__ == "__main__":
    # A program like pretrain_gpt.py, for tests that start processes.
    from megatron.pretrain import leave, pretrain
    from pretrain_gpt import GRADIENT_PATHS

    leave(pretrain(TOY_TASK, GRADIENT_PATHS, sys.argv[1:]))
