"""Records of raw text files: JSON lines, plain text and tables, with their line or row numbers."""

from __future__ import annotations

import argparse
import bz2
import contextlib
import glob
import gzip
import io
import json
import lzma
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

from megatron.data.local_file import is_folder, require_regular, stat_of
from megatron.errors import ConfigError, DataError, SparsetronError, missing_extra


@dataclass(frozen=True, slots=True)
class Oversized:
    """Placeholder for a record longer than the limit: its size in bytes, without content."""

    size: int


Payload = bytes | tuple[object, ...] | Oversized


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBatch:
    """Consecutive records of one source, each with its line or row number, from 1."""

    source: str
    kind: Literal["json", "text", "row"]
    records: list[tuple[int, Payload]]
    position: int  # bytes read of all files, as stored (compressed); rows for `read_dataset`


MAX_DOCUMENT_BYTES = 256 << 20
"""Maximum length of a line, paragraph, one-document file or text of a row.

A longer one is taken for an error.
"""
_ROWS = 256
_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 1000


def read_parquet(
    path: Path, *, keys: Sequence[str], max_bytes: int, before: int
) -> Iterator[RecordBatch]:
    """Yield batches of rows of the columns `keys`; a row with a longer text is `Oversized`.

    `position` is `before` plus the share of the file's bytes that its rows read so far make up.
    Raises `DataError` for a missing column and for a file that cannot be read, `ConfigError`
    without the package `pyarrow`.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "data") from error
    size = path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(str(path), keys, file.schema_arrow.names)
            total = max(file.metadata.num_rows, 1)
            parts = file.iter_batches(batch_size=_ROWS, columns=list(keys))
            columns = ([part.column(key).to_pylist() for key in keys] for part in parts)
            yield from _batched(
                _rows(columns, max_bytes),
                source=str(path),
                kind="row",
                position=lambda row: before + size * row // total,
            )
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def read_dataset(
    name: str, *, split: str, keys: Sequence[str], max_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[RecordBatch]:
    """Yield rows of a data set that the `datasets` package knows by name, or of a local folder.

    A name that is not a local folder is downloaded from the hub before this function returns. A row
    with a longer text is `Oversized`. `position` counts rows. Raises `DataError` if the data set or
    a column is missing, `ConfigError` without the package `datasets`.
    """
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "data") from error
    try:
        found: Any
        if any((Path(name) / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(name)
            found = found[split] if isinstance(found, datasets.DatasetDict) else found
        else:
            found = datasets.load_dataset(name, split=split)
    except Exception as error:  # the package, the hub and the network may raise any exception
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"--dataset {name}: split {split!r} cannot be loaded: {reason}") from error
    _check_columns(name, keys, found.column_names)
    parts = (found[start : start + _ROWS] for start in range(0, len(found), _ROWS))
    columns = ([list(part[key]) for key in keys] for part in parts)
    return _batched(_rows(columns, max_bytes), source=name, kind="row", position=lambda row: row)


def _check_columns(source: str, keys: Sequence[str], names: Sequence[str]) -> None:
    missing = [key for key in keys if key not in names]
    if missing:
        raise DataError(
            f"{source}: no column {missing[0]!r}; it has {', '.join(names)}; choose one of them "
            "with --json-keys"
        )


def _rows(
    parts: Iterable[Sequence[Sequence[object]]], max_bytes: int
) -> Iterator[tuple[int, Payload]]:
    """Yield numbered rows of consecutive parts of the columns."""
    rows = (row for columns in parts for row in zip(*columns, strict=True))
    for number, row in enumerate(rows, start=1):
        longest = max(map(_bytes_of, row), default=0)
        yield number, row if longest <= max_bytes else Oversized(longest)


def _bytes_of(value: object) -> int:
    """Return the bytes of a text or of the texts of a row; 0 for any other value."""
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, tuple):
        return sum(map(_bytes_of, value))
    return len(value) if isinstance(value, bytes) else 0


def _batched(
    records: Iterable[tuple[int, Payload]],
    *,
    source: str,
    kind: Literal["json", "text", "row"],
    position: Callable[[int], int],
) -> Iterator[RecordBatch]:
    """Yield batches that end with the record that reaches a limit.

    `position` is called with the number of that record.
    """
    batch: list[tuple[int, Payload]] = []
    held = 0
    for number, payload in records:
        batch.append((number, payload))
        held += _bytes_of(payload)
        if held >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield RecordBatch(source=source, kind=kind, records=batch, position=position(number))
            batch, held = [], 0
    if batch:
        last = batch[-1][0]
        yield RecordBatch(source=source, kind=kind, records=batch, position=position(last))


TEXT_UNITS = ("file", "line", "paragraph")
UNITS_IN_WORDS = "file, line, paragraph (set apart by blank lines), or the mark between documents"


def text_unit(value: str) -> str:
    """Return what a document is in plain text: one of `TEXT_UNITS`, or the mark between documents.

    Raises `argparse.ArgumentTypeError` for a word that is no unit: a mark has other characters.
    """
    if value not in TEXT_UNITS and (not value.strip() or value.isalnum() or "\n" in value):
        raise argparse.ArgumentTypeError(
            f"{value!r} is neither {', '.join(TEXT_UNITS)} nor a mark like '<|endoftext|>'"
        )
    return value


_JSON = (".jsonl", ".json", ".ndjson")
_PARQUET = (".parquet", ".pq")
_TEXT = (".txt", ".text", ".md", ".rst")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_KNOWN = (*_JSON, *_PARQUET, *_TEXT)
_UNREADABLE = (".zip", ".tar", ".tgz", ".7z", ".lz4", ".arrow")
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")
"""First bytes of compressed files: gzip, bzip2, xz, Zstandard, zip."""
_SNIFFED = 1 << 20
"""Bytes of a file by which its format is told."""
Format = Literal["json", "text", "parquet"]
_IN_WORDS: dict[Format, str] = {
    "json": "JSON lines",
    "text": "plain text",
    "parquet": "Parquet",
}
_CACHED = re.compile(r"[0-9a-f]{32}-\w+-\w+-description\.txt")
"""Names of descriptions in the index cache, which training makes next to its data."""
_BOM = b"\xef\xbb\xbf"


def find_inputs(given: Sequence[str], *, log: Callable[[str], None]) -> list[Path]:
    """Expand files, folders (all readable files below, by path) and glob patterns to regular files.

    Links to folders are followed; hidden files, hidden folders and index caches are left out, and
    so is plain text beside JSON lines or Parquet: it describes the data. The order is as given,
    then by path. Logs how many files of each format there are. Raises `DataError` for an item that
    is missing or not a regular file, for a folder or pattern without readable files, and for an
    unknown compression, `ConfigError` for an empty name.
    """
    found: list[Path] = []
    for name in given:
        if not name:
            # `Path("")` is the current folder, which a shell variable that is not set would name.
            raise ConfigError("'' is empty; give a file, a folder or a pattern to read")
        path = Path(name)
        there = stat_of(path)
        if there is not None and stat.S_ISDIR(there.st_mode):
            files = _readable(sorted(_files_below(path, set())), where=name, log=log)
        elif there is not None or not glob.has_magic(name):
            files = [path]
        else:
            matches = sorted(Path(match) for match in glob.glob(name, recursive=True))
            files = _readable(matches, where=name, log=log)
        found.extend(files)
    for path in found:
        require_regular(path)
        if path.suffix.lower() in _UNREADABLE:
            raise DataError(
                f"{path}: {path.suffix} is not read; unpack it, or use .gz, .bz2, .xz, .zst or "
                ".parquet"
            )
    twice = (
        sorted({str(path) for path in found if found.count(path) > 1}) if len(found) < 1000 else []
    )
    if twice:
        log(f"{twice[0]}: given more than once; its documents are written more than once")
    if len(found) > 1 or any(_inner_suffix(path) not in _KNOWN for path in found):
        log(f"to read: {formats_in_words(found)}")
    return found


def formats_in_words(files: Sequence[Path]) -> str:
    """Return how many files of each format there are: "2 files of JSON lines, 1 of Parquet"."""
    counts = Counter[Format](map(format_of, files))
    texts = [f"{count} of {_IN_WORDS[kind]}" for kind, count in counts.most_common()]
    first, _, rest = texts[0].partition(" ")
    return ", ".join([f"{first} {'file' if first == '1' else 'files'} {rest}", *texts[1:]])


def read_batches(
    files: Iterable[Path],
    *,
    keys: Sequence[str],
    text_unit: str,
    max_bytes: int = MAX_DOCUMENT_BYTES,
) -> Iterator[RecordBatch]:
    """Yield batches of records in the order of the files; a batch never spans two files.

    `text_unit` is what the function of this name returns. Raises `DataError` for a file that cannot
    be read, `ConfigError` for several `keys` with a plain text file, or if the package that reads
    Parquet is not installed.
    """
    before = 0
    for path in files:
        size = path.stat().st_size
        kind = format_of(path)
        if kind == "parquet":
            yield from read_parquet(path, keys=keys, max_bytes=max_bytes, before=before)
        else:
            if kind == "text" and len(keys) > 1:
                raise ConfigError(
                    f"--json-keys: {len(keys)} keys, but {path} is plain text, which has one"
                )
            yield from _read_stream(
                path, kind=kind, text_unit=text_unit, max_bytes=max_bytes, before=before
            )
        before += size


def format_of(path: Path) -> Format:
    """Return the format: by the suffix of JSON, Parquet and text, for other names by the content.

    A file whose first line is a JSON object has JSON lines. Anything else is plain text. Raises
    `DataError` for a file that cannot be read, and for what is none of these: a JSON array, binary
    or compressed data.
    """
    suffix = _inner_suffix(path)
    if suffix in _JSON:
        return "json"
    if suffix in _PARQUET:
        return "parquet"
    if suffix in _TEXT:
        return "text"
    with _opened(path) as (stream, _):
        start = stream.read(_SNIFFED)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith(_PACKED):
        raise DataError(f"{path}: is compressed; give it a name ending in .gz, .bz2, .xz or .zst")
    if re.match(rb"(\xef\xbb\xbf)?\s*\[\s*\{", start):
        raise DataError(f"{path}: a JSON array; write its objects as JSON lines, one a line")
    if b"\0" in start:
        raise DataError(f"{path}: is binary; give JSON lines, Parquet or plain text")
    return "json" if _begins_with_object(start) else "text"


def _begins_with_object(start: bytes) -> bool:
    """Return whether the first line that is not blank is a JSON object, as far as it is known."""
    line, end, _ = start.removeprefix(_BOM).lstrip().partition(b"\n")
    if not line.startswith(b"{"):
        return False
    if not end and len(start) == _SNIFFED:
        return line.startswith(b'{"')  # a line too long to be parsed here
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _inner_suffix(path: Path) -> str:
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix


def _files_below(folder: Path, seen: set[str]) -> Iterator[Path]:
    """Yield every file below a folder, through links; hidden folders are left out.

    `DataError` for a folder that cannot be listed, since its files would be silently missing. A
    folder whose real path is in `seen` is passed over: links may form a circle.
    """
    place = os.path.realpath(folder)
    if place in seen:
        return
    seen.add(place)
    try:
        # Links come last, so that files have their own paths where both lead to them.
        entries = sorted(os.scandir(folder), key=lambda entry: (entry.is_symlink(), entry.name))
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed: {error.strerror}") from error
    for entry in entries:
        path = folder / entry.name
        # `is_dir` of a circle of links would raise `OSError`.
        if not (is_folder(path) if entry.is_symlink() else entry.is_dir()):
            yield path
        elif not entry.name.startswith("."):
            yield from _files_below(path, seen)


def _readable(paths: Sequence[Path], *, where: str, log: Callable[[str], None]) -> list[Path]:
    files = [path for path in paths if not path.name.startswith(".") and not is_folder(path)]
    read = [
        path
        for path in files
        if (_inner_suffix(path) in _KNOWN or _has_records(path))
        and not _CACHED.fullmatch(path.name)
        and stat_of(path.with_suffix(".idx")) is None
    ]
    if not read:
        raise DataError(
            f"{where}: no file to read (looked for {', '.join(_KNOWN)}, also compressed)"
        )
    if len(read) < len(files):
        log(f"{where}: {len(files) - len(read)} of {len(files)} files are no raw text; left out")
    records = [path for path in read if _inner_suffix(path) not in _TEXT]
    if records and len(records) < len(read):
        log(
            f"{where}: {len(read) - len(records)} files of plain text beside JSON lines or Parquet "
            "are left out; name them to read them"
        )
    return records or read


def _has_records(path: Path) -> bool:
    """Return whether a file without suffix, as Spark writes them, has JSON lines or Parquet."""
    if path.suffix or stat_of(path) is None or not path.is_file():
        return False
    with contextlib.suppress(DataError):
        return format_of(path) != "text"
    return False


def _open(path: Path, raw: IO[bytes]) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        stream = gzip.GzipFile(fileobj=raw)
    elif suffix == ".bz2":
        stream = bz2.BZ2File(raw)
    elif suffix == ".xz":
        stream = lzma.LZMAFile(raw)
    elif suffix == ".zst":
        stream = _zstandard(raw)
    else:
        return raw
    return io.BufferedReader(stream, 1 << 18)  # pyright: ignore[reportArgumentType]


def _zstandard(raw: IO[bytes]) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra("pyarrow", "data") from error
    return pyarrow.CompressedInputStream(raw, "zstd")


def _read_stream(
    path: Path,
    *,
    kind: Literal["json", "text"],
    text_unit: str,
    max_bytes: int,
    before: int,
) -> Iterator[RecordBatch]:
    with _opened(path) as (stream, raw):
        yield from _batched(
            _records(stream, kind, text_unit, max_bytes),
            source=str(path),
            kind=kind,
            position=lambda number: before + raw.tell(),
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file: its unpacked bytes, and the bytes as stored. Raises `DataError`."""
    try:
        with open(path, "rb", buffering=1 << 18) as raw:
            yield _open(path, raw), raw
    except SparsetronError:
        raise
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read to its end: {reason}") from error


def _records(
    stream: IO[bytes], kind: str, text_unit: str, max_bytes: int
) -> Iterator[tuple[int, bytes | Oversized]]:
    if kind == "json" or text_unit == "line":
        for number, line in _lines(stream, max_bytes):
            if isinstance(line, Oversized) or line.strip():
                yield number, line
    elif text_unit != "file":
        mark = text_unit.encode()
        is_paragraph = text_unit == "paragraph"
        lines = (
            _paragraphs(stream, max_bytes) if is_paragraph else _between(stream, mark, max_bytes)
        )
        yield from _joined(lines, max_bytes)
    else:
        text = stream.read(len(_BOM) + max_bytes + 1).removeprefix(_BOM)
        if len(text) > max_bytes:
            yield 1, Oversized(len(text))
        else:
            yield 1, text.replace(b"\r\n", b"\n")


def _lines(stream: IO[bytes], max_bytes: int) -> Iterator[tuple[int, bytes | Oversized]]:
    """Yield numbered lines without their ends, LF or CRLF, and without a BOM at the start."""
    number = 0
    while line := stream.readline(max_bytes + len(b"\r\n")):
        number += 1
        content = line.removesuffix(b"\n").removesuffix(b"\r")
        if len(content) > max_bytes:
            size = len(line)
            while line and not line.endswith(b"\n"):
                line = stream.readline(1 << 20)
                size += len(line)
            yield number, Oversized(size)
            continue
        yield number, content.removeprefix(_BOM) if number == 1 else content


def _paragraphs(
    stream: IO[bytes], max_bytes: int
) -> Iterator[tuple[int, bytes | Oversized | None]]:
    """Yield numbered lines, with None in place of those that are blank."""
    for number, line in _lines(stream, max_bytes):
        yield number, line if isinstance(line, Oversized) or line.strip() else None


def _between(
    stream: IO[bytes], mark: bytes, max_bytes: int
) -> Iterator[tuple[int, bytes | Oversized | None]]:
    """Yield numbered lines, split at each mark, which is replaced by None."""
    for number, line in _lines(stream, max_bytes):
        first, *others = [line] if isinstance(line, Oversized) else line.split(mark)
        yield number, first
        for piece in others:
            yield number, None
            yield number, piece


def _joined(
    lines: Iterator[tuple[int, bytes | Oversized | None]], max_bytes: int
) -> Iterator[tuple[int, bytes | Oversized]]:
    """Yield the documents that None ends, without blank lines around them.

    A document has the number of its first line.
    """
    start, size, held = 0, 0, list[bytes]()
    for number, line in chain(lines, [(0, None)]):
        if line is None:
            while held and not held[-1].strip():
                held.pop()
            if start:
                yield start, b"\n".join(held) if size <= max_bytes else Oversized(size)
            start, size, held = 0, 0, []
        elif start or isinstance(line, Oversized) or line.strip():
            start = start or number
            size += (line.size if isinstance(line, Oversized) else len(line)) + 1
            if size > max_bytes:
                held.clear()
            elif isinstance(line, bytes):
                held.append(line)
