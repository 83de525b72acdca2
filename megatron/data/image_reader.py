"""Microbatches of images: the order of an epoch, augmentation, normalization.

Everything random is drawn from (seed, epoch) for all images at once, and read by the number of the
image, so that no image depends on ranks, batches or on where a run was resumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.data.images import ImageSource, Pixels, frozen_random, image_fingerprint
from megatron.data.sampler import MicrobatchSampler
from megatron.errors import missing_extra
from megatron.transfer import to_device

PADDING = 4
"""Pixels by which an image is reflected beyond each border before a crop of its own size."""
ENLARGEMENT = 8 / 7
"""Factor by which images of another size are larger than the crop after resizing: 256 for 224."""
IGNORED = -100
"""Label of an image that does not count, torch's `ignore_index`."""


@dataclass(frozen=True, kw_only=True)
class ImageBatch:
    """A microbatch of images on a device."""

    images: torch.Tensor
    """fp32 [b, 3, h, w], normalized."""
    labels: torch.Tensor
    """int64 [b]; `IGNORED` for padding."""
    index: int
    counted: int
    uneven: bool = False


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """The way from the pixels of a file to the numbers that a model gets.

    An image of the model's size is reflected by `PADDING` beyond its borders and cropped to its
    size; another is resized until it covers `ENLARGEMENT` times the size, and cropped. With
    `augment`, the crop is at a random place and every second image is flipped from left to right;
    otherwise an image of the model's size stays as it is, and the crop of another is central.

    Attributes:
        height: Height of the model's images in pixels.
        width: Width of the model's images in pixels.
        mean: Mean of red, green and blue, which is subtracted, in grey levels 0 to 255.
        std: Standard deviations by which the rest is divided, in grey levels.
        augment: Whether crops are random and images are flipped.
    """

    height: int
    width: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    augment: bool

    def crop(self, image: Pixels, draws: NDArray[np.float64] | None) -> Pixels:
        """Return the model's part of an image, uint8 [height, width, 3].

        Args:
            image: uint8 [h, w, 3], of any size.
            draws: Three numbers in [0, 1): whether to flip, and the place of the crop by row and
                column. None for no augmentation.
        """
        size = (self.height, self.width)
        padding = PADDING
        if image.shape[:2] != size:
            image, padding = _covering(image, size), 0
        elif draws is None:
            return image
        rows, columns = (
            _window(have, want, padding, None if draws is None else float(draws[1 + axis]))
            for axis, (have, want) in enumerate(zip(image.shape, size, strict=False))
        )
        if draws is not None and draws[0] < 0.5:
            columns = columns[::-1]
        return image[rows[:, None], columns]

    def normalize(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return images [b, height, width, 3] as float32 [b, 3, height, width]."""
        batch, height, width, channels = images.shape
        normal = np.empty((batch, channels, height, width), np.float32)
        pixels = normal.transpose(0, 2, 3, 1)
        np.subtract(images, np.array(self.mean, np.float32), out=pixels)
        np.divide(pixels, np.array(self.std, np.float32), out=pixels)
        return normal


def _window(have: int, want: int, padding: int, draw: float | None) -> NDArray[np.int64]:
    """Return the positions of a crop along one axis, reflected where they leave the image."""
    free = have + 2 * padding - want
    start = free // 2 if draw is None else math.floor(draw * (free + 1))
    places = np.abs(np.arange(start, start + want) - padding)
    return np.where(places < have, places, 2 * (have - 1) - places)


def _covering(image: Pixels, size: tuple[int, int]) -> Pixels:
    """Return an image resized, in its proportions, so that it covers `ENLARGEMENT` times a size."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "data") from error
    scale = max(ENLARGEMENT * want / have for want, have in zip(size, image.shape, strict=False))
    height, width = (math.ceil(scale * have) for have in image.shape[:2])
    resized = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized)


@dataclass(frozen=True)
class Epoch:
    """The random numbers of one pass over all images."""

    number: int
    order: NDArray[np.int64]
    """The number of the image at each place of the epoch."""
    draws: NDArray[np.float64]
    """[images, 3], see `ImageTransform.crop`; by the number of the image."""

    @classmethod
    def of(cls, seed: int, number: int, images: int) -> Epoch:
        """Draw the numbers of an epoch, which is numbered from 0."""
        random = frozen_random(seed, number)
        order = random.permutation(images).astype(np.int64)
        return cls(number, order, random.random_sample((images, 3)))


def evaluation_order(images: int) -> NDArray[np.int64]:
    """Return the number of the image at each place of an evaluation.

    A source may be sorted by class, and its first images are then of a few classes. The order
    depends on the number of images alone, so that all ranks, evaluations and runs take the same
    ones first.
    """
    return frozen_random(images).permutation(images).astype(np.int64)


@dataclass(kw_only=True)
class ImageReader:
    """A `Reader` of images.

    Sample s is image order(epoch)[s % images] of epoch s // images, so that each epoch has every
    image once and a global batch may reach into the next one. Without a `seed`, images come once,
    in `evaluation_order`, and samples past the end are padding.
    """

    source: ImageSource
    sampler: MicrobatchSampler
    transform: ImageTransform
    device: torch.device
    seed: int | None
    _epoch: Epoch | None = field(default=None, init=False)

    @cached_property
    def _evaluation_order(self) -> NDArray[np.int64]:
        return evaluation_order(self.samples)

    @property
    def samples(self) -> int:
        """The number of images."""
        return len(self.source)

    def read(self, first_sample: int, global_batch_size: int) -> Iterator[ImageBatch]:
        """Yield this rank's part of samples [first_sample, first_sample + global_batch_size)."""
        uneven = self.seed is None and first_sample + global_batch_size > self.samples
        shares = zip(
            self.sampler.indices(first_sample, global_batch_size),
            self.sampler.numbers(global_batch_size),
            strict=True,
        )
        for samples, number in shares:
            pixels = np.zeros(
                (len(samples), self.transform.height, self.transform.width, 3), np.uint8
            )
            labels = np.full(len(samples), IGNORED, np.int64)
            for place, sample in enumerate(samples):
                if self.seed is not None or sample < self.samples:
                    pixels[place], labels[place] = self._read(sample)
            images = self.transform.normalize(pixels)
            yield ImageBatch(
                images=to_device(torch.from_numpy(images), self.device),
                labels=to_device(torch.from_numpy(labels), self.device),
                index=number,
                counted=int((labels != IGNORED).sum()),
                uneven=uneven,
            )

    def fingerprint(self) -> str:
        """Return the number of images, and a digest of three of them with labels and shapes."""
        return image_fingerprint(self.source)

    def _read(self, sample: int) -> tuple[Pixels, int]:
        """Return the pixels and the label of a sample."""
        draws = None
        if self.seed is None:
            index = int(self._evaluation_order[sample])
        else:
            number, place = divmod(sample, self.samples)
            if self._epoch is None or self._epoch.number != number:
                self._epoch = Epoch.of(self.seed, number, self.samples)
            index = int(self._epoch.order[place])
            draws = self._epoch.draws[index] if self.transform.augment else None
        return self.transform.crop(self.source.image(index), draws), self.source.label(index)
