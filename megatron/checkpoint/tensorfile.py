"""The safetensors layout: 8 bytes little-endian length, a JSON header of that length, raw data.

The header maps each key to dtype, shape and `data_offsets` [begin, end) from the end of the header;
the data lie without gaps. The library's own writer cannot hash what it writes, and reading a file
back to hash it would bless whatever the disk returned. Its reader reads these files.

Nothing here imports torch or numpy.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.strict import fields, integer, integers, named, show, strict_json
from megatron.checkpoint.tensors import DTYPE_BYTES

HEADER_LIMIT = 100_000_000
"""Bytes; the library refuses longer headers too."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A tensor to be written. `data()` gives its bytes, little-endian and in row-major order, when
    their turn has come, so that one tensor at a time is copied."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], memoryview]

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `[begin, end)` are its bytes, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def in_order(items: Sequence[Item]) -> list[Item]:
    """Items as they will lie: wide dtypes first, so that each begins at a multiple of its width."""
    return sorted(items, key=lambda item: (-DTYPE_BYTES[item.dtype], item.key))


def header(items: Sequence[Item]) -> bytes:
    """Length and header for items that lie in the order given; padded so that data begin at a
    multiple of 8. Raises `ValueError` for a header beyond the limit."""
    ends = list(itertools.accumulate(item.bytes for item in items))
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for item, begin, end in zip(items, [0, *ends], ends, strict=False):
        document[item.key] = {
            "dtype": item.dtype,
            "shape": item.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"{len(items)} tensors need a header of more than {HEADER_LIMIT} bytes")
    return len(text).to_bytes(8, "little") + text


def chunks(items: Sequence[Item]) -> Iterator[memoryview]:
    """The bytes of a whole file: header, then each item's data."""
    yield memoryview(header(items))
    for item in items:
        data = item.data()
        if len(data) != item.bytes:
            raise ValueError(f"{item.key}: has {len(data)} bytes, was announced with {item.bytes}")
        yield data


def parse_header(length: bytes, read: Callable[[int], bytes], size: int) -> dict[str, Stored]:
    """Tensors of a file of `size` bytes whose first eight are `length`; `read(n)` gives the next n.

    Raises `ValueError` naming the key unless data lie without gap or overlap and end the file.
    """
    span = int.from_bytes(length, "little")
    if len(length) != 8 or span > min(HEADER_LIMIT, size - 8):
        raise ValueError(f"header of {span} bytes does not fit: damaged or cut short")
    document = strict_json(read(span))
    if not isinstance(document, dict):
        raise ValueError("header: must be an object")
    document.pop("__metadata__", None)
    result = named(document, "header", lambda value, where: _stored(value, where, 8 + span))
    end = 8 + span
    for key, stored in sorted(result.items(), key=lambda entry: (entry[1].begin, entry[1].end)):
        if stored.begin != end:
            raise ValueError(f"key {show(key)}: data_offsets overlap others or leave a hole")
        end = stored.end
    if end != size:
        raise ValueError(f"data end at byte {end}, the file at byte {size}")
    return result


def _stored(value: Any, where: str, origin: int) -> Stored:
    fields(value, where, ["dtype", "shape", "data_offsets"])
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"{where}.dtype: {show(dtype)} is unknown")
    shape = integers(value["shape"], f"{where}.shape")
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"{where}.data_offsets: must be two whole numbers")
    begin, end = (integer(offset, f"{where}.data_offsets") for offset in offsets)
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{where}: {end - begin} bytes do not hold {dtype} of shape {list(shape)}")
    return Stored(dtype, shape, origin + begin, origin + end)
