"""The checkpoint format: boxes of logical tensors, tensor records, and the manifest.

Reading is strict: a key that is missing, unknown or of the wrong type is an error. The readers of
values raise `ValueError` with the place `where` in the document, and `parse` adds the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.errors import CheckpointError

LARGEST = 2**62
MOST_AXES = 16


def strict_json(data: bytes) -> Any:
    """Decode JSON; raise `ValueError` for duplicate keys and for numbers that are not finite."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            twice = next(name for name, _ in items if name in seen or seen.add(name))
            raise ValueError(f"key {show(twice)} occurs twice")
        return result

    def number(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            raise ValueError(f"{show(literal)} is not a finite number")
        return value

    return json.loads(
        data.decode(), object_pairs_hook=pairs, parse_float=number, parse_constant=number
    )


def check_json(value: Any, where: str) -> None:
    """Raise `ValueError` naming the first value that JSON would not return unchanged."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: key {show(key)} is not text")
            check_json(entry, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            check_json(entry, f"{where}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {value} is not a finite number")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"{where}: {type(value).__name__} has no JSON form")


def show(value: Any) -> str:
    """Return a value for an error line: ASCII, quoted, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:397]}..."


def fields(
    value: Any, where: str, required: Collection[str], optional: Collection[str] = ()
) -> None:
    """Raise `ValueError` unless `value` is an object with the required keys and no unknown one."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object")
    for key in required:
        if key not in value:
            raise ValueError(f"{where}.{key}: missing")
    for key in value:
        if key not in required and key not in optional:
            raise ValueError(f"{where}: unknown key {show(key)}")


def named(value: Any, where: str, read: Any) -> dict[str, Any]:
    """Return an object with arbitrary keys, each value converted by `read(value, where)`."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object")
    return {key: read(entry, f"{where}[{show(key)}]") for key, entry in value.items()}


def integer(value: Any, where: str, low: int = 0, high: int = LARGEST) -> int:
    """Return a whole number from `low` to `high`; true and false are not numbers."""
    if type(value) is not int or not low <= value <= high:
        most = "2**62" if high == LARGEST else high
        raise ValueError(f"{where}: must be a whole number from {low} to {most}, not {show(value)}")
    return value


def finite(value: Any, where: str) -> float:
    """Return a value that must be a number; JSON has no others than finite ones."""
    if type(value) not in (int, float):
        raise ValueError(f"{where}: must be a number, not {show(value)}")
    return value


def integers(value: Any, where: str) -> tuple[int, ...]:
    """Return a list of at most `MOST_AXES` whole numbers, one per axis, as a tuple."""
    if not isinstance(value, list) or len(value) > MOST_AXES:
        raise ValueError(f"{where}: must be a list of at most {MOST_AXES} whole numbers")
    return tuple(integer(entry, where) for entry in value)


def text(value: Any, where: str) -> str:
    """Return a value that must be a string."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: must be text, not {show(value)}")
    return value


Corner = tuple[int, ...]
Box = tuple[Corner, Corner]


def volume(box: Box) -> int:
    """Return the number of entries in a box; 1 without axes."""
    return math.prod(stop - start for start, stop in zip(*box, strict=True))


def common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    start = tuple(map(max, one[0], other[0]))
    stop = tuple(map(min, one[1], other[1]))
    return (start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def within(box: Box, origin: Corner) -> tuple[slice, ...]:
    """Return the index of a box in an array whose first entry is the tensor's entry `origin`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(*box, origin, strict=True))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Split entries `[start, stop)` of a flattened tensor into boxes, in row-major order.

    The boxes are contiguous in the range and in its order. There are at most 2 x axes - 1 of them:
    a ragged first row, full rows and a ragged last row, on every axis.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = tuple(shape[1:])
    size = math.prod(inner)
    first, head = divmod(start, size)
    last, tail = divmod(stop, size)
    if first == last:
        yield from _in_row(first, inner, head, tail)
        return
    if head:
        yield from _in_row(first, inner, head, size)
        first += 1
    if first < last:
        yield (first, *(0 for _ in inner)), (last, *inner)
    yield from _in_row(last, inner, 0, tail)


def _in_row(row: int, shape: Corner, start: int, stop: int) -> Iterator[Box]:
    for low, high in flat_boxes(shape, start, stop):
        yield (row, *low), (row + 1, *high)


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
"""Bytes per entry in memory, by safetensors' name of the dtype."""

_TENSOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@=+:-]{0,499}")


@dataclass(frozen=True)
class SliceRecord:
    """The position of a box of a tensor, or of the entries `flat` of the box: `key` in `file`."""

    file: str
    key: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    flat: tuple[int, int] | None = None

    @property
    def box(self) -> Box:
        """The two corners of the box."""
        return self.start, self.stop

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of the box."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def range(self) -> tuple[int, int]:
        """The entries of the box that the slice holds, in row-major order: `[a, b)`."""
        return self.flat if self.flat is not None else (0, math.prod(self.shape))


@dataclass(frozen=True)
class MaskRecord:
    """The condition of stored entries: the boolean tensor `name` equals `value` there."""

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
    """Return the JSON form of a tensor's record; fields with default values are left out."""
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
    """Return the record of a tensor from its JSON form; raises `ValueError` naming the field."""
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
    """Raise `ValueError` unless every entry of every tensor is stored exactly once.

    Names, masks and keys are checked as well. Entries that a mask leaves out count as stored.
    """
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
    """Check that boxes cover the tensor exactly once, in time linear in the number of slices.

    Boxes cover the tensor if they are cells of one grid, all different, and as many as the grid has
    cells.
    """
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


FORMAT = "sparsetron-checkpoint"
VERSION = 2
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT = 256 * 2**20
"""Maximum bytes of a manifest. That of 1024 ranks and 600 tensors takes about 90 MB."""

_KEYS = ("sha256", "format", "version", "step", "state", "world", "packages", "files", "tensors")
_SIGNATURE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_SIGNATURE_BYTES = 79
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,100}\.safetensors")


_COUNTERS = ("iteration", "consumed_samples", "applied_samples")
MOST_SAMPLES = 2**31
"""Bound of the samples of a step."""


def check_state(state: Any, step: int) -> None:
    """Raise `ValueError` for a value in `state` that no run has after `step`.

    Any key may be missing: a checkpoint may hold the weights of a model and nothing of a run.
    """
    if not isinstance(state, dict):
        raise ValueError("state: must be an object")
    if "progress" in state:
        _check_progress(state["progress"], step)
    _check_counters(state, "state", step)
    replicas = state.get("replicas", [])
    if not isinstance(replicas, list):
        raise ValueError("state.replicas: must be a list")
    for number, replica in enumerate(replicas):
        where = f"state.replicas[{number}]"
        fields(replica, where, ["applied_updates", "loss_scaler", "skipped_in_row"])
        _check_counters(replica, where, step)
        integer(replica["skipped_in_row"], f"{where}.skipped_in_row", high=step)
    for key in ("identity", "schedule"):
        if not isinstance(state.get(key, {}), dict):
            raise ValueError(f"state.{key}: must be an object")
    named(state.get("data_files", {}), "state.data_files", _check_file_facts)
    text(state.get("data_order", ""), "state.data_order")


def _check_progress(progress: Any, step: int) -> None:
    where = "state.progress"
    fields(progress, where, _COUNTERS, ["skipped_in_row", "finite_step", "losses"])
    if integer(progress["iteration"], f"{where}.iteration") != step:
        raise ValueError(f"{where}.iteration: is {progress['iteration']}, step is {show(step)}")
    read = integer(progress["consumed_samples"], f"{where}.consumed_samples")
    if read > step * MOST_SAMPLES:
        raise ValueError(f"{where}.consumed_samples: {read} are too many for {step} steps")
    integer(progress["applied_samples"], f"{where}.applied_samples", high=read)
    for key in ("skipped_in_row", "finite_step"):
        integer(progress.get(key, 0), f"{where}.{key}", high=step)
    losses = progress.get("losses", [])
    if not isinstance(losses, list):
        raise ValueError(f"{where}.losses: must be a list")
    for number, loss in enumerate(losses):
        finite(loss, f"{where}.losses[{number}]")


def _check_counters(state: Mapping[str, Any], where: str, step: int) -> None:
    integer(state.get("applied_updates", 0), f"{where}.applied_updates", high=step)
    scaler = state.get("loss_scaler", {})
    names = ["scale", "clean_steps", "hysteresis_left"]
    fields(scaler, f"{where}.loss_scaler", names if scaler else [])
    if scaler:
        if finite(scaler["scale"], f"{where}.loss_scaler.scale") <= 0:
            raise ValueError(f"{where}.loss_scaler.scale: must be above 0")
        integer(scaler["clean_steps"], f"{where}.loss_scaler.clean_steps")
        # Overflows at the lowest scale go on to count.
        integer(scaler["hysteresis_left"], f"{where}.loss_scaler.hysteresis_left", low=-LARGEST)


def _check_file_facts(value: Any, where: str) -> None:
    fields(value, where, ["bytes", "modified"], ["sha256"])
    integer(value["bytes"], f"{where}.bytes")
    integer(value["modified"], f"{where}.modified", low=-LARGEST)
    text(value.get("sha256", ""), f"{where}.sha256")


class NewerFormat(CheckpointError):
    """The checkpoint is whole but written by a later version, so it is not damaged."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and lower-case hex SHA-256 of a file of the step folder."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a step, without the numbers in its tensors.

    `state` is the caller's JSON object. `world` has named counts, among them `size` (ranks).
    """

    step: int
    state: dict[str, Any]
    world: dict[str, int]
    packages: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)


def dump(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest.json`, whose state has passed `check_json`.

    Raises `CheckpointError` if a reader would refuse them.
    """
    blocks = {
        "format": _line(FORMAT),
        "version": _line(VERSION),
        "step": _line(manifest.step),
        "state": _line(manifest.state),
        "world": _line(manifest.world),
        "packages": _line(manifest.packages),
        "files": _block({name: vars(file) for name, file in manifest.files.items()}),
        "tensors": _block({n: tensor_to_json(t) for n, t in manifest.tensors.items()}),
    }
    body = ",\n".join(f"{_line(key)}: {value}" for key, value in blocks.items()) + "}\n"
    data = sign(body.encode())
    if len(data) > MANIFEST_LIMIT:
        raise CheckpointError(f"{MANIFEST_NAME}: {len(data)} bytes, the limit is {MANIFEST_LIMIT}")
    parse(data, MANIFEST_NAME)
    return data


def sign(body: bytes) -> bytes:
    """Return a manifest: the line with the SHA-256 of `body`, followed by `body`."""
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def parse(data: bytes, source: str) -> Manifest:
    """Parse the bytes of a manifest; `source` names them in errors.

    Raises:
        CheckpointError: One line with the key at fault: wrong signature, type, range or name;
            unknown, missing or duplicate keys; a non-finite number; slices that overlap or leave a
            hole.
        NewerFormat: The version is newer than this program's.
    """
    signature = _SIGNATURE.match(data)
    if signature is None:
        raise CheckpointError(f"{source}: does not begin with the signature line of a manifest")
    if hashlib.sha256(data[_SIGNATURE_BYTES:]).hexdigest().encode() != signature[1]:
        raise CheckpointError(f"{source}: damaged: its bytes do not have the SHA-256 it states")
    try:
        return _manifest(strict_json(data), source)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: {one_line(error)}") from error


def _manifest(document: Any, source: str) -> Manifest:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"format: must be {FORMAT!r}")
    version = integer(document.get("version"), "version", low=1)
    if version > VERSION:
        raise NewerFormat(
            f"{source}: written in format version {version}, this program reads up to version "
            f"{VERSION}; use a newer sparsetron"
        )
    fields(document, "manifest", _KEYS)
    step = integer(document["step"], "step")
    check_state(document["state"], step)
    world = named(document["world"], "world", integer)
    if world.get("size", 0) < 1:
        raise ValueError("world.size: must be 1 or more")
    manifest = Manifest(
        step=step,
        state=document["state"],
        world=world,
        packages=named(document["packages"], "packages", text),
        files=named(document["files"], "files", _file_record),
        tensors=named(document["tensors"], "tensors", tensor_from_json),
    )
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"files[{show(name)}]: must be a plain name ending in .safetensors")
    check_tensors(manifest.tensors)
    for name, tensor in manifest.tensors.items():
        for number, part in enumerate(tensor.slices):
            if part.file not in manifest.files:
                raise ValueError(
                    f"tensors[{show(name)}].slices[{number}].file: {show(part.file)} is not listed"
                )
    return manifest


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _block(entries: Mapping[str, Any]) -> str:
    lines = ",\n".join(f" {_line(key)}: {_line(value)}" for key, value in entries.items())
    return "{\n" + lines + "\n}"


def _file_record(value: Any, where: str) -> FileRecord:
    fields(value, where, ["bytes", "sha256"])
    digest = text(value["sha256"], f"{where}.sha256")
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{where}.sha256: must be 64 hex digits, not {show(digest)}")
    return FileRecord(integer(value["bytes"], f"{where}.bytes"), digest)
