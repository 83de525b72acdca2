"""What a rank writes of each tensor, and the bytes of it.

A shard is said in terms of the logical tensor; what file and key it gets is settled here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from megatron.checkpoint.commit import Part
from megatron.checkpoint.tensorfile import Item
from megatron.checkpoint.tensors import (
    DATA_PARALLEL,
    SHARED,
    MaskRecord,
    SliceRecord,
    TensorRecord,
)
from megatron.errors import CheckpointError
from megatron.optimizer.pinned import pinned_zeros

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
class Shard:
    """What one rank writes of a tensor: `tensor` holds the box `[start, stop)` of the logical
    tensor `name` of `shape`, in row-major order (its own shape does not matter).

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


def whole(name: str, tensor: torch.Tensor) -> Shard:
    """The shard of a rank that writes all of a tensor."""
    shape = tuple(tensor.shape)
    return Shard(name, tensor, shape, (0,) * len(shape), shape)


def of_rank(shard: Shard, *, data_parallel_rank: int, data_parallel_size: int) -> Shard:
    """The same shard of a tensor of which each data-parallel rank has its own: saved with a first
    axis that counts the ranks, so `Checkpoint.read(name).mean(0)` is their mean."""
    return replace(
        shard,
        shape=(data_parallel_size, *shard.shape),
        start=(data_parallel_rank, *shard.start),
        stop=(data_parallel_rank + 1, *shard.stop),
        per_rank=True,
    )


def snapshot(shard: Shard) -> Shard:
    """The same shard over a copy of its tensor in host memory, which nobody writes to."""
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

    def take(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copy the shards. Nobody may read what an earlier call returned any more.

        Raises:
            CheckpointError: The block cannot be had.
        """
        staged = iter(self.stage([shard for shard in shards if shard.tensor.is_cuda]))
        return [next(staged) if shard.tensor.is_cuda else snapshot(shard) for shard in shards]

    def stage(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copy the shards to the block, whatever device they are on."""
        if not shards:
            return []
        rooms = [-(-shard.tensor.nbytes // ALIGNMENT) * ALIGNMENT for shard in shards]
        self._make_room(sum(rooms))
        starts = accumulate(rooms, initial=0)
        copies = [self._stage(shard, at) for shard, at in zip(shards, starts, strict=False)]
        torch.cuda.current_stream().synchronize()
        return copies

    def _stage(self, shard: Shard, start: int) -> Shard:
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
    """Which data-parallel rank writes each of the tensors that all of them hold.

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


def owned(tensors: Mapping[str, torch.Tensor], rank: int, world: int) -> list[Shard]:
    """The shards of this rank where all ranks hold all of `tensors`."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    owners = owner(sizes, world)
    return [whole(name, tensor) for name, tensor in tensors.items() if owners[name] == rank]


def part_of(shards: Iterable[Shard], file: str) -> Part:
    """What a rank brings to a save: items for its `file`, and the records of their tensors.
    Raises `CheckpointError` naming the tensor."""
    records: dict[str, TensorRecord] = {}
    items: list[Item] = []
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
    return Part(items, records)


def _record(shard: Shard) -> TensorRecord:
    if shard.tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{shard.name}: {shard.tensor.dtype} cannot be saved")
    return TensorRecord(
        shape=tuple(shard.shape),
        dtype=DTYPE_NAMES[shard.tensor.dtype],
        slices=(),
        scope=DATA_PARALLEL if shard.per_rank else SHARED,
        mask=MaskRecord(shard.mask, shard.mask_value) if shard.mask is not None else None,
    )


def _check_count(shard: Shard, count: int) -> None:
    if shard.tensor.numel() != count:
        raise CheckpointError(
            f"{shard.name}: shard {list(shard.start)} to {list(shard.stop)} has {count} entries, "
            f"its tensor {shard.tensor.numel()}"
        )


def _item(shard: Shard, part: SliceRecord) -> Item:
    tensor = shard.tensor
    if tensor.dtype == torch.bool:
        shape: tuple[int, ...] = ((tensor.numel() + 7) // 8,)
    elif shard.flat is not None or shard.mask is not None:
        shape = (tensor.numel(),)
    else:
        shape = part.shape
    dtype = "U8" if tensor.dtype == torch.bool else DTYPE_NAMES[tensor.dtype]
    return Item(key=part.key, dtype=dtype, shape=shape, data=lambda: _bytes(tensor))


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Row-major bytes: a view where the tensor is contiguous on the CPU, else one copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # A tensor of one entry counts as contiguous whatever its stride, and views refuse that.
    flat = flat.as_strided((flat.numel(),), (1,))
    if flat.dtype == torch.bool:
        return np.packbits(flat.numpy(), bitorder="little").data
    return flat.view(torch.uint8).numpy().data
