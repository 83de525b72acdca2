"""Microbatches of images: epochs, augmentation, independence of ranks, padding."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from megatron.data.image_reader import (
    IGNORED,
    Epoch,
    ImageReader,
    ImageTransform,
    evaluation_order,
)
from megatron.data.images import ImageArray
from megatron.data.sampler import MicrobatchSampler

COUNT = 30


def numbered(count: int = COUNT, side: int = 32) -> ImageArray:
    """Images whose pixels are all different along an axis, and tell the number of the image."""
    pixels = np.zeros((count, side, side, 3), np.uint8)
    pixels[..., 0] = np.arange(side, dtype=np.uint8)[:, None]
    pixels[..., 1] = np.arange(side, dtype=np.uint8)
    pixels[..., 2] = np.arange(count, dtype=np.uint8)[:, None, None]
    return ImageArray(pixels, np.arange(count) % 10)


def transform(**options: object) -> ImageTransform:
    settings = {"height": 32, "width": 32, "mean": (0.0,) * 3, "std": (1.0,) * 3, "augment": True}
    return ImageTransform(**(settings | options))  # type: ignore[arg-type]


def reader(
    *, micro: int = 2, rank: int = 0, ranks: int = 1, seed: int | None = 7, **options: object
) -> ImageReader:
    return ImageReader(
        source=numbered(),
        sampler=MicrobatchSampler(micro, rank, ranks),
        transform=transform(**options),
        device=torch.device("cpu"),
        seed=seed,
    )


def images_of(made: ImageReader, first: int, size: int) -> dict[int, torch.Tensor]:
    """Return images of a global batch by sample, from one rank's microbatches."""
    micro = made.sampler.micro_batch_size
    found = {}
    for batch in made.read(first, size):
        for place, image in enumerate(batch.images):
            found[batch.index * micro + place] = image
    return found


def test_no_image_depends_on_ranks_or_microbatches() -> None:
    whole = images_of(reader(micro=4), 26, 8)  # reaches into the second epoch
    assert len(whole) == 8
    for micro, ranks in ((1, 1), (2, 2), (1, 4), (4, 2)):
        parts: dict[int, torch.Tensor] = {}
        for rank in range(ranks):
            parts |= images_of(reader(micro=micro, rank=rank, ranks=ranks), 26, 8)
        assert all(torch.equal(parts[sample], image) for sample, image in whole.items())


def test_an_epoch_has_every_image_once_in_an_order_of_its_own() -> None:
    made = reader(augment=False)
    orders = []
    for epoch in range(2):
        found = images_of(made, epoch * COUNT, COUNT)
        orders.append([int(found[place][2, 0, 0]) for place in range(COUNT)])
        assert sorted(orders[-1]) == list(range(COUNT))
    assert orders[0] != orders[1] and orders[0] != list(range(COUNT))
    other = reader(augment=False, seed=8)
    assert [int(i[2, 0, 0]) for i in images_of(other, 0, COUNT).values()] != orders[0]


def test_reading_again_from_the_middle_gives_the_same() -> None:
    first, second = reader(), reader()
    images_of(first, 0, COUNT)
    one, other = images_of(first, 40, 4), images_of(second, 40, 4)
    assert all(torch.equal(one[sample], other[sample]) for sample in one)


def by_hand(image: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """The augmentation with numpy's own padding and flip."""
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    row, column = int(draws[1] * 9), int(draws[2] * 9)
    cut = padded[row : row + 32, column : column + 32]
    return cut[:, ::-1] if draws[0] < 0.5 else cut


def test_crops_and_flips_are_those_of_a_padded_image() -> None:
    image, made = numbered().image(3), transform()
    corners = [
        (flip, row, column) for flip in (0.2, 0.7) for row in (0, 0.999) for column in (0, 0.999)
    ]
    draws = [*map(np.array, corners), *np.random.default_rng(1).random((20, 3))]
    for draw in draws:
        assert np.array_equal(made.crop(image, draw), by_hand(image, draw))


def test_augmentation_flips_half_and_moves_evenly() -> None:
    draws = Epoch.of(3, 5, 9000).draws
    assert (draws[:, 0] < 0.5).mean() == pytest.approx(0.5, abs=0.02)
    shifts = np.bincount((draws[:, 1] * 9).astype(int), minlength=9)
    assert shifts.min() > 850 and shifts.max() < 1150
    assert abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.05
    assert not np.array_equal(draws, Epoch.of(3, 6, 9000).draws)


def test_images_are_normalized_by_channel() -> None:
    made = reader(augment=False, mean=(1.0, 2.0, 3.0), std=(2.0, 4.0, 8.0), seed=None)
    (batch,) = reader(micro=2, augment=False, seed=None).read(0, 2)
    (normal,) = made.read(0, 2)
    for channel, (mean, std) in enumerate(((1.0, 2.0), (2.0, 4.0), (3.0, 8.0))):
        expected = (batch.images[:, channel] - mean) / std
        torch.testing.assert_close(normal.images[:, channel], expected)
    assert normal.images.dtype == torch.float32 and normal.images.shape == (2, 3, 32, 32)
    assert normal.labels.tolist() == (evaluation_order(COUNT)[:2] % 10).tolist()


def test_evaluation_pads_the_last_batch_with_images_that_do_not_count() -> None:
    made = reader(micro=4, seed=None)
    batches = list(made.read(24, 8))
    assert [batch.counted for batch in batches] == [4, 2]
    assert batches[1].labels.tolist() == [*evaluation_order(COUNT)[28:] % 10, IGNORED, IGNORED]
    assert all(batch.uneven for batch in batches)
    assert made.samples == COUNT
    assert not any(batch.uneven for batch in made.read(16, 8))
    assert not any(batch.uneven for batch in reader(micro=4).read(24, 8))


def test_a_part_of_an_evaluation_has_all_classes_of_a_sorted_source() -> None:
    """Any number of ranks takes equal images, and a whole evaluation has each image once."""
    sorted_by_class = ImageArray(numbered().pixels, np.arange(COUNT) // 3)

    def numbers(first: int, size: int, **options: int) -> list[int]:
        made = reader(augment=False, seed=None, **options)
        made.source = sorted_by_class
        found = images_of(made, first, size)
        return [int(found[place][2, 0, 0]) for place in sorted(found)]

    part = numbers(0, 16)
    assert len({int(sorted_by_class.labels[number]) for number in part}) >= 8
    assert part == numbers(0, 16, micro=4)
    halves = [numbers(0, 16, rank=rank, ranks=2) for rank in range(2)]
    assert sorted(halves[0] + halves[1]) == sorted(part)
    assert sorted([*part, *numbers(16, 14)]) == list(range(COUNT))


def test_the_order_of_an_evaluation_is_that_of_every_version() -> None:
    assert evaluation_order(8).tolist() == [3, 0, 1, 4, 7, 5, 6, 2]


@pytest.mark.parametrize("shape", [(40, 60), (50, 20), (224, 224), (31, 32)])
def test_images_of_other_sizes_are_resized_and_cropped(shape: tuple[int, int]) -> None:
    pixels = np.zeros((*shape, 3), np.uint8)
    pixels[..., 1] = np.linspace(0, 255, shape[1]).astype(np.uint8)
    made = transform(augment=False)
    middle = made.crop(pixels, None)
    assert middle.shape == (32, 32, 3)
    # The crop is central up to half a pixel, so grey levels are symmetric about 127.5.
    assert abs(float(middle[..., 1].mean()) - 127.5) < 255 / 32
    left, right = (transform().crop(pixels, np.array([0.9, 0.5, at])) for at in (0.0, 0.999))
    assert left.shape == right.shape == (32, 32, 3)
    assert left[..., 1].mean() < middle[..., 1].mean() < right[..., 1].mean()
    flipped = transform().crop(pixels, np.array([0.1, 0.5, 0.0]))
    assert np.array_equal(flipped, left[:, ::-1])


def test_fingerprints_tell_other_images_apart() -> None:
    one, other = reader(), reader()
    assert one.fingerprint() == other.fingerprint() and "30 samples" in one.fingerprint()
    changed = numbered()
    changed.labels[0] = 9
    other.source = changed
    assert one.fingerprint() != other.fingerprint()
    source = numbered()
    found = {one.fingerprint()}
    for pixels, labels in (
        (source.pixels, source.labels + 256),
        (source.pixels.reshape(COUNT, 16, 64, 3), source.labels),
        (255 - source.pixels, source.labels),
    ):
        other.source = ImageArray(pixels, labels)
        found.add(other.fingerprint())
    assert len(found) == 4


def test_normalized_images_are_written_once() -> None:
    """One array of fp32 is made, with the values of the formula to the bit."""
    made = transform(mean=(125.3, 123.0, 113.9), std=(63.0, 62.1, 66.7))
    images = np.random.default_rng(0).integers(0, 256, (50, 32, 32, 3), np.uint8)
    tracemalloc.start()
    try:
        found = made.normalize(images)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    mean, std = np.array(made.mean, np.float32), np.array(made.std, np.float32)
    assert np.array_equal(found, ((images - mean) / std).transpose(0, 3, 1, 2))
    assert found.flags.c_contiguous
    # numpy casts its operands through buffers of a fixed size.
    assert found.nbytes <= peak < 1.5 * found.nbytes
