"""The mask file format, and the checks made before a mask is unpacked. Loads no torch.

A file is an archive of arrays for `numpy.load`: `masks` holds the format version and the number of
masks, `shape/NAME` and `bits/NAME` a tensor's logical shape and its bits in the order of
`numpy.packbits`. A CRC-32 of each array reveals damage. As archives can be compressed a
thousandfold, each array's header is compared with the expected size before the array is read.
"""

from __future__ import annotations

import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from megatron.errors import DataError

VERSION = 1
MARK, SHAPE, BITS = "masks", "shape/", "bits/"
MOST_AXES = 16

_AGAIN = "write it anew with tools/prune_checkpoint.py"
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    tokenize.TokenError,
    SyntaxError,
    ValueError,
    RuntimeError,
    KeyError,
    EOFError,
    OverflowError,
    MemoryError,
)
"""Exceptions that the readers of archives and arrays raise for invalid bytes."""


def packed_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of the packed mask of a tensor of this shape."""
    return -(-math.prod(shape) // 8)


def check_mask_file(path: Path, shapes: Mapping[str, Sequence[int]] | None) -> None:
    """Check the headers of a mask file, and with `shapes` that its masks fit the model's tensors.

    No mask is unpacked. Raises `DataError` for any misfit.
    """
    with opened_masks(path) as archive:
        found = mask_shapes(path, archive)
    if shapes is not None:
        refuse_misfits(found, shapes, source=str(path))


def refuse_misfits(
    found: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]], *, source: str
) -> None:
    """Raise `DataError` for a mask that fits no tensor of the model."""
    for name, shape in found.items():
        if wrong := misfit(name, shape, shapes):
            raise DataError(f"{source}: masks {name}, {wrong}")


def misfit(name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Return why a mask fits no tensor of the model, as an error message ends; None if it fits."""
    if name not in shapes:
        return "of which the model has none; the mask is of another model"
    if tuple(shape) != tuple(shapes[name]):
        return f"but has it in shape {list(shape)}, the model in {list(shapes[name])}"
    if len(shape) < 2:
        return "which has one axis: biases and norms are never pruned; leave it out"
    return None


@contextmanager
def opened_masks(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the archive of a mask file, and raise `DataError` for errors of disk and bytes."""
    try:
        if not path.is_file():
            there = path.exists()
            what = "is not a plain file" if there else f"no such file (looked from {Path.cwd()})"
            raise DataError(
                f"{path}: {what}; give a mask file, as tools/prune_checkpoint.py writes it"
            )
        with zipfile.ZipFile(path) as archive:
            yield archive
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise DataError(f"{path}: cannot be read: {reason}") from error
    except _DAMAGE as error:
        raise DataError(f"{path}: not a mask file, or cut short; {_AGAIN}") from error


def mask_shapes(path: Path, archive: zipfile.ZipFile) -> dict[str, tuple[int, ...]]:
    """Return the logical shape of each mask in file order, checked against the size of its bits.

    Raises `DataError`, or `ValueError` inside `opened_masks`, which turns it into a `DataError`.
    """
    version, count = _vector(archive, MARK, np.int64, most=2).tolist()
    if version != VERSION:
        raise DataError(f"{path}: version {version}, this program reads {VERSION}; {_AGAIN}")
    members = [name.removesuffix(".npy") for name in archive.namelist()]
    names = [name.removeprefix(SHAPE) for name in members if name.startswith(SHAPE)]
    alien = {*members} - {MARK} - {f"{kind}{name}" for kind in (SHAPE, BITS) for name in names}
    if alien:
        raise DataError(f"{path}: holds {min(alien)!r}, which belongs to no mask; {_AGAIN}")
    if count != len(names):
        raise ValueError("the archive's list of its members is damaged")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        with _damaged_as(path, name):
            shape = _vector(archive, f"{SHAPE}{name}", np.int64, most=MOST_AXES).tolist()
            if any(size < 1 for size in shape):
                raise ValueError(f"no tensor has shape {shape}")
            shapes[name] = tuple(shape)
            with archive.open(f"{BITS}{name}.npy") as member:
                _check_size(member, packed_bytes(shape), shape)
    return shapes


def read_bits(path: Path, archive: zipfile.ZipFile, name: str, shape: Sequence[int]) -> np.ndarray:
    """Read the packed bits of one mask, uint8, after `mask_shapes` has checked their size."""
    with _damaged_as(path, name):
        return _vector(archive, f"{BITS}{name}", np.uint8, most=packed_bytes(shape))


@contextmanager
def _damaged_as(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: mask of {name!r} is damaged: {reason}; {_AGAIN}") from error


def _check_size(member: IO[bytes], wanted: int, shape: Sequence[int]) -> None:
    (found,), _ = _header(member)
    if found != wanted:
        raise ValueError(f"{found} bytes do not hold shape {list(shape)}")


def _header(member: IO[bytes]) -> tuple[tuple[int], np.dtype]:
    """Read the length and dtype of the vector that follows."""
    # A header of version 1 has at most 64 KB, later ones up to 4 GB; mask files use version 1.
    version = np.lib.format.read_magic(member)
    if version != (1, 0):
        raise ValueError(f"array format {version}, wanted (1, 0)")
    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    if len(shape) != 1:
        raise ValueError(f"an array of {len(shape)} axes, wanted 1")
    return (shape[0],), dtype


def _vector(
    archive: zipfile.ZipFile, name: str, dtype: type[np.generic], *, most: int
) -> np.ndarray:
    """Read a vector of at most `most` entries; the archive checks its CRC at the last byte."""
    with archive.open(f"{name}.npy") as member:
        (length,), found = _header(member)
        if found != dtype or not 0 <= length <= most:
            raise ValueError(f"{name}: not a vector of {np.dtype(dtype)}")
        data = member.read(length * found.itemsize)
        if len(data) != length * found.itemsize or member.read(1):
            raise ValueError(f"{name}: not a vector of {np.dtype(dtype)}")
    return np.frombuffer(bytearray(data), dtype=dtype)
