"""Opening what a user named as a file: it exists, it is a regular file, it is text of its kind."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from megatron.errors import DataError


def require_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Stat of a regular file; DataError for one that is missing, a folder, a pipe or a device."""
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file (looked from {Path.cwd()})") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be looked at: {error}") from error
    if stat.S_ISDIR(found.st_mode):
        raise DataError(f"{path}: is a folder; wanted a file")
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: is a pipe, socket or device; copy the data into a regular file")
    return found


def read_text(path: str | os.PathLike[str]) -> str:
    """A small UTF-8 file, with or without a BOM, its line ends as they are; else DataError."""
    require_regular(path)
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A file that holds one JSON object; DataError with the line otherwise.

    A key given twice, anywhere in it, is refused: the last one would silently win.
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
    except RecursionError as error:
        raise DataError(f"{path}: nested too deeply") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a JSON {type(value).__name__}; wanted an object")
    return value
