"""Save and open a step folder: tensors of all ranks, copied to host memory first where asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
"""Bytes of which each copy of a snapshot begins at a multiple: a view of any dtype can."""
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
class LocalShard:
    """The part of a tensor that one rank writes.

    `tensor` holds the box `[start, stop)` of the logical tensor `name` of `shape`, in row-major
    order (its own shape does not matter).

    `flat`: only entries `[a, b)` of the flattened box. `mask`: only entries at which the saved
    boolean tensor of that name equals `mask_value`. `per_rank`: each data-parallel rank has its
    own; the first axis counts them (see `of_rank`). A shard without entries is legal and is how
    an empty tensor is saved.
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


def whole(name: str, tensor: torch.Tensor) -> LocalShard:
    """The shard of a rank that writes all of a tensor."""
    shape = tuple(tensor.shape)
    return LocalShard(name, tensor, shape, (0,) * len(shape), shape)


def of_rank(shard: LocalShard, *, data_parallel_rank: int, data_parallel_size: int) -> LocalShard:
    """Return the shard of a tensor of which each data-parallel rank has its own.

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
    """Return the shard over a copy of its tensor in host memory, which nothing else writes to."""
    tensor = shard.tensor.detach()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return replace(shard, tensor=copy.copy_(tensor))


class Snapshots:
    """Copies of shards in host memory, for a save that is written while training goes on.

    Copies of tensors on a GPU lie in one block of page-locked memory, to which the GPU copies at
    its full rate, one tensor after another without a wait between them. To lock pages takes long,
    so the block stays for the next save, whose copies take the place of these.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def take(self, shards: Sequence[LocalShard]) -> list[LocalShard]:
        """Copy the shards. Nobody may read what an earlier call returned any more.

        Raises:
            CheckpointError: The block cannot be had.
        """
        staged = iter(self.stage([shard for shard in shards if shard.tensor.is_cuda]))
        return [next(staged) if shard.tensor.is_cuda else snapshot(shard) for shard in shards]

    def stage(self, shards: Sequence[LocalShard]) -> list[LocalShard]:
        """Copy the shards to the block, whatever device they are on."""
        if not shards:
            return []
        rooms = [-(-shard.tensor.nbytes // ALIGNMENT) * ALIGNMENT for shard in shards]
        self._make_room(sum(rooms))
        starts = accumulate(rooms, initial=0)
        copies = [self._stage(shard, at) for shard, at in zip(shards, starts, strict=False)]
        torch.cuda.current_stream().synchronize()
        return copies

    def _stage(self, shard: LocalShard, start: int) -> LocalShard:
        tensor = shard.tensor.detach()
        octets = self._block[start : start + tensor.nbytes]
        copy = octets.view(tensor.dtype).view(tensor.shape)
        return replace(shard, tensor=copy.copy_(tensor, non_blocking=True))

    def _make_room(self, size: int) -> None:
        if size <= self._block.numel():
            return
        # The old block goes first: there may be no memory for both.
        self._block = torch.empty(0, dtype=torch.uint8)
        try:
            self._block = pinned_zeros(size, torch.uint8)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"async_save: {size} bytes of page-locked host memory for a copy of this rank's "
                f"state cannot be had ({str(error).partition(chr(10))[0]}); give the job more "
                "memory, or start without --async-save"
            ) from None


def owner(sizes: Mapping[str, int], data_parallel_size: int) -> dict[str, int]:
    """Return which data-parallel rank writes each of the tensors that all of them hold.

    Greedy: largest first, to the rank with the least so far; ties by name, then by lower rank.
    A function of its arguments alone, so ranks agree without asking.
    """
    load = [0] * data_parallel_size
    result: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = load.index(min(load))
        load[rank] += sizes[name]
        result[name] = rank
    return result


def owned(tensors: Mapping[str, torch.Tensor], rank: int, world: int) -> list[LocalShard]:
    """The shards of this rank where all ranks hold all of `tensors`."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    owners = owner(sizes, world)
    return [whole(name, tensor) for name, tensor in tensors.items() if owners[name] == rank]


def part_of(shards: Iterable[LocalShard], file: str) -> RankWrites:
    """Return a rank's part of a save: items for its `file`, and the records of their tensors.

    Raises `CheckpointError` naming the tensor.
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
    if shard.tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{shard.name}: {shard.tensor.dtype} cannot be saved")
    return TensorRecord(
        shape=tuple(shard.shape),
        dtype=DTYPE_NAMES[shard.tensor.dtype],
        slices=(),
        scope=DATA_PARALLEL if shard.per_rank else SHARED,
        mask=MaskRecord(shard.mask, shard.mask_value) if shard.mask is not None else None,
    )


def _check_count(shard: LocalShard, count: int) -> None:
    if shard.tensor.numel() != count:
        raise CheckpointError(
            f"{shard.name}: shard {list(shard.start)} to {list(shard.stop)} has {count} entries, "
            f"its tensor {shard.tensor.numel()}"
        )


def _item(shard: LocalShard, part: SliceRecord) -> TensorToWrite:
    tensor = shard.tensor
    if tensor.dtype == torch.bool:
        shape: tuple[int, ...] = ((tensor.numel() + 7) // 8,)
    elif shard.flat is not None or shard.mask is not None:
        shape = (tensor.numel(),)
    else:
        shape = part.shape
    dtype = "U8" if tensor.dtype == torch.bool else DTYPE_NAMES[tensor.dtype]
    return TensorToWrite(key=part.key, dtype=dtype, shape=shape, data=lambda: _bytes(tensor))


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Row-major bytes: a view where the tensor is contiguous on the CPU, else one copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # A tensor of one entry counts as contiguous whatever its stride, and views refuse that.
    flat = flat.as_strided((flat.numel(),), (1,))
    if flat.dtype == torch.bool:
        return np.packbits(flat.numpy(), bitorder="little").data
    return flat.view(torch.uint8).numpy().data


__all__ = [
    "Checkpoint",
    "LocalShard",
    "Snapshots",
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
    """Write `directory/step_%08d`, whole or not at all.

    Every rank calls, and all return its path or all raise the same `CheckpointError`.

    `tensors`: the shards that this rank writes (together each entry exactly once), or a mapping of
    whole tensors that every rank holds alike, which is then spread over the ranks by `owner`.
    `state`: JSON; that of rank 0 is saved, as are `grid` (sizes by name) and `packages` (versions).
    `gather` is called four times. A step that is there already: nothing changes if the bytes are
    the same, else the old one is renamed `.replaced-N`, or `.damaged-N` if it does not verify.
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
    """A committed step, open for reading. Usable in a `with` statement.

    Several ranks may have the same one open; each reads the pages it asks for. All tensors it
    returns are new, contiguous and on the CPU.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._reader = FolderReader(path, manifest)

    @classmethod
    def open(cls, path: Path | str, *, verify: bool | Collection[str] = True) -> Checkpoint:
        """Open a step folder.

        `verify`: True checks everything in it; names of files hash those only (ranks can share the
        work); False reads the manifest, and each file's header when it is first needed. Raises
        `CheckpointError` naming file and key.
        """
        folder = Path(path)
        if verify is False:
            return cls(folder, read_manifest(folder))
        return cls(folder, verify_folder(folder, hashes=verify))

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
        """Let go of the files; reading again opens them again."""
        self._reader.close()

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The JSON object that was saved with it."""
        return self.manifest.state

    @property
    def world(self) -> dict[str, int]:
        """Number of ranks that saved it (`size`), and the grid's sizes by name."""
        return self.manifest.world

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """Names of its tensors, sorted."""
        return tuple(sorted(n for n in self.manifest.tensors if n.startswith(prefix)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape; the first axis of a per-rank tensor counts the ranks that saved it."""
        return self._reader.record(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype that `read` returns."""
        return _DTYPES[self._reader.record(name).dtype]

    def per_rank(self, name: str) -> bool:
        """Return whether each data-parallel rank saved its own."""
        return self._reader.record(name).scope == DATA_PARALLEL

    def mask(self, name: str) -> str | None:
        """Name of the boolean tensor that tells which entries are stored, None if all are."""
        mask = self._reader.record(name).mask
        return mask.name if mask is not None else None

    def read(
        self, name: str, start: Sequence[int] | None = None, stop: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The box `[start, stop)` of a tensor, by default all of it, however it was saved.

        Entries that its mask left out are 0. Raises `CheckpointError` for an unknown name and for
        a box outside the tensor.
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
        """Entries `[start, stop)` of the flattened tensor, or of the flattened box given: 1-D."""
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
    """View of a tensor's memory as integers of its width; booleans stay booleans."""
    if tensor.dtype == torch.bool:
        return tensor.numpy()
    return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def _moved(corner: Sequence[int], origin: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(corner, origin, strict=True))
