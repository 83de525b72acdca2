"""Optimizer states that are sharded over data-parallel ranks (ZeRO-1).

Shards follow the reducer's shards of a bucket, whose boundaries may lie inside a parameter. This
module distributes updated values, gathers whole states, and maps a rank's shard to the logical
tensors of a checkpoint. Without sharding, a rank's shard is the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.data_parallel.bucket import GradBucket, ParamInfo, Pending, ShardExchange
from megatron.data_parallel.engine import GradientEngine
from megatron.optimizer.host import beside
from megatron.optimizer.state_formats import StateVector
from megatron.parallel.tensor_shard import Corner
from megatron.transfer import to_device

PIECE = 1 << 20
"""Number of mask entries that are scanned at a time."""


class ShardUpdates:
    """The all-gather of updated values, overlapped with the update of the next bucket.

    Call `open` and `send` for each of `buckets` in order, then `settle`. Values travel in the
    parameters' dtype. If gradients are no narrower and not needed any more
    (`GradBucket.lends_grad`), the values reuse the gradients' memory: value i begins at no later
    byte than gradient i, so no unread gradient is overwritten.
    """

    most_in_progress: float = 1
    """Number of all-gathers that `send` leaves in progress."""

    def __init__(self, engine: GradientEngine) -> None:
        self._engine = engine
        self._open: tuple[GradBucket, torch.Tensor] | None = None
        self._sent: dict[int, tuple[GradBucket, torch.Tensor, Pending]] = {}

    @property
    def buckets(self) -> Sequence[GradBucket]:
        """The buckets in the order in which they are updated and sent, equal on all ranks."""
        return self._engine.buckets

    def open(self, bucket: GradBucket) -> torch.Tensor:
        """Return the tensor to which the values of this rank's shard must be written."""
        assert bucket.shard is not None
        dtype = self._engine.infos[bucket.names[0]].param.dtype
        storage = bucket.storage if bucket.lends_grad else None
        if storage is not None and dtype.itemsize <= storage.element_size():
            parts = storage.view(dtype)[: bucket.shard.length]
        else:
            parts = bucket.grad.new_zeros(bucket.shard.length, dtype=dtype)
        self._open = bucket, parts
        return bucket.shard.where.of(parts)

    def send(self) -> None:
        """Start to gather the written values; then receive those of earlier buckets."""
        assert self._open is not None
        # Nothing may refer to the bucket once it is received: a rewiring frees it.
        (bucket, parts), self._open = self._open, None
        assert bucket.shard is not None
        self._sent[bucket.index] = bucket, parts, bucket.shard.exchange.gather(parts)
        while len(self._sent) > self.most_in_progress:
            self._receive(next(iter(self._sent)))

    def settle(self) -> None:
        """Receive the values that the caller must not leave in progress at the end of a step."""
        self.finish()

    def finish(self) -> None:
        """Receive the remaining values; all parameters are then up to date."""
        while self._sent:
            self._receive(next(iter(self._sent)))

    def _receive(self, index: int) -> None:
        bucket, parts, pending = self._sent.pop(index)
        # Batch step 12: scatter all ranks' shards into the parameters.
        pending.wait()
        for name, where in bucket.slices.items():
            param = self._engine.infos[name].param.detach()
            self._engine.layout.scatter(name, where.of(parts), param)
        if bucket.lends_grad:
            bucket.zero_gaps()


@dataclass(frozen=True)
class StateShard:
    """This rank's shard of one state (main weight or a moment) of a parameter.

    Attributes:
        state: Entries `[first, first + state.numel)` of the parameter's stored entries.
        first: Position of the shard's first entry among the stored entries.
        stored: Number of stored entries of the parameter, over all shards.
        exchange: Gathers the other shards; None if the state is not sharded.
    """

    state: StateVector
    first: int
    stored: int
    exchange: ShardExchange | None

    @classmethod
    def of(cls, bucket: GradBucket, name: str, state: StateVector) -> StateShard:
        """Construct the shard of a parameter of this bucket."""
        exchange = None if bucket.shard is None else bucket.shard.exchange
        return cls(state, bucket.kept_of(name).start, bucket.slices[name].numel, exchange)

    def whole(self) -> torch.Tensor:
        """Return all stored entries, fp32; copies a sharded state, collectively over its ranks."""
        flat = self.state.read()
        if self.exchange is None:
            return flat
        whole = flat.new_zeros(self.stored)
        whole[self.first : self.first + flat.numel()] = flat
        self.exchange.fill(whole)
        return whole


def bind(engine: GradientEngine, name: str, flat: torch.Tensor) -> None:
    """Bind the entries that this rank keeps, as `BucketLayout.bind` does.

    A sharded state cannot be what the model reads, so its parameter keeps a storage of its own.
    """
    bucket, where = engine.place(name)
    info = engine.infos[name]
    if bucket.shard is None:
        engine.layout.bind(name, flat, info.leaves)
        return
    param = info.param.detach()
    stored = flat.new_empty(where.numel)
    engine.layout.gather(name, param, stored)
    flat.copy_(bucket.kept_of(name).of(stored))
    if where.numel < param.numel():
        param.zero_()
        engine.layout.scatter(name, stored, param)


def encode(engine: GradientEngine, name: str, state: StateVector, dense: torch.Tensor) -> None:
    """Write this rank's entries of a dense tensor to a state, rounded to nearest in its format."""
    flat = state.values if state.is_fp32 else torch.empty_like(state.values, dtype=torch.float32)
    fill(engine, name, flat, dense)
    state.write(flat)


def fill(engine: GradientEngine, name: str, flat: torch.Tensor, dense: torch.Tensor) -> None:
    """Write this rank's entries of a dense tensor to a tensor of its state.

    Args:
        engine: The engine.
        name: Logical name of the parameter.
        flat: The tensor, as `BucketOptimizer.tensors` yields it; written in place.
        dense: The tensor on this tensor-parallel rank, with or without padding at its end.
    """
    bucket, where = engine.place(name)
    param = engine.infos[name].param
    if dense.numel() < param.numel():
        padded = dense.new_zeros(param.shape)
        padded.view(-1)[: dense.numel()] = dense.reshape(-1)
        dense = padded
    dense, layout = to_device(dense, flat.device), beside(engine.layout, flat, param)
    if flat.numel() == where.numel:
        layout.gather(name, dense, flat)
        return
    stored = flat.new_empty(where.numel)
    layout.gather(name, dense, stored)
    flat.copy_(bucket.kept_of(name).of(stored))


@dataclass(frozen=True)
class StateSlice:
    """A rank's part of a state in a checkpoint.

    `values` (1-D) are the stored ones among entries `[flat[0], flat[1])`, or all for None, of the
    flattened box `[start, stop)` of the logical tensor. These are entries `local` of the flattened
    part of this tensor-parallel rank.
    """

    start: Corner
    stop: Corner
    flat: tuple[int, int] | None
    values: torch.Tensor
    local: slice


def pieces(engine: GradientEngine, name: str, flat: torch.Tensor) -> Iterator[StateSlice]:
    """Yield the slices in which to save this rank's entries of a state, possibly none.

    `flat` is the state as `BucketOptimizer.tensors` yields it. Over the ranks that share a tensor,
    the slices are disjoint and complete. Vocabulary padding is excluded.
    """
    bucket, where = engine.place(name)
    info, mask = engine.infos[name], engine.layout.mask(name)
    kept = bucket.kept_of(name)
    entries = info.local_entries
    if kept.numel == 0:
        return
    first = _place(mask, kept.start, where.numel, entries)
    past = _place(mask, kept.start + kept.numel, where.numel, entries)
    for (start, stop), (low, high) in _ranges(info):
        low_here, high_here = max(low, first), min(high, past)
        if low_here < high_here:
            begin, end = (_count(mask, at) - kept.start for at in (low_here, high_here))
            part = (
                None if (low_here, high_here) == (low, high) else (low_here - low, high_here - low)
            )
            yield StateSlice(start, stop, part, flat[begin:end], slice(low_here, high_here))


def _ranges(info: ParamInfo) -> Iterator[tuple[tuple[Corner, Corner], tuple[int, int]]]:
    """Yield this rank's boxes of the logical tensor, with their ranges in the local flat tensor."""
    shape = info.logical_shape
    if info.tp_shard is None:
        yield ((0,) * len(shape), shape), (0, info.entries)
        return
    assert info.tp_shard.blocks == 1 or info.tp_shard.axis == 0, (
        "blocks of another axis lie in pieces"
    )
    entries = info.tp_shard.local_entries // info.tp_shard.blocks
    for number, (box, _) in enumerate(info.tp_shard.boxes()):
        yield box, (number * entries, (number + 1) * entries)


def _place(mask: torch.Tensor | None, number: int, stored: int, entries: int) -> int:
    """Return where the flat parameter splits before stored entry `number`."""
    if mask is None or number == 0:
        return min(number, entries)
    if number == stored:
        return entries
    seen = 0
    for start in range(0, mask.numel(), PIECE):
        part = mask[start : start + PIECE]
        here = int(part.count_nonzero())
        if number < seen + here:
            return start + int(part.nonzero()[number - seen])
        seen += here
    raise AssertionError("the mask has as many entries as are stored")


def _count(mask: torch.Tensor | None, place: int) -> int:
    """Return the number of stored entries before a position."""
    return place if mask is None else int(mask[:place].count_nonzero())
