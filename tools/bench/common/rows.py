"""Results of finished runs, one JSON line each, and the steps that a run recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.metrics.logger import lines_of, parse_line

ROWS = "results.jsonl"
"""Name of a file of results."""

Row = dict[str, Any]


def append_row(path: Path, row: Row) -> None:
    """Append a line to the results; a torn line before it stays a separate line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.is_file() else b""
    torn = bool(before) and not before.endswith(b"\n")
    with open(path, "a", encoding="utf-8") as stream:
        stream.write("\n" * torn + json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Return the results so far, the last of each name; empty without a file.

    A torn line is left out.
    """
    if not path.is_file():
        return []
    rows: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["name"]] = row
    return list(rows.values())


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a metrics file; none without a file."""
    for line in lines_of(path) if path.is_file() else ():
        values = parse_line(line)
        if values is not None:
            yield values
