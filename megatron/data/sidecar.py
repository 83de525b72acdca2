"""`PREFIX.json` beside a pair: which tokenizer made it, so that another one is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from megatron.errors import DataError

FORMAT = 1
_MAX_BYTES = 1 << 20


def sidecar_path(prefix: str | os.PathLike[str]) -> Path:
    """The description file of a prefix."""
    return Path(f"{os.fspath(prefix)}.json")


def write_sidecar(prefix: str | os.PathLike[str], tokenizer: Mapping[str, object]) -> None:
    """Describe the tokenizer of a pair (`Tokenizer.describe()`); appears whole or not at all."""
    path = sidecar_path(prefix)
    text = json.dumps({"format": FORMAT, "tokenizer": dict(tokenizer)}, indent=2) + "\n"
    write_atomically(path, text.encode())


def read_sidecar(prefix: str | os.PathLike[str]) -> dict[str, object] | None:
    """What `write_sidecar` was given, None where there is no such file, else DataError."""
    path = sidecar_path(prefix)
    try:
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_BYTES:
        raise DataError(f"{path}: longer than {_MAX_BYTES} bytes; not a tokenizer description")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}; remove it or write the data again") from error
    tokenizer = content.get("tokenizer") if isinstance(content, dict) else None
    if not isinstance(tokenizer, dict) or content.get("format") != FORMAT:
        raise DataError(
            f'{path}: wanted {{"format": {FORMAT}, "tokenizer": {{...}}}}; remove it or write '
            "the data again"
        )
    return tokenizer


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file under a temporary name, fsync, rename; DataError if it cannot be."""
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
