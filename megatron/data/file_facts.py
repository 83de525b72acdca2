"""What tells that a data set on disk is not the one it was: sizes, times, and hashes of the index.

Hashing all tokens at each start would cost minutes on a large data set; an index names the length
of every sequence, so other text gives another index.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.data.index_file import bin_path, idx_path
from megatron.errors import DataError

HASHED_BYTES = 32 * 2**20
"""At most this much from either end of an index is hashed: 0.1 s."""


def file_facts(prefixes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Facts by file name: `bytes`, `modified` (ns since 1970), for an index `sha256` too. Raises
    `DataError` for a file that cannot be read."""
    facts: dict[str, dict[str, Any]] = {}
    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix)):
            try:
                found = os.stat(path)
                facts[str(path)] = {"bytes": found.st_size, "modified": found.st_mtime_ns}
                if path == idx_path(prefix):
                    facts[str(path)]["sha256"] = _hash_of_ends(path, found.st_size)
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}") from None
    return facts


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, as one short text for each file; a file that is not in `was` is new and none
    of this function's business."""
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


def _hash_of_ends(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(HASHED_BYTES))
        if size > HASHED_BYTES:
            file.seek(max(HASHED_BYTES, size - HASHED_BYTES))
            digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9).isoformat(sep=" ", timespec="milliseconds")
