"""The `.idx` file of a Megatron pair: names, header, and the checks made before anything is read.

Layout, little-endian: magic (9 bytes), u64 version, u8 dtype code, u64 number of sequences S, u64
number of document marks D, int32[S] lengths in tokens, int64[S] byte offsets into `.bin`, int64[D]
marks (0, then the number of sequences before each document's end). NumPy alone would map a
damaged file and fail hours later at the damaged place; here one pass over the tables settles it.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPE_CODES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Token types by their code in the file; Megatron's 6 and 7 are floats, which hold no tokens."""

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class IndexTables:
    """The mapped and checked tables of an `.idx` file: S sequences, D document marks."""

    dtype: np.dtype
    sequence_lengths: NDArray[np.int32]  # [S] tokens
    pointers: NDArray[np.int64]  # [S] bytes
    document_indices: NDArray[np.int64]  # [D]
    num_tokens: int


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """The token file of a prefix."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """The index file of a prefix."""
    return Path(f"{os.fspath(prefix)}.idx")


def without_suffix(path: str) -> str:
    """The prefix of a pair, also where one of its two files was named instead."""
    return path.removesuffix(".bin").removesuffix(".idx")


def pair_sizes(prefix: str | os.PathLike[str]) -> tuple[int, int]:
    """Sizes in bytes of `.bin` and `.idx`; DataError unless both are regular files."""
    paths = (bin_path(prefix), idx_path(prefix))
    sizes: list[int] = []
    missing: list[str] = []
    for path in paths:
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            missing.append(path.name)
            continue
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be looked at: {error}") from error
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path}: is not a regular file; copy the data into one")
        sizes.append(found.st_size)
    if missing:
        if os.path.isdir(prefix):
            raise DataError(
                f"{os.fspath(prefix)}: is a folder; name the pair in it, its path up to .bin and "
                ".idx"
            )
        raise DataError(
            f"{os.fspath(prefix)}: {' and '.join(missing)} not found; a data path is the common "
            f"prefix of {paths[0].name} and {paths[1].name}"
        )
    return sizes[0], sizes[1]


def check_header(prefix: str | os.PathLike[str]) -> None:
    """Raise `DataError` unless both files of a pair can be read and the header of `.idx` fits its
    size. The tables are left alone, so this takes milliseconds for a pair of any size."""
    _, idx_size = pair_sizes(prefix)
    for path in (bin_path(prefix), idx_path(prefix)):
        if not os.access(path, os.R_OK):
            raise DataError(f"{path}: cannot be read: Permission denied")
    _read_header(idx_path(prefix), idx_size)


def read_index(prefix: str | os.PathLike[str]) -> IndexTables:
    """Map the tables of a pair after checking them against each other and the size of `.bin`.

    One chunked pass: about 0.1 s per 1e7 sequences, memory of a few MB besides the page cache.
    DataError (one line: file, first bad sequence or document, what was wanted) otherwise.
    """
    bin_size, idx_size = pair_sizes(prefix)
    path = idx_path(prefix)
    dtype, num_sequences, num_marks = _read_header(path, idx_size)
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r", shape=(idx_size,)).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be mapped: {error}") from error
    lengths_end = HEADER.size + 4 * num_sequences
    pointers_end = lengths_end + 8 * num_sequences
    lengths = raw[HEADER.size : lengths_end].view("<i4")
    pointers = raw[lengths_end:pointers_end].view("<i8")
    marks = raw[pointers_end:].view("<i8")
    _check_documents(path, marks, num_sequences)
    num_tokens = _check_sequences(path, lengths, pointers, dtype.itemsize, bin_size)
    return IndexTables(
        dtype=dtype,
        sequence_lengths=lengths,
        pointers=pointers,
        document_indices=marks,
        num_tokens=num_tokens,
    )


def _read_header(path: Path, size: int) -> tuple[np.dtype, int, int]:
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if len(header) < HEADER.size:
        raise DataError(
            f"{path}: truncated: the header wants {HEADER.size} bytes, had {len(header)}"
        )
    magic, version, code, num_sequences, num_marks = HEADER.unpack(header)
    if magic != MAGIC:
        raise DataError(
            f"{path}: starts with {magic!r} at byte 0, wanted {MAGIC!r}; not a Megatron index"
        )
    if version != VERSION:
        raise DataError(f"{path}: version {version} at byte 9; only {VERSION} is known")
    if code not in DTYPE_CODES:
        raise DataError(
            f"{path}: dtype code {code} at byte 17; token codes are {sorted(DTYPE_CODES)}"
        )
    wanted = HEADER.size + 12 * num_sequences + 8 * num_marks
    if size < wanted:
        raise DataError(
            f"{path}: truncated: {num_sequences} sequences and {num_marks} document marks want "
            f"{wanted} bytes, had {size}"
        )
    if size == wanted + num_sequences and num_sequences:
        raise DataError(f"{path}: holds multimodal modes; only text pairs can be read")
    if size > wanted:
        raise DataError(f"{path}: {size - wanted} bytes too many: wanted {wanted}, had {size}")
    return DTYPE_CODES[code], num_sequences, num_marks


def _check_documents(path: Path, marks: NDArray[np.int64], num_sequences: int) -> None:
    if len(marks) < 2 or num_sequences == 0:
        raise DataError(
            f"{path}: holds {max(len(marks) - 1, 0)} documents in {num_sequences} sequences; "
            "at least one of each is needed"
        )
    if marks[0] != 0:
        raise DataError(f"{path}: the first document starts at sequence {marks[0]}, wanted 0")
    for start in range(0, len(marks) - 1, _CHUNK):
        part = np.asarray(marks[start : start + _CHUNK + 1])
        falling = part[1:] < part[:-1]
        if falling.any():
            bad = int(falling.argmax())
            raise DataError(
                f"{path}: document {start + bad} runs from sequence {part[bad]} to "
                f"{part[bad + 1]}; marks may not fall"
            )
    if marks[-1] != num_sequences:
        raise DataError(
            f"{path}: the last document ends at sequence {marks[-1]}, but there are "
            f"{num_sequences} sequences"
        )


def _check_sequences(
    path: Path,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    itemsize: int,
    bin_size: int,
) -> int:
    """Tokens in the pair; every writer lays sequences end to end, so one sum checks all offsets."""
    offset = start = 0
    for start in range(0, len(lengths), _CHUNK):
        part = np.asarray(lengths[start : start + _CHUNK])
        if part.min() < 0:
            bad = int((part < 0).argmax())
            raise DataError(f"{path}: sequence {start + bad} has length {part[bad]}; wanted >= 0")
        # A chunk sums to less than 2**54 bytes, and `offset` below is a Python integer: no wrap.
        ends = np.cumsum(part, dtype=np.int64) * itemsize
        expected = np.empty_like(ends)
        expected[0] = 0
        expected[1:] = ends[:-1]
        seen = np.asarray(pointers[start : start + _CHUNK])
        wrong = seen != expected + offset
        if wrong.any():
            bad = int(wrong.argmax())
            raise DataError(
                f"{path}: sequence {start + bad} starts at byte {seen[bad]}, wanted "
                f"{int(expected[bad]) + offset} (the sum of the lengths before it)"
            )
        offset += int(ends[-1])
        if offset > bin_size:
            break
    if offset != bin_size:
        relation = "shorter" if bin_size < offset else "longer"
        at_least = "at least " if bin_size < offset and start + _CHUNK < len(lengths) else ""
        raise DataError(
            f"{path.with_suffix('.bin')}: {relation} than its .idx says: wanted {at_least}{offset} "
            f"bytes, had {bin_size}"
        )
    if offset == 0:
        raise DataError(f"{path}: its {len(lengths)} sequences hold 0 tokens")
    return offset // itemsize
