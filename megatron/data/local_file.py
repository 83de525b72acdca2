"""Opening of files that a user named: existing, regular, and of the expected kind of text."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from megatron.errors import DataError


def one_line(value: object, *, longest: int = 300) -> str:
    """Return the first line of a text, shortened for an error message."""
    line = next(iter(str(value).strip().splitlines()), "")
    return line if len(line) <= longest else f"{line[:longest]}..."


def stat_of(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return the stat of a path; None if nothing is there; `DataError` if that cannot be known.

    `Path.exists` raises `PermissionError` for a folder that cannot be searched, and `OSError` for a
    name that is too long.
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{one_line(path)}: cannot be looked at: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise DataError(f"{one_line(path)}: cannot be looked at: {error}") from error


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a regular file exists; `DataError` if that cannot be known."""
    found = stat_of(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder exists; `DataError` if that cannot be known."""
    found = stat_of(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def require_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Return the stat of a regular file; DataError if missing, a folder, a pipe or a device."""
    found = stat_of(path)
    if found is None:
        raise DataError(f"{path}: no such file (looked from {Path.cwd()})")
    if stat.S_ISDIR(found.st_mode):
        raise DataError(f"{path}: is a folder; wanted a file")
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: is a pipe, socket or device; copy the data into a regular file")
    return found


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a small regular file. Raises DataError."""
    require_regular(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a small UTF-8 file without BOM, with its line ends unchanged. Raises DataError."""
    content = read_bytes(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: not UTF-8 (byte {error.start})") from error


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that holds one JSON object; DataError with the line otherwise.

    Duplicate keys are refused everywhere, since the last one would win silently.
    """
    text = read_text(path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise DataError(f"{path}: {twice!r} occurs twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:  # an integer with more digits than Python converts
        raise DataError(f"{path}: not JSON: {str(error).partition(';')[0]}") from error
    except RecursionError as error:
        raise DataError(f"{path}: nested too deeply") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a JSON {type(value).__name__}; wanted an object")
    return value
