"""Optimizer states in a checkpoint that are not fp32: their scales and compensations.

A state `exp_avg` whose blocks have scales is saved as two tensors: `exp_avg/NAME` has the shape of
the logical tensor and holds numbers to be scaled, `exp_avg_scale/NAME` [parts, blocks] has a row
for each tensor-parallel part of the tensor, one scale for each block of the part's stored entries.
Kahan's compensation of the weights is `param_compensation/NAME`, shaped as the weights.

A run whose parts and masks are those of the checkpoint loads the numbers as they are. Otherwise its
blocks are others, so the states are decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.checkpoint.format import Box, common, volume, within
from megatron.checkpoint.store import Checkpoint, LocalShard
from megatron.data_parallel.bucket import STATE_BLOCK, GradBucket, ParamInfo
from megatron.optimizer.state_formats import (
    Fp16Moment,
    Int8Moment,
    StateFormat,
    StateVector,
    Uint8SquareMoment,
)
from megatron.parallel.groups import ProcessGroups
from megatron.parallel.tensor_shard import TensorShard

_SCALED: dict[torch.dtype, StateFormat] = {
    torch.float16: Fp16Moment(),
    torch.int8: Int8Moment(),
    torch.uint8: Uint8SquareMoment(),
}
"""The formats with scales by the dtype of their numbers."""


def scale_name(kind: str, name: str) -> str:
    """Return the name of a state's scales."""
    return f"{kind}_scale/{name}"


def compensation_name(kind: str, name: str) -> str:
    """Return the name of a state's compensation."""
    return f"{kind}_compensation/{name}"


def scale_shards(
    groups: ProcessGroups, bucket: GradBucket, info: ParamInfo, kind: str, scales: torch.Tensor
) -> Iterator[LocalShard]:
    """Yield the scales that this rank writes, of the blocks whose state it keeps, if any.

    `scales` are those of `StateVector.scales` of the entries of `GradBucket.kept_of`. Rows end in
    zeros where other parts have more blocks.
    """
    (parts, blocks), row = _scale_shape(groups, info)
    start, stop = _kept_blocks(groups, bucket, info, blocks)
    if start < stop:
        written = torch.zeros(stop - start, dtype=torch.float32)
        count = min(scales.numel(), written.numel())
        written[:count] = scales[:count]
        name = scale_name(kind, info.name)
        yield LocalShard(name, written, (parts, blocks), (row, start), (row + 1, stop))


def read_scales(
    saved: Checkpoint,
    groups: ProcessGroups,
    bucket: GradBucket,
    info: ParamInfo,
    kind: str,
    scales: torch.Tensor,
) -> None:
    """Write the scales of a checkpoint with this run's blocks to `scales`, in place."""
    (_, blocks), row = _scale_shape(groups, info)
    start, stop = _kept_blocks(groups, bucket, info, blocks)
    if start < stop:
        found = saved.read(scale_name(kind, info.name), (row, start), (row + 1, stop)).view(-1)
        scales[: found.numel()] = found[: scales.numel()]


def has_same_blocks(
    saved: Checkpoint,
    groups: ProcessGroups,
    info: ParamInfo,
    kind: str,
    boxes: Sequence[Box],
    exists: torch.Tensor,
) -> bool:
    """Return whether a state's blocks in the checkpoint are those of this run.

    `boxes` are this rank's boxes of the logical tensor, `exists` marks their stored entries (bool).
    """
    shape, row = _scale_shape(groups, info)
    name = scale_name(kind, info.name)
    if tuple(saved.shape(name)) != shape:
        return False
    theirs = _parts(saved, f"{kind}/{info.name}", shape[0])[row]
    mask = saved.mask(f"{kind}/{info.name}")
    if theirs != list(boxes):
        return False
    if mask is None:
        return bool(exists.all())
    return torch.equal(_joined(saved, mask, theirs).view(-1), exists)


def decoded(
    saved: Checkpoint, kind: str, name: str, boxes: Sequence[tuple[Box, Box]], shape: Sequence[int]
) -> torch.Tensor:
    """Return a state with scales, of a checkpoint with any blocks, for this rank: fp32 of `shape`.

    `boxes` are this rank's boxes of the logical tensor, with their positions in its part.
    """
    file = f"{kind}/{name}"
    out = torch.zeros(tuple(shape))
    mask, parts = saved.mask(file), saved.shape(scale_name(kind, name))[0]
    for row, theirs in enumerate(_parts(saved, file, parts)):
        if not any(common(one, mine) for one in theirs for mine, _ in boxes):
            continue
        numbers = _joined(saved, file, theirs)
        exists = torch.ones(numbers.shape, dtype=torch.bool)
        if mask is not None:
            exists = _joined(saved, mask, theirs)
        stored = numbers[exists]
        scales = saved.read(scale_name(kind, name), (row, 0), (row + 1, _row(saved, kind, name)))
        state = StateVector(_SCALED[stored.dtype], stored, scales.view(-1))
        values = torch.zeros(numbers.shape).masked_scatter_(exists, state.read())
        for one, part in zip(theirs, _split(values, theirs), strict=True):
            for mine, at in boxes:
                if (both := common(one, mine)) is not None:
                    moved = tuple(m - a for m, a in zip(mine[0], at[0], strict=True))
                    out[within(both, moved)] = part[within(both, one[0])]
    return out


def _row(saved: Checkpoint, kind: str, name: str) -> int:
    return saved.shape(scale_name(kind, name))[1]


def _scale_shape(groups: ProcessGroups, info: ParamInfo) -> tuple[tuple[int, int], int]:
    """Return the shape of a parameter's scales, and this rank's row."""
    if (shard := info.tp_shard) is None:
        return (1, _blocks(info.local_entries)), 0
    ranks = groups.tp.size
    parts = [
        TensorShard.evenly(
            shard.shape, axis=shard.axis, rank=rank, ranks=ranks, blocks=shard.blocks
        )
        for rank in range(ranks)
    ]
    return (ranks, max(_blocks(part.local_entries) for part in parts)), groups.tp.rank


def _kept_blocks(
    groups: ProcessGroups, bucket: GradBucket, info: ParamInfo, blocks: int
) -> tuple[int, int]:
    """Return the blocks `[start, stop)` of a row that this rank saves and loads.

    Vocabulary padding is left out, and the last rank has the end of the row.
    """
    stored, kept = bucket.slices[info.name].numel, bucket.kept_of(info.name)
    if not stored:
        return 0, 0 if bucket.shard is not None and groups.dp.rank else blocks
    start, stop = kept.start // STATE_BLOCK, _blocks(kept.start + kept.numel)
    if not kept.numel:
        return 0, 0
    is_last = kept.start + kept.numel == stored
    return min(start, blocks), blocks if is_last else min(stop, blocks)


def _blocks(entries: int) -> int:
    return -(-entries // STATE_BLOCK)


def _parts(saved: Checkpoint, file: str, parts: int) -> list[list[Box]]:
    """Return the boxes of each saved part of a tensor, in the order of the ranks."""
    boxes = saved.boxes(file)
    return [boxes[row::parts] for row in range(parts)]


def _axis(boxes: Sequence[Box]) -> int:
    """Return the axis along which the boxes of a part lie behind one another."""
    starts = [start for start, _ in boxes]
    return next((axis for axis, at in enumerate(zip(*starts, strict=True)) if len(set(at)) > 1), 0)


def _joined(saved: Checkpoint, name: str, boxes: Sequence[Box]) -> torch.Tensor:
    """Read a part of a tensor: its boxes, side by side as in the part."""
    found = [
        saved.read(name, *box).view([b - a for a, b in zip(*box, strict=True)]) for box in boxes
    ]
    return torch.cat(found, dim=_axis(boxes))


def _split(part: torch.Tensor, boxes: Sequence[Box]) -> Sequence[torch.Tensor]:
    """Return the boxes of a part that `_joined` joined."""
    assert all(volume(box) == volume(boxes[0]) for box in boxes), "blocks are equal"
    return part.chunk(len(boxes), dim=_axis(boxes))
