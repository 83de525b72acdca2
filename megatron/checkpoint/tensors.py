"""What is known of a logical tensor: shape, dtype, and where each of its entries is stored.

A tensor is known by its logical name and lies in slices:

* A slice is a box `[start, stop)` of the tensor. The boxes of a tensor are the cells of one grid,
  whatever ranks wrote them: tensor-parallel shards are boxes, pipeline stages bring other names.
* `flat: [a, b]` narrows a slice to entries a..b of its box in row-major order, as optimizer shards
  of a flattened (and perhaps tensor-parallel) parameter are. The flat slices of a box tile it.
* `BOOL` tensors are stored as bits, eight to a byte, lowest bit first, each slice from a new byte.
* `mask: {name, value}` stores only the entries at which the boolean tensor `name` equals `value`,
  in row-major order of the slice. So a compressed state is cut like the dense tensor it belongs to.
* `scope: "data_parallel"` is a tensor of which each data-parallel rank has its own: its first axis
  counts those ranks (a mask, which is equal on all of them, lacks that axis).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.regions import Box
from megatron.checkpoint.strict import LARGEST, fields, integers, show, text

SHARED, DATA_PARALLEL = "shared", "data_parallel"
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an entry in memory, by safetensors' name of the dtype."""

_TENSOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@=+:-]{0,499}")


@dataclass(frozen=True)
class SliceRecord:
    """Where a box of a tensor, or entries `flat` of that box, is stored: `key` of `file`."""

    file: str
    key: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    flat: tuple[int, int] | None = None

    @property
    def box(self) -> Box:
        """Its two corners."""
        return self.start, self.stop

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of its box."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def range(self) -> tuple[int, int]:
        """The entries of its box that it holds, in row-major order: `[a, b)`."""
        return self.flat if self.flat is not None else (0, math.prod(self.shape))


@dataclass(frozen=True)
class MaskRecord:
    """Only entries at which the boolean tensor `name` equals `value` are stored."""

    name: str
    value: bool = True


@dataclass(frozen=True)
class TensorRecord:
    """A logical tensor: whole shape, safetensors dtype name, slices, scope and mask."""

    shape: tuple[int, ...]
    dtype: str
    slices: tuple[SliceRecord, ...]
    scope: str = SHARED
    mask: MaskRecord | None = None


def tensor_to_json(record: TensorRecord) -> dict[str, Any]:
    """JSON form of a tensor's record; fields at their usual value are left out."""
    document: dict[str, Any] = {"shape": record.shape, "dtype": record.dtype}
    if record.scope != SHARED:
        document["scope"] = record.scope
    if record.mask is not None:
        document["mask"] = vars(record.mask)
    document["slices"] = [
        {key: value for key, value in vars(part).items() if value is not None}
        for part in record.slices
    ]
    return document


def tensor_from_json(value: Any, where: str) -> TensorRecord:
    """Inverse of `tensor_to_json`; raises `ValueError` naming the field."""
    fields(value, where, ["shape", "dtype", "slices"], ["scope", "mask"])
    dtype, scope = value["dtype"], value.get("scope", SHARED)
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"{where}.dtype: {show(dtype)} is not one of {', '.join(DTYPE_BYTES)}")
    if scope not in (SHARED, DATA_PARALLEL):
        raise ValueError(f"{where}.scope: {show(scope)} is not {SHARED} or {DATA_PARALLEL}")
    if not isinstance(value["slices"], list):
        raise ValueError(f"{where}.slices: must be a list")
    return TensorRecord(
        shape=integers(value["shape"], f"{where}.shape"),
        dtype=dtype,
        scope=scope,
        mask=_mask_record(value["mask"], f"{where}.mask") if "mask" in value else None,
        slices=tuple(
            _slice_record(part, f"{where}.slices[{number}]")
            for number, part in enumerate(value["slices"])
        ),
    )


def check_tensors(tensors: Mapping[str, TensorRecord]) -> None:
    """Raise `ValueError` unless every entry of every tensor is stored exactly once."""
    used: set[tuple[str, str]] = set()
    for name, record in tensors.items():
        where = f"tensors[{show(name)}]"
        if not _TENSOR_NAME.fullmatch(name):
            raise ValueError(f"{where}: letters, digits and ._/@=+:- make a tensor's name")
        if math.prod(record.shape) > LARGEST:
            raise ValueError(f"{where}.shape: {list(record.shape)} has more entries than 2**62")
        if record.scope == DATA_PARALLEL and not record.shape:
            raise ValueError(f"{where}.shape: needs a first axis for the data-parallel ranks")
        _check_mask(record, tensors, where)
        _check_cover(record, where)
        for part in record.slices:
            if (part.file, part.key) in used:
                raise ValueError(f"{where}: key {show(part.key)} of {part.file} is used twice")
            used.add((part.file, part.key))


def _check_mask(record: TensorRecord, tensors: Mapping[str, TensorRecord], where: str) -> None:
    if record.mask is None:
        return
    mask = tensors.get(record.mask.name)
    if record.dtype == "BOOL":
        raise ValueError(f"{where}.mask: a BOOL tensor is stored whole")
    if mask is None or mask.dtype != "BOOL":
        raise ValueError(f"{where}.mask: {show(record.mask.name)} is not a BOOL tensor here")
    covered = record.shape[1:] if record.scope == DATA_PARALLEL else record.shape
    if mask.scope != SHARED or mask.shape != covered:
        raise ValueError(
            f"{where}.mask: {show(record.mask.name)} has shape {list(mask.shape)}, "
            f"not {list(covered)}"
        )


def _check_cover(record: TensorRecord, where: str) -> None:
    """Boxes that are cells of one grid, are all different, and are as many as the grid has cells
    cover the tensor exactly once: linear in the number of slices."""
    boxes: dict[Box, list[SliceRecord]] = {}
    for number, part in enumerate(record.slices):
        at = f"{where}.slices[{number}]"
        if not len(part.start) == len(part.stop) == len(record.shape):
            raise ValueError(f"{at}: start and stop need one entry for each of the tensor's axes")
        if not all(a < b <= n for a, b, n in zip(*part.box, record.shape, strict=True)):
            raise ValueError(
                f"{at}: {list(part.start)} to {list(part.stop)} is empty or outside "
                f"shape {list(record.shape)}"
            )
        boxes.setdefault(part.box, []).append(part)
    if math.prod(record.shape) == 0:
        return
    cells = 1
    for axis, length in enumerate(record.shape):
        cuts = {(start[axis], stop[axis]) for start, stop in boxes}
        _check_tiles(cuts, length, f"{where}: slices on axis {axis}")
        cells *= len(cuts)
    if len(boxes) != cells:
        raise ValueError(f"{where}: slices leave a hole: {len(boxes)} of {cells} boxes are there")
    for (start, stop), parts in boxes.items():
        at = f"{where}: slices of the box {list(start)} to {list(stop)}"
        ranges = {part.range for part in parts}
        if len(ranges) != len(parts):
            raise ValueError(f"{at} overlap: the same entries are stored twice")
        _check_tiles(ranges, math.prod(parts[0].shape), at)


def _check_tiles(ranges: Iterable[tuple[int, int]], length: int, where: str) -> None:
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            problem = "overlap" if start < end else "leave a hole"
            raise ValueError(f"{where} {problem} at {min(start, end)}")
        end = stop
    if end != length:
        raise ValueError(f"{where} end at {end}, not at {length}")


def _mask_record(value: Any, where: str) -> MaskRecord:
    fields(value, where, ["name", "value"])
    if type(value["value"]) is not bool:
        raise ValueError(f"{where}.value: must be true or false, not {show(value['value'])}")
    return MaskRecord(text(value["name"], f"{where}.name"), value["value"])


def _slice_record(value: Any, where: str) -> SliceRecord:
    fields(value, where, ["file", "key", "start", "stop"], ["flat"])
    flat = None
    if "flat" in value:
        flat = integers(value["flat"], f"{where}.flat")
        if len(flat) != 2 or flat[0] >= flat[1]:
            raise ValueError(f"{where}.flat: must be [a, b] with a < b, not {show(list(flat))}")
    return SliceRecord(
        file=text(value["file"], f"{where}.file"),
        key=text(value["key"], f"{where}.key"),
        start=integers(value["start"], f"{where}.start"),
        stop=integers(value["stop"], f"{where}.stop"),
        flat=(flat[0], flat[1]) if flat else None,
    )
