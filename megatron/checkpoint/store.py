"""Saving and opening of a step folder with torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch

from megatron.checkpoint.format import (
    DATA_PARALLEL,
    SHARED,
    Box,
    Manifest,
    MaskRecord,
    SliceRecord,
    TensorRecord,
    flat_boxes,
    volume,
)
from megatron.checkpoint.io import FILES, Files, TensorToWrite
from megatron.checkpoint.reader import FolderReader
from megatron.checkpoint.verify import read_manifest, verify_folder
from megatron.checkpoint.writer import Gather, RankWrites, Save, alone, file_name
from megatron.errors import CheckpointError
from megatron.optimizer.pinned_memory import pinned_zeros

ALIGNMENT = 64
"""Alignment in bytes of the copies in a snapshot, so that any dtype can view them."""
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes that can be saved, with safetensors' names for them."""


@dataclass(frozen=True)
class Chosen:
    """The `count` entries of a 1-D tensor at which the bool tensor `where()` is True."""

    count: int
    where: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class LocalShard:
    """The part of a tensor that one rank writes.

    A shard without entries is legal; an empty tensor is saved as one.

    Attributes:
        tensor: The box `[start, stop)` of the logical tensor `name` of `shape`, in row-major order
            (its own shape does not matter).
        flat: Only entries `[a, b)` of the flattened box.
        mask: Only entries at which the saved boolean tensor of that name equals `mask_value`.
        per_rank: Each data-parallel rank has its own tensor; the first axis counts the ranks (see
            `of_rank`).
        dtype: Dtype in which the tensor is saved; it is converted when it is written, one tensor at
            a time. None for its own.
        chosen: The shard has only these entries of `tensor`. They are copied when they are written,
            so that the copies of all shards are not in memory at once.
        make: Makes the tensor each time that it is written; `tensor`, on the meta device, has its
            shape and dtype. None: it is `tensor`.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    flat: tuple[int, int] | None = None
    mask: str | None = None
    mask_value: bool = True
    per_rank: bool = False
    dtype: torch.dtype | None = None
    chosen: Chosen | None = None
    make: Callable[[], torch.Tensor] | None = None

    @property
    def saved_dtype(self) -> torch.dtype:
        """Dtype of the saved tensor."""
        return self.dtype or self.tensor.dtype

    @property
    def count(self) -> int:
        """Number of entries."""
        return self.tensor.numel() if self.chosen is None else self.chosen.count

    @property
    def nbytes(self) -> int:
        """Bytes of the entries in memory."""
        return self.count * self.tensor.element_size()

    def entries(self) -> torch.Tensor:
        """Return the entries, on the tensor's device: a view of `tensor`, or a copy if chosen."""
        tensor = (self.tensor if self.make is None else self.make()).detach()
        return tensor if self.chosen is None else tensor[self.chosen.where().to(tensor.device)]


def whole(name: str, tensor: torch.Tensor) -> LocalShard:
    """Return the shard of a rank that writes a whole tensor."""
    shape = tuple(tensor.shape)
    return LocalShard(name, tensor, shape, (0,) * len(shape), shape)


def lazy(
    name: str, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], torch.Tensor]
) -> LocalShard:
    """Return the shard of a whole tensor that is made only when it is written."""
    return replace(whole(name, torch.empty(tuple(shape), dtype=dtype, device="meta")), make=make)


def of_rank(shard: LocalShard, *, data_parallel_rank: int, data_parallel_size: int) -> LocalShard:
    """Return the shard of a tensor that differs between data-parallel ranks.

    The tensor is saved with a first axis that counts the ranks, so `Checkpoint.read(name).mean(0)`
    is the mean over ranks.
    """
    return replace(
        shard,
        shape=(data_parallel_size, *shard.shape),
        start=(data_parallel_rank, *shard.start),
        stop=(data_parallel_rank + 1, *shard.stop),
        per_rank=True,
    )


def snapshot(shard: LocalShard) -> LocalShard:
    """Return the shard with its tensor copied to host memory of its own.

    Raises `CheckpointError` if the memory cannot be allocated.
    """
    tensor = shard.entries()
    try:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    except RuntimeError as error:
        raise _no_memory(tensor.nbytes, "host memory", error) from None
    return replace(shard, tensor=copy.copy_(tensor), chosen=None, make=None)


class Snapshots:
    """Copies of shards in host memory, for a save that is written while training goes on.

    Copies of GPU tensors are in one block of page-locked memory, so that the GPU copies at full
    rate without waits between tensors. Locking pages is slow, so the next save reuses the block and
    overwrites the copies.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def take(self, shards: Sequence[LocalShard]) -> list[LocalShard]:
        """Copy the shards. Invalidates the result of an earlier call.

        Raises:
            CheckpointError: The memory cannot be allocated.
        """
        staged = iter(self.stage([shard for shard in shards if shard.tensor.is_cuda]))
        return [next(staged) if shard.tensor.is_cuda else snapshot(shard) for shard in shards]

    def stage(self, shards: Sequence[LocalShard]) -> list[LocalShard]:
        """Copy the shards from any device to the block, and wait for the copies."""
        if not shards:
            return []
        rooms = [-(-shard.nbytes // ALIGNMENT) * ALIGNMENT for shard in shards]
        self._make_room(sum(rooms))
        starts = accumulate(rooms, initial=0)
        copies = [self._stage(shard, at) for shard, at in zip(shards, starts, strict=False)]
        torch.cuda.current_stream().synchronize()
        return copies

    def _stage(self, shard: LocalShard, start: int) -> LocalShard:
        tensor = shard.entries()
        octets = self._block[start : start + tensor.nbytes]
        copy = octets.view(tensor.dtype).view(tensor.shape)
        return replace(shard, tensor=copy.copy_(tensor, non_blocking=True), chosen=None, make=None)

    def _make_room(self, size: int) -> None:
        if size <= self._block.numel():
            return
        # The old block is freed first: there may be no memory for both.
        self._block = torch.empty(0, dtype=torch.uint8)
        try:
            self._block = pinned_zeros(size, torch.uint8)
        except (OSError, RuntimeError) as error:
            raise _no_memory(size, "page-locked host memory", error) from None


def _no_memory(size: int, kind: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"async_save: {size} bytes of {kind} for a copy of this rank's state cannot be had "
        f"({str(error).partition(chr(10))[0]}); give the job more memory, or start without "
        "--async-save"
    )


def owner(sizes: Mapping[str, int], data_parallel_size: int) -> dict[str, int]:
    """Return, by name, the data-parallel rank that writes a tensor that all of these ranks hold.

    The largest tensor comes first, and each goes to the rank with the fewest bytes so far. Ties go
    by name, then to the lower rank. The result depends on the arguments alone, so that ranks agree
    without communication. `sizes` are in bytes.
    """
    load = [0] * data_parallel_size
    result: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = load.index(min(load))
        load[rank] += sizes[name]
        result[name] = rank
    return result


def owned(tensors: Mapping[str, torch.Tensor], rank: int, world: int) -> list[LocalShard]:
    """Return the shards that this rank writes if all ranks hold all of `tensors`."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    owners = owner(sizes, world)
    return [whole(name, tensor) for name, tensor in tensors.items() if owners[name] == rank]


def part_of(shards: Iterable[LocalShard], file: str) -> RankWrites:
    """Return a rank's part of a save: items for its `file`, and the records of their tensors.

    Raises `CheckpointError`, naming the tensor, if shards are inconsistent or cannot be saved.
    """
    records: dict[str, TensorRecord] = {}
    items: list[TensorToWrite] = []
    for shard in shards:
        record = _record(shard)
        known = records.setdefault(shard.name, record)
        if replace(known, slices=()) != record:
            raise CheckpointError(
                f"{shard.name}: two shards of one rank disagree on its shape, dtype or mask"
            )
        if not len(shard.start) == len(shard.stop) == len(shard.shape):
            raise CheckpointError(f"{shard.name}: start, stop and shape must be of one length")
        part = SliceRecord(file, shard.name, tuple(shard.start), tuple(shard.stop), shard.flat)
        first, last = part.range
        if any(a >= b for a, b in zip(*part.box, strict=True)) or first == last:
            _check_count(shard, 0)
            continue
        if shard.mask is None:
            _check_count(shard, last - first)
        if known.slices:
            part = replace(part, key=f"{shard.name}#{len(known.slices)}")
        records[shard.name] = replace(known, slices=(*known.slices, part))
        items.append(_item(shard, part))
    return RankWrites(items, records)


def _record(shard: LocalShard) -> TensorRecord:
    if shard.saved_dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{shard.name}: {shard.saved_dtype} cannot be saved")
    return TensorRecord(
        shape=tuple(shard.shape),
        dtype=DTYPE_NAMES[shard.saved_dtype],
        slices=(),
        scope=DATA_PARALLEL if shard.per_rank else SHARED,
        mask=MaskRecord(shard.mask, shard.mask_value) if shard.mask is not None else None,
    )


def _check_count(shard: LocalShard, count: int) -> None:
    if shard.count != count:
        raise CheckpointError(
            f"{shard.name}: shard {list(shard.start)} to {list(shard.stop)} has {count} entries, "
            f"its tensor {shard.count}"
        )


def _item(shard: LocalShard, part: SliceRecord) -> TensorToWrite:
    saved = shard.saved_dtype
    if saved == torch.bool:
        shape: tuple[int, ...] = ((shard.count + 7) // 8,)
    elif shard.flat is not None or shard.mask is not None:
        shape = (shard.count,)
    else:
        shape = part.shape
    dtype = "U8" if saved == torch.bool else DTYPE_NAMES[saved]
    return TensorToWrite(
        key=part.key, dtype=dtype, shape=shape, data=lambda: _bytes(shard.entries().to(saved))
    )


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return row-major bytes: a view if the tensor is contiguous on the CPU, else a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # A tensor with one entry counts as contiguous whatever its stride, but cannot be viewed.
    flat = flat.as_strided((flat.numel(),), (1,))
    if flat.dtype == torch.bool:
        return np.packbits(flat.numpy(), bitorder="little").data
    return flat.view(torch.uint8).numpy().data


__all__ = [
    "Checkpoint",
    "Chosen",
    "LocalShard",
    "Snapshots",
    "lazy",
    "of_rank",
    "owner",
    "save_checkpoint",
    "snapshot",
    "whole",
]

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def save_checkpoint(
    directory: Path | str,
    *,
    step: int,
    tensors: Mapping[str, torch.Tensor] | Iterable[LocalShard],
    state: dict[str, Any],
    rank: int = 0,
    world: int = 1,
    gather: Gather = alone,
    grid: Mapping[str, int] | None = None,
    packages: Mapping[str, str] | None = None,
    log: Callable[[str], None] = lambda text: None,
    files: Files = FILES,
) -> Path:
    """Write `directory/step_%08d` completely or not at all.

    Every rank calls this function. All return the path, or all raise the same `CheckpointError`.
    If the step exists already, nothing changes if the bytes are the same; otherwise the old one is
    renamed `.replaced-N`, or `.damaged-N` if it does not verify.

    Args:
        directory: Folder of step folders, on a disk that all ranks see.
        step: Number of the step.
        tensors: The shards that this rank writes (all ranks together write each entry exactly
            once), or a mapping of whole tensors that every rank holds; these are then spread over
            the ranks by `owner`.
        state: JSON object; rank 0's is saved.
        rank: Number of this rank among those that save.
        world: Number of ranks that save.
        gather: All-gathers texts over these ranks; called four times.
        grid: Sizes by name; rank 0's are saved.
        packages: Versions by name; rank 0's are saved.
        log: Receives a line for each folder that is set aside, and if `latest` cannot be written.
        files: The system calls.
    """
    counts = {**(grid or {}), "size": world}
    manifest = Manifest(step=step, state=state, world=counts, packages=dict(packages or {}))
    save = Save(
        directory=Path(directory),
        manifest=manifest,
        rank=rank,
        gather=gather,
        log=log,
        files=files,
    )

    def part() -> RankWrites:
        if isinstance(tensors, Mapping):
            named = cast("Mapping[str, torch.Tensor]", tensors)
            return part_of(owned(named, rank, world), file_name(rank))
        return part_of(tensors, file_name(rank))

    return save.run(part)


class Checkpoint:
    """A committed step, open for reading; usable in a `with` statement.

    Several ranks may open the same step; each loads the pages that it reads. Returned tensors are
    new, contiguous and on the CPU.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._reader = FolderReader(path, manifest)

    @classmethod
    def open(cls, path: Path | str, *, verify: bool = True) -> Checkpoint:
        """Open a step folder.

        Args:
            path: The step folder.
            verify: True checks all its contents. False reads the manifest, and each file's header
                at first use.

        Raises:
            CheckpointError: The folder is damaged; the error names file and key.
        """
        folder = Path(path)
        return cls(folder, verify_folder(folder) if verify else read_manifest(folder))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._reader.close()

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The JSON object that was saved with the step."""
        return self.manifest.state

    @property
    def world(self) -> dict[str, int]:
        """Number of ranks that saved the step (`size`), and the grid's sizes by name."""
        return self.manifest.world

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """Return the sorted names of the tensors that begin with `prefix`."""
        return tuple(sorted(n for n in self.manifest.tensors if n.startswith(prefix)))

    def __contains__(self, name: object) -> bool:
        """Return whether there is a tensor of this name."""
        return name in self.manifest.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole shape; a per-rank tensor's first axis counts the ranks that saved."""
        return self._reader.record(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` returns."""
        return _DTYPES[self._reader.record(name).dtype]

    def boxes(self, name: str) -> list[Box]:
        """Return the boxes of which the slices of a tensor are, in ascending order."""
        return sorted({part.box for part in self._reader.record(name).slices})

    def mask(self, name: str) -> str | None:
        """Return the name of the boolean tensor that tells which entries are stored, else None."""
        mask = self._reader.record(name).mask
        return mask.name if mask is not None else None

    def read(
        self, name: str, start: Sequence[int] | None = None, stop: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Read the box `[start, stop)` of a tensor, by default all of it, however it was saved.

        Entries that its mask left out are 0. Raises `CheckpointError` for an unknown name and for a
        box outside the tensor.
        """
        box = self._box(name, start, stop)
        out = torch.empty([b - a for a, b in zip(*box, strict=True)], dtype=self.dtype(name))
        self._reader.fill(_numpy(out), name, box)
        return out

    def read_flat(
        self,
        name: str,
        start: int,
        stop: int,
        *,
        box_start: Sequence[int] | None = None,
        box_stop: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Read entries `[start, stop)` of the flattened tensor, or of the flattened box: 1-D.

        Raises `CheckpointError` as `read` does, and for entries outside the tensor or box.
        """
        box = self._box(name, box_start, box_stop)
        if not 0 <= start <= stop <= volume(box):
            raise CheckpointError(
                f"{self.path}: {name}: entries {start} to {stop} are outside its {volume(box)}"
            )
        out = torch.empty(stop - start, dtype=self.dtype(name))
        array = _numpy(out)
        done = 0
        shape = [b - a for a, b in zip(*box, strict=True)]
        for low, high in flat_boxes(shape, start, stop):
            region = _moved(low, box[0]), _moved(high, box[0])
            size = volume(region)
            extent = [b - a for a, b in zip(low, high, strict=True)]
            self._reader.fill(array[done : done + size].reshape(extent), name, region)
            done += size
        return out

    def _box(self, name: str, start: Sequence[int] | None, stop: Sequence[int] | None) -> Box:
        shape = self.shape(name)
        low = tuple(start) if start is not None else (0,) * len(shape)
        high = tuple(stop) if stop is not None else shape
        fits = len(low) == len(high) == len(shape) and all(
            0 <= a <= b <= n for a, b, n in zip(low, high, shape, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{self.path}: {name}: {list(low)} to {list(high)} is not a box in shape "
                f"{list(shape)}"
            )
        return low, high


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of a tensor as integers of its width; booleans stay booleans."""
    if tensor.dtype == torch.bool:
        return tensor.numpy()
    return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def _moved(corner: Sequence[int], origin: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(corner, origin, strict=True))
