"""The system calls of checkpoints, in one table, and safetensors files.

Every call of a save that changes the disk goes through one `Files`, so that a test can make any of
them fail, or make it the last one before a crash.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import (
    DTYPE_BYTES,
    FileRecord,
    fields,
    integer,
    integers,
    named,
    show,
    strict_json,
)
from megatron.errors import CheckpointError

CHUNK = 8 * 2**20
"""Bytes per read and write."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Files:
    """One method per system call; a subclass in a test may make any of them fail."""

    def open(self, path: Path, flags: int, mode: int = 0o640) -> int:
        """Open a file or folder and return the descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def read(self, descriptor: int, size: int) -> bytes:
        """Read at most `size` bytes; returns no bytes at the end of the file."""
        return os.read(descriptor, size)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write bytes and return their number, which may be less than all."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """Wait until the contents are on disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the descriptor; network disks report late write errors here."""
        os.close(descriptor)

    def status(self, descriptor: int) -> os.stat_result:
        """Return kind and size of an open file."""
        return os.fstat(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically; replaces a file at `target`, but not a folder that is not empty."""
        os.rename(source, target)

    def mkdir(self, path: Path, mode: int = 0o750) -> None:
        """Create one folder."""
        os.mkdir(path, mode)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def unlink(self, path: Path) -> None:
        """Remove a file or link."""
        os.unlink(path)

    def entries(self, path: Path) -> list[str]:
        """Return the sorted names in a folder."""
        return sorted(os.listdir(path))

    def free(self, path: Path) -> int:
        """Return the bytes that can still be written to the disk of `path`."""
        return shutil.disk_usage(path).free


FILES = Files()


@contextlib.contextmanager
def failing_as(path: Path, doing: str, *, need: int | None = None) -> Iterator[None]:
    """Turn `OSError` into a one-line `CheckpointError` naming the path.

    If the disk is full, the error also gives the bytes needed and available.
    """
    try:
        yield
    except OSError as error:
        text = f"{path}: cannot {doing}: {os.strerror(error.errno) if error.errno else error}"
        if error.errno in _NO_SPACE and need is not None:
            with contextlib.suppress(OSError):
                text += f"; need {need} bytes, have {FILES.free(path.parent)}"
            text += "; free some space, then save again"
        raise CheckpointError(text) from error


def write_file(files: Files, path: Path, chunks: Iterable[memoryview], need: int) -> FileRecord:
    """Create a file from `chunks`, hash it while writing, and wait until it is on disk.

    `need` is the number of bytes to come, for the error of a full disk. An existing file is an
    error. Raises `CheckpointError`.
    """
    digest = hashlib.sha256()
    size = 0
    with failing_as(path, "write", need=need):
        descriptor = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for chunk in chunks:
                for start in range(0, len(chunk), CHUNK):
                    piece = chunk[start : start + CHUNK]
                    digest.update(piece)
                    size += len(piece)
                    while piece:
                        piece = piece[files.write(descriptor, piece) :]
            files.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                files.close(descriptor)
            raise
        files.close(descriptor)
    return FileRecord(size, digest.hexdigest())


def sync_folder(files: Files, path: Path) -> None:
    """Wait until the names in a folder are on disk. Raises `CheckpointError`."""
    with failing_as(path, "sync"):
        descriptor = files.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            files.fsync(descriptor)
        except OSError as error:
            # Some network disks do not support this call for folders, and do not need it.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            files.close(descriptor)


def make_folder(files: Files, path: Path) -> None:
    """Create a folder and its missing parents, and wait until their names are on disk.

    Raises `CheckpointError`.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with failing_as(folder, "make the folder"):
            with contextlib.suppress(FileExistsError):
                files.mkdir(folder)
        sync_folder(files, folder.parent)


def remove_folder(files: Files, path: Path) -> None:
    """Remove a folder and its contents; links are removed, not followed. Raises `OSError`."""
    for name in files.entries(path):
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            remove_folder(files, entry)
        else:
            files.unlink(entry)
    files.rmdir(path)


def replace_text(files: Files, path: Path, content: str, nonce: str) -> None:
    """Replace a small text file atomically; `nonce` makes the draft's name unique.

    Raises `CheckpointError`.
    """
    data = memoryview(content.encode())
    draft = path.with_name(f"{path.name}.tmp-{nonce}")
    try:
        write_file(files, draft, [data], len(data))
        with failing_as(path, "write"):
            files.rename(draft, path)
    except CheckpointError:
        with contextlib.suppress(OSError):
            files.unlink(draft)
        raise
    sync_folder(files, path.parent)


@contextlib.contextmanager
def opened(files: Files, path: Path) -> Iterator[tuple[int, int]]:
    """Open a regular file for reading, as a context with its descriptor and size in bytes.

    Raises `CheckpointError`, also for links, folders, pipes and devices.
    """
    with failing_as(path, "read"):
        try:
            # Without O_NONBLOCK, opening a pipe would block.
            descriptor = files.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CheckpointError(
                    f"{path}: is a link; a checkpoint holds plain files"
                ) from error
            raise
        try:
            status = files.status(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: is not a plain file")
            yield descriptor, status.st_size
        finally:
            files.close(descriptor)


def read_bytes(files: Files, descriptor: int, size: int) -> bytes:
    """Read the next `size` bytes; fewer only at the end of the file."""
    pieces = []
    while size > 0 and (piece := files.read(descriptor, min(size, CHUNK))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


HEADER_LIMIT = 100_000_000
"""Maximum bytes of a header, which is also the limit of the safetensors library."""


@dataclass(frozen=True, kw_only=True)
class TensorToWrite:
    """A tensor to be written.

    `data()` returns its bytes, little-endian and in row-major order. It is called when the tensor
    is written, so that one tensor at a time is copied.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], memoryview]

    @property
    def bytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `[begin, end)` are its bytes, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def in_order(items: Sequence[TensorToWrite]) -> list[TensorToWrite]:
    """Return items in file order: wide dtypes first, so that all are aligned."""
    return sorted(items, key=lambda item: (-DTYPE_BYTES[item.dtype], item.key))


def header(items: Sequence[TensorToWrite]) -> bytes:
    """Return length and header for items in file order, padded to a multiple of 8 bytes.

    Raises `ValueError` for a header beyond the limit.
    """
    ends = list(itertools.accumulate(item.bytes for item in items))
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for item, begin, end in zip(items, [0, *ends], ends, strict=False):
        document[item.key] = {
            "dtype": item.dtype,
            "shape": item.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"{len(items)} tensors need a header of more than {HEADER_LIMIT} bytes")
    return len(text).to_bytes(8, "little") + text


def chunks(items: Sequence[TensorToWrite]) -> Iterator[memoryview]:
    """Yield the bytes of a whole file, for items in file order: the header, then each item's data.

    Raises `ValueError` if an item has another number of bytes than its shape says.
    """
    yield memoryview(header(items))
    for item in items:
        data = item.data()
        if len(data) != item.bytes:
            raise ValueError(f"{item.key}: has {len(data)} bytes, was announced with {item.bytes}")
        yield data


def parse_header(length: bytes, read: Callable[[int], bytes], size: int) -> dict[str, StoredTensor]:
    """Parse the header of a file of `size` bytes; `length` is its first eight bytes.

    `read(n)` returns the next n bytes. Raises `ValueError` naming the key unless the data of all
    tensors fill the file without gap or overlap.
    """
    span = int.from_bytes(length, "little")
    if len(length) != 8 or span > min(HEADER_LIMIT, size - 8):
        raise ValueError(f"header of {span} bytes does not fit: damaged or cut short")
    document = strict_json(read(span))
    if not isinstance(document, dict):
        raise ValueError("header: must be an object")
    document.pop("__metadata__", None)
    result = named(document, "header", lambda value, where: _stored(value, where, 8 + span))
    end = 8 + span
    for key, stored in sorted(result.items(), key=lambda entry: (entry[1].begin, entry[1].end)):
        if stored.begin != end:
            raise ValueError(f"key {show(key)}: data_offsets overlap others or leave a hole")
        end = stored.end
    if end != size:
        raise ValueError(f"data end at byte {end}, the file at byte {size}")
    return result


def _stored(value: Any, where: str, origin: int) -> StoredTensor:
    fields(value, where, ["dtype", "shape", "data_offsets"])
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"{where}.dtype: {show(dtype)} is unknown")
    shape = integers(value["shape"], f"{where}.shape")
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"{where}.data_offsets: must be two whole numbers")
    begin, end = (integer(offset, f"{where}.data_offsets") for offset in offsets)
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{where}: {end - begin} bytes do not hold {dtype} of shape {list(shape)}")
    return StoredTensor(dtype, shape, origin + begin, origin + end)
