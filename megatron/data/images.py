"""Labelled images: CIFAR-10's binary files, JPEG archives, folders of classes, mock images.

`open_images` finds out which of these a folder holds. Imports no torch; JPEG and other compressed
images need Pillow (extra `data`).

==========================  ======================================================================
`data_batch_1.bin` ...      CIFAR-10, binary version (Krizhevsky 2009): five training files and
                            `test_batch.bin` with records of 3,073 bytes, a label and 1,024 bytes
                            each of red, green and blue in row-major order
`train.npz`, `test.npz`     CIFAR-10 as JPEG images that share one header: arrays `header` (uint8),
                            `scan` (uint8, the entropy-coded bytes of all images without their end
                            marks), `lengths` (bytes of scan of each image), `labels`
`train/`, `val/`, `test/`   one folder for each class, in the order of their names, with one file
                            for each image, at any depth; `test/` may be absent. Files without an
                            extension of `IMAGE_EXTENSIONS` are no images, as in torchvision's
                            `ImageFolder`, and names that begin with a dot are skipped
==========================  ======================================================================
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.batches import fingerprint_of
from megatron.data.local_file import is_file, is_folder, one_line, read_bytes, require_regular
from megatron.errors import DataError, missing_extra

Pixels = NDArray[np.uint8]
"""An image [height, width, 3], red, green and blue."""

CIFAR10_CLASSES = 10
CIFAR10_SIDE = 32
CIFAR10_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR10_TEST = "test_batch.bin"
ARCHIVE_TRAIN, ARCHIVE_TEST = "train.npz", "test.npz"
IMAGE_EXTENSIONS = tuple(".jpg .jpeg .png .ppm .bmp .pgm .tif .tiff .webp".split())
"""Ends of the names of images in a folder of a class, in any case: torchvision's."""
END_OF_IMAGE = b"\xff\xd9"
_NAMES: dict[Literal["binary", "archive"], tuple[str, ...]] = {
    "binary": (*CIFAR10_TRAIN, CIFAR10_TEST),
    "archive": (ARCHIVE_TRAIN, ARCHIVE_TEST),
}
_PLANE = CIFAR10_SIDE**2
_RECORD = 1 + 3 * _PLANE


class ImageSource(Protocol):
    """Labelled images by number."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def label(self, index: int) -> int:
        """Return the class of one image, from 0."""
        ...

    def image(self, index: int) -> Pixels:
        """Return one image, uint8 [height, width, 3].

        Raises:
            DataError: The image cannot be read.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ImageSplits:
    """The images of training, of evaluations while training, and of the final test."""

    train: ImageSource
    valid: ImageSource
    test: ImageSource


@dataclass(frozen=True)
class ImageFiles:
    """The kind and the paths of a folder's images, before any image is read.

    `paths` are the files in the order in which they are read; for folders of classes they are the
    folders of training, of validation and, if it exists, of test.
    """

    kind: Literal["binary", "archive", "folder"]
    paths: tuple[Path, ...]

    @classmethod
    def find(cls, folder: str) -> ImageFiles:
        """Return the files of a folder; see the table at the top of this module.

        Raises:
            DataError: The folder or a file of its kind is missing.
        """
        path = Path(folder)
        if not is_folder(path):
            raise DataError(f"{folder}: no such folder of images (looked from {Path.cwd()})")
        for kind, names in _NAMES.items():
            if is_file(path / names[0]):
                for name in names:
                    require_regular(path / name)
                return cls(kind, tuple(path / name for name in names))
        if not is_folder(path / "train"):
            raise DataError(
                f"{folder}: holds neither {CIFAR10_TRAIN[0]} nor {ARCHIVE_TRAIN} nor a folder "
                "train/; docs/vision.md describes what is read"
            )
        names = ["train", "val", *(["test"] if is_folder(path / "test") else [])]
        for name in names:
            if not is_folder(path / name):
                raise DataError(f"{path / name}: no such folder; wanted one folder for each class")
        return cls("folder", tuple(path / name for name in names))

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return facts by which a resumed run finds that its images changed, by path.

        A file has `bytes` and `modified` (ns since 1970); a folder of classes the number of its
        images as `bytes`, and as `sha256` a digest of the names of all images and of the labels,
        shapes and pixels of three images.

        Raises:
            DataError: A file is missing or cannot be read.
        """
        found: dict[str, dict[str, Any]] = {}
        for path in self.paths:
            if self.kind == "folder":
                images = ImageFolder.open(path)
                names = [str(image.relative_to(path)) for image in images.paths]
                text = "\n".join([*names, image_fingerprint(images)])
                digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
                found[str(path)] = {"bytes": len(images), "modified": 0, "sha256": digest}
            else:
                stat = require_regular(path)
                found[str(path)] = {"bytes": stat.st_size, "modified": stat.st_mtime_ns}
        return found


def image_fingerprint(source: ImageSource) -> str:
    """Return the number of images, and a digest of three of them with their labels and shapes."""

    def content(index: int) -> bytes:
        image = source.image(index)
        return f"{source.label(index)} {image.shape} ".encode() + image.tobytes()

    return fingerprint_of(len(source), content)


def open_images(folder: str, *, classes: int, held_out: int = 0) -> ImageSplits:
    """Open the images of a folder; see the table at the top of this module.

    Args:
        folder: The folder.
        classes: Number of classes, which the images must have.
        held_out: Number of training images that are held out for validation. They are drawn with a
            seed of their own, so that runs with different seeds validate on the same images. With
            0, validation uses `val/` of a folder of classes, else the test images.

    Raises:
        DataError: Files are missing, damaged, or of another number of classes.
    """
    files = ImageFiles.find(folder)
    found, valid = CIFAR10_CLASSES, None
    if files.kind == "binary":
        train, test = read_cifar10(files.paths[:-1]), read_cifar10(files.paths[-1:])
    elif files.kind == "archive":
        train, test = (read_archive(path) for path in files.paths)
    else:
        train, valid, *tests = (ImageFolder.open(path) for path in files.paths)
        test = tests[0] if tests else valid
        found = len(train.names)
        for other in (valid, test):
            if other.names != train.names:
                raise DataError(
                    f"{other.folder}: its classes are not those of {train.folder}; give both the "
                    "same folders"
                )
    if found != classes:
        raise DataError(
            f"{folder}: has {found} classes, num_classes is {classes}; give --num-classes {found}"
        )
    return split_images(train, valid=valid, test=test, held_out=held_out)


def split_images(
    train: ImageSource,
    *,
    valid: ImageSource | None,
    test: ImageSource,
    held_out: int,
) -> ImageSplits:
    """Return the splits, with `held_out` training images as validation (see `open_images`).

    Raises `DataError` if no training image would be left.
    """
    count = len(train)
    if held_out >= count:
        raise DataError(f"held_out_images {held_out}: there are {count} training images; lower it")
    if held_out:
        order = np.random.RandomState(0).permutation(count)
        train, valid = (
            Subset(train, np.sort(part)) for part in (order[held_out:], order[:held_out])
        )
    valid = test if valid is None else valid
    return ImageSplits(train=train, valid=valid, test=test)


@dataclass(frozen=True)
class ImageArray:
    """Images in memory, uint8 [images, height, width, 3]."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, index: int) -> int:
        """Return the class of one image."""
        return int(self.labels[index])

    def image(self, index: int) -> Pixels:
        """Return one image; a view."""
        return self.pixels[index]


@dataclass(frozen=True)
class Subset:
    """Images of a source, by their numbers there."""

    source: ImageSource
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)

    def label(self, index: int) -> int:
        """Return the class of one image."""
        return self.source.label(int(self.numbers[index]))

    def image(self, index: int) -> Pixels:
        """Return one image."""
        return self.source.image(int(self.numbers[index]))


def read_cifar10(files: Sequence[Path]) -> ImageArray:
    """Read files of CIFAR-10's binary version, one after another.

    Raises:
        DataError: A file is missing, ends within a record, or has a label that is no class.
    """
    pixels, labels = [], []
    for file in files:
        content = read_bytes(file)
        if not content or len(content) % _RECORD:
            raise DataError(
                f"{file}: {len(content)} bytes are not whole records of {_RECORD}; download the "
                "file again"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
        _check_labels(file, records[:, 0])
        labels.append(records[:, 0].astype(np.int64))
        planes = records[:, 1:].reshape(-1, 3, CIFAR10_SIDE, CIFAR10_SIDE)
        pixels.append(planes.transpose(0, 2, 3, 1))
    return ImageArray(np.ascontiguousarray(np.concatenate(pixels)), np.concatenate(labels))


def read_archive(file: Path) -> ImageArray:
    """Read and decode an archive of JPEG images of CIFAR-10.

    Raises:
        DataError: The file is missing, damaged or empty, an array is absent or does not fit the
            others, or an image cannot be decoded; the text names the image by its number from 0.
        ConfigError: Pillow is not installed.
    """
    arrays = _archive_arrays(file)
    lengths, scan = arrays["lengths"].astype(np.int64), arrays["scan"].tobytes()
    _check_labels(file, arrays["labels"])
    if (lengths <= 0).any() or lengths.sum() != len(scan) or len(lengths) != len(arrays["labels"]):
        raise DataError(
            f"{file}: {len(lengths)} lengths of {lengths.sum()} bytes and {len(arrays['labels'])} "
            f"labels do not fit a scan of {len(scan)} bytes; the file is damaged"
        )
    if not len(lengths):
        raise DataError(f"{file}: holds no images")
    header, ends = arrays["header"].tobytes(), np.cumsum(lengths)
    pixels = np.empty((len(lengths), CIFAR10_SIDE, CIFAR10_SIDE, 3), np.uint8)
    for index, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        jpeg = header + scan[end - length : end] + END_OF_IMAGE
        image = decode(jpeg, where=f"{file}: image {index}")
        if image.shape[:2] != (CIFAR10_SIDE, CIFAR10_SIDE):
            height, width, _ = image.shape
            raise DataError(
                f"{file}: image {index}: is {width} x {height} pixels; CIFAR-10's have "
                f"{CIFAR10_SIDE} x {CIFAR10_SIDE}"
            )
        pixels[index] = image
    return ImageArray(pixels, arrays["labels"].astype(np.int64))


def _archive_arrays(file: Path) -> dict[str, NDArray[Any]]:
    require_regular(file)
    wanted = ("header", "scan", "lengths", "labels")
    # numpy and zipfile raise errors of many classes for damaged files.
    try:
        with open(file, "rb") as stream:
            archive = np.load(stream)  # refuses pickles
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a .npy file of one array")
            found = {name: archive[name] for name in wanted if name in archive.files}
    except Exception as error:
        raise DataError(f"{file}: not a readable .npz archive: {one_line(error)}") from error
    for name in wanted:
        if name not in found:
            raise DataError(f"{file}: has no array {name}; wanted {', '.join(wanted)}")
    for name, array in found.items():
        kinds = "u" if name in ("header", "scan") else "iu"
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise DataError(f"{file}: {name} is {array.dtype} {list(array.shape)}; wanted integers")
    return found


def _check_labels(file: Path, labels: NDArray[Any]) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= CIFAR10_CLASSES))
    if wrong.size:
        raise DataError(
            f"{file}: image {wrong[0]}: label {labels[wrong[0]]}; CIFAR-10 has the classes 0 to "
            f"{CIFAR10_CLASSES - 1}"
        )


def decode(content: bytes, *, where: str) -> Pixels:
    """Decode a JPEG, PNG or other image file with Pillow, as uint8 [height, width, 3].

    Raises:
        DataError: The image is damaged or of a format that Pillow does not read.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "data") from error
    try:
        with Image.open(io.BytesIO(content)) as image:
            return np.asarray(image.convert("RGB"))
    # Pillow's readers raise errors of many classes for damaged files.
    except Exception as error:
        raise DataError(f"{where}: not a readable image: {one_line(error)}") from error


@dataclass(frozen=True)
class ImageFolder:
    """Images in one folder for each class; a file is read when its image is."""

    folder: Path
    names: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: NDArray[np.int64]

    @classmethod
    def open(cls, folder: Path) -> ImageFolder:
        """List the classes and their images, both in the order of their names.

        Raises:
            DataError: There is no such folder, it has no classes, or a class has no images.
        """
        if not is_folder(folder):
            raise DataError(f"{folder}: no such folder; wanted one folder for each class in it")
        names = [entry.name for entry in _listed(folder) if _is_folder(entry)]
        if not names:
            raise DataError(f"{folder}: has no folders of classes")
        paths: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(names):
            files = _images_below(folder / name)
            if not files:
                raise DataError(
                    f"{folder / name}: a class without images; their names end in "
                    f"{', '.join(IMAGE_EXTENSIONS)}"
                )
            paths += files
            labels += [label] * len(files)
        return cls(folder, tuple(names), tuple(paths), np.array(labels, np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, index: int) -> int:
        """Return the class of one image."""
        return int(self.labels[index])

    def image(self, index: int) -> Pixels:
        """Read and decode one image."""
        path = self.paths[index]
        return decode(read_bytes(path), where=str(path))


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder by name, without hidden ones."""
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed: {error.strerror}") from error
    return sorted(entries, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # `is_dir` of a circle of links would raise `OSError`.
    return is_folder(entry.path) if entry.is_symlink() else entry.is_dir()


def _images_below(folder: Path) -> list[Path]:
    """Return the images in a folder and the folders below it, sorted by folder and name."""
    paths: list[Path] = []
    for entry in _listed(folder):
        if _is_folder(entry):
            paths += _images_below(folder / entry.name)
        elif entry.name.lower().endswith(IMAGE_EXTENSIONS):
            paths.append(folder / entry.name)
    return paths


_PATTERN = 4
"""Side of the coarse pattern of a class of mock images."""
_NOISE = 48.0
"""Standard deviation of a mock image around the pattern of its class, in grey levels."""


@dataclass(frozen=True)
class MockImages:
    """Images that a model can learn, made from (seed, number): the pattern of a class, and noise.

    Image number i of a source that begins at `first` is image `first + i`, so that sources with
    disjoint numbers hold different images of the same classes.
    """

    seed: int
    classes: int
    height: int
    width: int
    count: int
    first: int = 0

    def __len__(self) -> int:
        return self.count

    def label(self, index: int) -> int:
        """Draw the class of one image."""
        return int(self._random(1, self.first + index).randint(self.classes))

    def image(self, index: int) -> Pixels:
        """Make one image."""
        pattern = self._random(2, self.label(index))
        coarse = pattern.randint(64, 192, size=(_PATTERN, _PATTERN, 3))
        rows = np.arange(self.height) * _PATTERN // self.height
        columns = np.arange(self.width) * _PATTERN // self.width
        noise = self._random(3, self.first + index).standard_normal((self.height, self.width, 3))
        return np.clip(coarse[rows][:, columns] + _NOISE * noise, 0, 255).astype(np.uint8)

    def _random(self, purpose: int, number: int) -> np.random.RandomState:
        return frozen_random(self.seed, purpose, number)


def mock_splits(
    *, seed: int, classes: int, height: int, width: int, count: int, held_out: int = 0
) -> ImageSplits:
    """Return `count` mock images for training, and a fifth as many, at least one, for the test.

    `held_out` of the training images are for validation; with 0, the test images are.
    """
    tested = max(count // 5, 1)
    train = MockImages(seed, classes, height, width, count)
    test = MockImages(seed, classes, height, width, tested, first=count)
    return split_images(train, valid=None, test=test, held_out=held_out)


def frozen_random(*key: int) -> np.random.RandomState:
    """Return a generator whose numbers depend on the key alone, on every version of numpy."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(key)))
