"""Records of raw text, as readers hand them to the tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Oversized:
    """Stands for a record longer than the bound: its size in bytes, its content not kept."""

    size: int


Payload = bytes | tuple[object, ...] | Oversized


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Consecutive records of one source; each with its line or row number, from 1."""

    source: str
    kind: Literal["json", "text", "row"]
    records: list[tuple[int, Payload]]
    position: int  # bytes of all sources read so far, as stored (compressed)
