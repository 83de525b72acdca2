"""Small image files of every kind that is read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megatron.data.images import CIFAR10_TEST, CIFAR10_TRAIN

Pixels = NDArray[np.uint8]


def smooth_images(count: int, *, seed: int, side: int = 32) -> Pixels:
    """Images of few colours, which survive JPEG: uint8 [count, side, side, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 2, 2, 3), np.uint8)
    return coarse.repeat(side // 2, axis=1).repeat(side // 2, axis=2)


def labels_of(count: int, *, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 10, count).astype(np.uint8)


def write_cifar10(folder: Path, *, records: int = 8) -> tuple[Pixels, NDArray[np.uint8]]:
    """Write CIFAR-10's six binary files; returns all training images and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = [], []
    for number, name in enumerate((*CIFAR10_TRAIN, CIFAR10_TEST)):
        pixels = np.random.default_rng(number).integers(0, 256, (records, 32, 32, 3), np.uint8)
        classes = labels_of(records, seed=number)
        with open(folder / name, "wb") as file:
            for image, label in zip(pixels, classes, strict=True):
                file.write(bytes([label]))
                for channel in range(3):
                    file.write(image[:, :, channel].tobytes())
        images.append(pixels)
        labels.append(classes)
    return np.concatenate(images[:-1]), np.concatenate(labels[:-1])


def jpeg(image: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=75)
    return buffer.getvalue()


def archive_arrays(images: Pixels, labels: NDArray[np.uint8]) -> dict[str, np.ndarray]:
    """The arrays of a JPEG archive."""
    files = [jpeg(image) for image in images]
    start = files[0].index(b"\xff\xda")  # start of scan
    end = start + 2 + int.from_bytes(files[0][start + 2 : start + 4], "big")
    header = files[0][:end]
    assert all(file.startswith(header) for file in files)
    scans = [file[end:-2] for file in files]
    return {
        "header": np.frombuffer(header, np.uint8),
        "scan": np.frombuffer(b"".join(scans), np.uint8),
        "lengths": np.array([len(scan) for scan in scans], np.int32),
        "labels": labels,
    }


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def write_archives(folder: Path, *, train: int = 12, test: int = 6) -> Pixels:
    """Write a pair of JPEG archives; returns the training images as they were."""
    folder.mkdir(parents=True, exist_ok=True)
    images = smooth_images(train, seed=1)
    save_arrays(folder / "train.npz", archive_arrays(images, labels_of(train)))
    save_arrays(folder / "test.npz", archive_arrays(smooth_images(test, seed=2), labels_of(test)))
    return images


def write_folder(folder: Path, classes: dict[str, int], *, seed: int, side: int = 32) -> None:
    """Write so many PNG images of each class."""
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(smooth_images(count, seed=seed, side=side)):
            Image.fromarray(image).save(folder / name / f"{number:03d}.png")
