"""Megatron-LM's `.bin`/`.idx` pairs: index tables, memory-mapped reader, writer, and file facts.

Byte-compatible with Megatron-LM's `MMapIndexedDataset`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron.data.sidecar import DataFileRecord, sidecar_path, write_sidecar
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
"""Token dtypes by their code in the file; Megatron's 6 and 7 are floats, which hold no tokens."""

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
    """Return the token file of a prefix."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the index file of a prefix."""
    return Path(f"{os.fspath(prefix)}.idx")


def without_suffix(path: str) -> str:
    """Return the prefix of a pair, also for the name of one of its files."""
    return path.removesuffix(".bin").removesuffix(".idx")


def pair_sizes(prefix: str | os.PathLike[str]) -> tuple[int, int]:
    """Return the sizes in bytes of `.bin` and `.idx`; DataError unless both are regular files."""
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


def is_out_of_files(error: Exception) -> bool:
    """Return whether the process, or the machine, has as many files open as it may have."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def why_not_opened(error: OSError | ValueError) -> str:
    """Return why a file of the data could not be opened or mapped, as an error message ends."""
    if is_out_of_files(error):
        return (
            "too many open files; raise the limit (ulimit -n), or give fewer prefixes: each takes "
            "up to 11 files"
        )
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def check_header(prefix: str | os.PathLike[str]) -> None:
    """Raise `DataError` unless both files can be read and the `.idx` header fits its size.

    The tables are not read, so this takes milliseconds for a pair of any size.
    """
    _, idx_size = pair_sizes(prefix)
    for path in (bin_path(prefix), idx_path(prefix)):
        if not os.access(path, os.R_OK):
            raise DataError(f"{path}: cannot be read: Permission denied")
    _read_header(idx_path(prefix), idx_size)


def read_index(prefix: str | os.PathLike[str]) -> IndexTables:
    """Return the tables of a pair, mapped and checked against each other and the size of `.bin`.

    The check is one chunked pass: about 0.1 s per 1e7 sequences, and a few MB of memory besides the
    page cache. Raises `DataError` with the file, the first bad sequence or document, and the
    expected value.
    """
    bin_size, idx_size = pair_sizes(prefix)
    path = idx_path(prefix)
    dtype, num_sequences, num_marks = _read_header(path, idx_size)
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r", shape=(idx_size,)).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be mapped: {why_not_opened(error)}") from error
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
        raise DataError(f"{path}: cannot be read: {why_not_opened(error)}") from error
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
    """Return the number of tokens in the pair, after checking lengths, offsets and size.

    Writers store sequences end to end, so one running sum gives all offsets.
    """
    offset = start = 0
    for start in range(0, len(lengths), _CHUNK):
        part = np.asarray(lengths[start : start + _CHUNK])
        if part.min() < 0:
            bad = int((part < 0).argmax())
            raise DataError(f"{path}: sequence {start + bad} has length {part[bad]}; wanted >= 0")
        # A chunk sums to less than 2**54 bytes, and `offset` below is a Python integer, so nothing
        # wraps.
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


_LONGEST = 2**31 - 1
"""Maximum length of a sequence; lengths are int32 in the format."""


def optimal_dtype(vocab_size: int | None) -> np.dtype:
    """Return the token dtype that Megatron writes: uint16 below 65500 entries, else int32."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """A checked `.bin/.idx` pair; item i is the array of tokens of sequence i, in the file's dtype.

    `mmap=False` reads `.bin` by pread instead of mapping it (for file systems without good mmap);
    the index is always mapped. DataError if the pair is missing, damaged or inconsistent.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, mmap: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        tables = read_index(prefix)
        self.dtype = tables.dtype
        self._itemsize = tables.dtype.itemsize
        self.num_tokens = tables.num_tokens
        self.sequence_lengths = tables.sequence_lengths
        self.document_indices = tables.document_indices
        self._pointers = tables.pointers
        self._path = bin_path(prefix)
        self._tokens: NDArray | None = None
        self._file: int = -1
        try:
            if mmap:
                mapped = np.memmap(self._path, dtype=self.dtype, mode="r", shape=(self.num_tokens,))
                self._tokens = mapped.view(np.ndarray)  # slices of a memmap are slower
            else:
                self._file = os.open(self._path, os.O_RDONLY)
        except (OSError, ValueError) as error:
            raise DataError(f"{self._path}: cannot be opened: {why_not_opened(error)}") from error

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> NDArray:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.get(index)

    @property
    def num_documents(self) -> int:
        """Number of documents, including empty ones; a document is zero or more sequences."""
        return len(self.document_indices) - 1

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Return tokens [offset, offset + length) of a sequence, by default to its end.

        Read-only; a view of the mapped file if it is mapped.
        """
        available = int(self.sequence_lengths[index]) - offset
        length = available if length is None else length
        assert 0 <= length <= available, (index, offset, length, available)
        return self.read(int(self._pointers[index]) // self._itemsize + offset, length)

    def read(self, start: int, length: int) -> NDArray:
        """Return tokens [start, start + length) of the whole file, across sequences.

        Raises `DataError` if the file, not mapped, cannot be read or has become shorter.
        """
        if self._tokens is not None:
            return self._tokens[start : start + length]
        wanted = length * self._itemsize
        try:
            raw = os.pread(self._file, wanted, start * self._itemsize)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        if len(raw) != wanted:
            raise DataError(
                f"{self._path}: {wanted} bytes wanted at token {start}, had {len(raw)}; "
                "the file changed while it was in use"
            )
        return np.frombuffer(raw, dtype=self.dtype)

    def check_unchanged(self) -> None:
        """Raise `DataError` if `.bin` has another size than when it was opened.

        Reading a mapped file that has shrunk, beyond its end, would crash the process.
        """
        wanted = self.num_tokens * self._itemsize
        try:
            size = os.stat(self._path).st_size
        except OSError as error:
            raise DataError(f"{self._path}: {error.strerror} while in use") from error
        if size != wanted:
            raise DataError(f"{self._path}: was {wanted} bytes at the start and is now {size}")

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)


class _HashedFile:
    """A file that is written from its start, with a running size and hash."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        self._digest = hashlib.sha256()
        self._size = 0
        self.close = self._file.close

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._size += len(content)

    def finish(self) -> DataFileRecord:
        """Write the content to disk, close the file, and return its size and hash."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return DataFileRecord(bytes=self._size, sha256=self._digest.hexdigest())


class IndexedDatasetWriter:
    """Writer of a pair, whose files get their names when `close` has both complete on disk.

    A context manager: an exception inside leaves no output and removes the temporary files. Tokens
    outside the range of `dtype` are a DataError, never wrapped. Disk errors are DataErrors.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPE_CODES.items() if known == self.dtype]
        assert codes, f"{self.dtype} has no code in the index format"
        self._code = codes[0]
        limits = np.iinfo(self.dtype.str)
        self._lowest, self._highest = int(limits.min), int(limits.max)
        self._lengths = array("i")
        self._marks = array("q", [0])
        self._records: dict[str, DataFileRecord] | None = None
        self._final = (bin_path(prefix), idx_path(prefix))
        self._temporary = tuple(
            path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in self._final
        )
        try:
            self._bin = _HashedFile(self._temporary[0])
        except OSError as error:
            raise DataError(f"{self._final[0]}: cannot be written: {error.strerror}") from error

    def add_sequence(self, tokens: ArrayLike) -> None:
        """Append one sequence to the open document: integers, of any length that int32 holds."""
        values = np.asarray(tokens).reshape(-1)
        # The length is appended after the write, so that a refused sequence changes nothing.
        self._write(values)
        self._lengths.append(values.size)

    def end_document(self) -> None:
        """End the open document; without a sequence since the last end, it is an empty document."""
        self._marks.append(len(self._lengths))

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append a whole document: its tokens and the lengths of its sequences (default: one).

        No tokens and no lengths make an empty document.
        """
        values = np.asarray(tokens).reshape(-1)
        if lengths is None:
            lengths = [values.size] if values.size else []
        assert sum(lengths) == values.size and min(lengths, default=0) >= 0, (lengths, values.size)
        self._write(values)
        self._lengths.extend(lengths)
        self.end_document()

    def append(self, prefix: str | os.PathLike[str]) -> None:
        """Append every document of another pair.

        Raises `DataError` if the pair is damaged or has another dtype, and for disk errors.
        """
        other = read_index(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{os.fspath(prefix)}: holds {other.dtype}, {self.prefix} holds {self.dtype}; "
                "only pairs of one dtype can be joined"
            )
        before = len(self._lengths)
        try:
            with open(bin_path(prefix), "rb") as source:
                while part := source.read(1 << 22):
                    self._bin.write(part)
        except OSError as error:
            raise self._failure(error) from error
        self._lengths.frombytes(np.asarray(other.sequence_lengths, dtype="=i4").tobytes())
        marks = other.document_indices[1:] + before
        self._marks.frombytes(np.asarray(marks, dtype="=i8").tobytes())

    def finish(self) -> None:
        """Write the pair to disk under temporary names; `close` need only rename it then.

        Of several pairs that belong together, none gets its names before all are finished.
        """
        assert self._marks[-1] == len(self._lengths), "end_document() was not called"
        try:
            index = _HashedFile(self._temporary[1])
            try:
                self._write_index(index)
                self._records = {".bin": self._bin.finish(), ".idx": index.finish()}
            finally:
                index.close()
        except OSError as error:
            self.abort()
            raise self._failure(error) from error

    def close(self, *, tokenizer: Mapping[str, object] | None = None) -> None:
        """Give the pair its names; `.idx` comes last, so that its presence shows a complete pair.

        `tokenizer` goes into the sidecar, with the size and hash of both files. Without it an old
        sidecar is removed, since it describes other data (call `write_sidecar` after this, not
        before).
        """
        if self._records is None:
            self.finish()
        try:
            self._final[1].unlink(missing_ok=True)
            sidecar_path(self.prefix).unlink(missing_ok=True)
            os.replace(self._temporary[0], self._final[0])
            if tokenizer is not None:
                write_sidecar(self.prefix, tokenizer, self._records)
            os.replace(self._temporary[1], self._final[1])
            _sync_folder(os.path.dirname(self.prefix) or ".")
        except OSError as error:
            self.abort()
            raise self._failure(error) from error

    def abort(self) -> None:
        """Remove the temporary files; nothing appears under the final names."""
        try:
            self._bin.close()
        except OSError:
            pass  # flushing to a full disk fails, but the file is removed next
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._bin.closed:
            self.close()

    def _write(self, values: NDArray) -> None:
        if values.size > _LONGEST:
            raise DataError(
                f"{self.prefix}: a sequence of {values.size} tokens; the format holds {_LONGEST}"
            )
        if not values.size:
            return
        assert values.dtype.kind in "iu", f"tokens are integers, not {values.dtype}"
        low, high = int(values.min()), int(values.max())
        if low < self._lowest or high > self._highest:
            bad = low if low < self._lowest else high
            raise DataError(
                f"{self.prefix}: token id {bad} does not fit {self.dtype} "
                f"({self._lowest} to {self._highest}); write with a wider dtype"
            )
        try:
            self._bin.write(values.astype(self.dtype, copy=False).tobytes())
        except OSError as error:
            raise self._failure(error) from error

    def _write_index(self, file: _HashedFile) -> None:
        lengths = np.frombuffer(self._lengths, dtype="=i4").astype("<i4", copy=False)
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        marks = np.frombuffer(self._marks, dtype="=i8").astype("<i8", copy=False)
        file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(marks)))
        for table in (lengths, pointers, marks):
            file.write(table.tobytes())

    def _failure(self, error: OSError) -> DataError:
        return DataError(f"{self._final[0]}: cannot be written: {error.strerror}")


def merge(
    prefix: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]],
    *,
    tokenizer: Mapping[str, object] | None = None,
) -> None:
    """Join pairs of one dtype, in the given order, into a new pair; the parts are not changed.

    Raises `DataError` for a part that is damaged or has another dtype, and for a full disk.
    """
    assert parts, "nothing to merge"
    with IndexedDatasetWriter(prefix, read_index(parts[0]).dtype) as writer:
        for part in parts:
            writer.append(part)
        writer.close(tokenizer=tokenizer)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


HASHED_BYTES = 32 * 2**20
"""Bytes that are hashed at either end of an index, which takes 0.1 s."""


def file_facts(prefixes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return facts of each file by path: `bytes` and `modified` (ns since 1970).

    An index also has `sha256`, the hash of `HASHED_BYTES` at either end. Raises `DataError` for a
    file that cannot be read.
    """
    facts: dict[str, dict[str, Any]] = {}
    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix)):
            try:
                found = os.stat(path)
                facts[str(path)] = {"bytes": found.st_size, "modified": found.st_mtime_ns}
                if path == idx_path(prefix):
                    facts[str(path)]["sha256"] = hash_of_ends(path)
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}") from None
    return facts


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between facts of `file_facts`, as one short text per file.

    Files that only one of them has are ignored.
    """
    found = []
    for path in sorted(was.keys() & now.keys()):
        old, new = was[path], now[path]
        if old["bytes"] != new["bytes"]:
            found.append(f"{path}: {old['bytes']} bytes then, {new['bytes']} now")
        elif old.get("sha256") != new.get("sha256"):
            found.append(f"{path}: other contents")
        elif old["modified"] != new["modified"]:
            times = " then, ".join(_time(facts["modified"]) for facts in (old, new))
            found.append(f"{path}: written {times} now")
    return found


def hash_of_ends(path: Path, count: int = HASHED_BYTES) -> str:
    """Return the SHA-256 of the first and last `count` bytes of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(count))
        if (size := os.fstat(file.fileno()).st_size) > count:
            file.seek(max(count, size - count))
            digest.update(file.read(count))
    return digest.hexdigest()


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9).isoformat(sep=" ", timespec="milliseconds")
