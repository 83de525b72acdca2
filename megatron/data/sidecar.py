"""`PREFIX.json`, which describes a pair: its tokenizer, and size and hash of its files.

The tokenizer's fingerprint lets a run refuse data of another tokenizer, and the hashes reveal
damage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.data.local_file import is_file, one_line, require_regular
from megatron.errors import DataError

FORMAT = 1
SUFFIXES = (".bin", ".idx")
MAX_IDS = 2**31
"""Maximum number of ids in a vocabulary: `.bin` holds ids of large vocabularies as int32."""
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DataFileRecord:
    """The size of one file when it was written, and its sha256 in hex."""

    bytes: int
    sha256: str


def sidecar_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the description file of a prefix."""
    return Path(f"{os.fspath(prefix)}.json")


def write_sidecar(
    prefix: str | os.PathLike[str],
    tokenizer: Mapping[str, object],
    files: Mapping[str, DataFileRecord] | None = None,
) -> None:
    """Write the sidecar of a pair: its tokenizer (`Tokenizer.describe()`) and its files by suffix.

    The sidecar is written atomically. Raises `DataError` if that fails.
    """
    content: dict[str, object] = {"format": FORMAT, "tokenizer": dict(tokenizer)}
    if files is not None:
        content["files"] = {suffix: asdict(record) for suffix, record in files.items()}
    write_atomically(sidecar_path(prefix), (json.dumps(content, indent=2) + "\n").encode())


def read_sidecar(prefix: str | os.PathLike[str]) -> dict[str, object] | None:
    """Return the tokenizer's description in a pair's sidecar; None if there is no sidecar.

    Raises `DataError` if the sidecar cannot be read or is invalid.
    """
    content = _read(sidecar_path(prefix))
    return None if content is None else content["tokenizer"]


def read_file_records(prefix: str | os.PathLike[str]) -> dict[str, DataFileRecord] | None:
    """Return size and hash of `.bin` and `.idx` when they were written, by suffix.

    None if they were not recorded: there is no sidecar, or an older version wrote it. Raises
    `DataError` if the sidecar is invalid.
    """
    path = sidecar_path(prefix)
    content = _read(path)
    if content is None or "files" not in content:
        return None
    files = content["files"]
    try:
        return {suffix: _record(files[suffix]) for suffix in SUFFIXES}
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{path}: 'files' wants bytes and sha256 of {' and '.join(SUFFIXES)}; remove it or "
            "write the data again"
        ) from None


def check_sizes(prefix: str | os.PathLike[str]) -> None:
    """Raise `DataError` unless both files have the size that the sidecar recorded.

    This is the check at the start of a run. It takes no time for data of any size, and does not
    find changed bytes: hashing all tokens at each start would cost minutes (`check_data` does it).
    """
    for suffix, record in (read_file_records(prefix) or {}).items():
        path = f"{os.fspath(prefix)}{suffix}"
        size = require_regular(path).st_size
        if size != record.bytes:
            raise DataError(
                f"{path}: {size} bytes, but {sidecar_path(prefix)} recorded {record.bytes} when it "
                "was written; bring the file back or write the data again"
            )


def _record(value: Mapping[str, object]) -> DataFileRecord:
    size, digest = value["bytes"], value["sha256"]
    if type(size) is not int or not isinstance(digest, str):
        raise ValueError
    return DataFileRecord(bytes=size, sha256=digest)


def _read(path: Path) -> dict[str, Any] | None:
    """Return the checked content of a sidecar; None if there is none."""
    if not is_file(path):
        return None
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_BYTES:
        raise DataError(f"{path}: longer than {_MAX_BYTES} bytes; not a tokenizer description")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not JSON: {one_line(error)}; remove it or write the data again"
        ) from error
    tokenizer = content.get("tokenizer") if isinstance(content, dict) else None
    if not isinstance(tokenizer, dict) or content.get("format") != FORMAT:
        raise DataError(
            f'{path}: wanted {{"format": {FORMAT}, "tokenizer": {{...}}}}; remove it or write '
            "the data again"
        )
    for key, least in (("vocab_size", 1), ("eod", 0)):
        value = tokenizer.get(key)
        if value is not None and (type(value) is not int or not least <= value <= MAX_IDS):
            raise DataError(
                f"{path}: {key} is {one_line(repr(value))}; wanted a whole number from {least} to "
                f"{MAX_IDS}; write the data again"
            )
    return content


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file under a temporary name, fsync, rename; DataError if that fails."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
