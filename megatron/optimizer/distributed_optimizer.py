"""Optimizer states of which each data-parallel rank keeps a part (ZeRO-1).

The cuts are those of the reducer's shards, wherever in a parameter they fall. Here is what follows
from that: how updated values reach every rank, how a state is put together again, and what of the
logical tensor a rank writes to a checkpoint and takes from it. Where nothing is sharded a rank's
part is the whole, and all of this holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.data_parallel.bucket import GradBucket, ParamInfo, Pending, ShardExchange
from megatron.data_parallel.engine import GradientEngine
from megatron.optimizer.host import beside
from megatron.parallel.tensor_shard import Corner
from megatron.transfer import to_device

PIECE = 1 << 20
"""Entries of a mask looked through at a time."""


class ShardUpdates:
    """Brings updated values to every data-parallel rank and into its parameters, one bucket while
    the next is being updated: `open`, `send` for each bucket in order, then `finish`.

    What travels is in the parameters' dtype. Where the gradients' entries are no narrower it lies
    in their memory, which the update is done with: no value is written before the gradients whose
    place it takes have been read, since entry i of it begins at no later byte than theirs.
    """

    def __init__(self, engine: GradientEngine) -> None:
        self._engine = engine
        self._open: tuple[GradBucket, torch.Tensor] | None = None
        self._sent: list[tuple[GradBucket, torch.Tensor, Pending]] = []

    def open(self, bucket: GradBucket) -> torch.Tensor:
        """Where the values of this rank's shard are to be written."""
        assert bucket.shard is not None and bucket.storage is not None
        dtype = self._engine.infos[bucket.names[0]].param.dtype
        if dtype.itemsize <= bucket.storage.element_size():
            parts = bucket.storage.view(dtype)[: bucket.shard.length]
        else:
            parts = bucket.storage.new_zeros(bucket.shard.length, dtype=dtype)
        self._open = bucket, parts
        return bucket.shard.where.of(parts)

    def send(self) -> None:
        """They are written: let them go; take in those of the bucket before."""
        assert self._open is not None
        bucket, parts = self._open
        assert bucket.shard is not None
        self._sent.append((bucket, parts, bucket.shard.exchange.gather(parts)))
        if len(self._sent) > 1:
            self._receive()

    def finish(self) -> None:
        """Take in what is left: parameters are up to date."""
        while self._sent:
            self._receive()

    def _receive(self) -> None:
        bucket, parts, pending = self._sent.pop(0)
        # Batch step 12: scatter all ranks' shards into the parameters.
        pending.wait()
        for name, where in bucket.slices.items():
            param = self._engine.infos[name].param.detach()
            self._engine.layout.scatter(name, where.of(parts), param)
        bucket.zero_gaps()


@dataclass(frozen=True)
class StateShard:
    """What this rank has of a state of a parameter: `flat`, of its `stored` entries those from
    `first` on; `exchange` gets the others, None where there are no others."""

    flat: torch.Tensor
    first: int
    stored: int
    exchange: ShardExchange | None

    @classmethod
    def of(cls, bucket: GradBucket, name: str, flat: torch.Tensor) -> StateShard:
        """Of a parameter of this bucket."""
        exchange = None if bucket.shard is None else bucket.shard.exchange
        return cls(flat, bucket.kept_of(name).start, bucket.slices[name].numel, exchange)

    def whole(self) -> torch.Tensor:
        """All stored entries: a copy, and collective over the data-parallel group, unless this rank
        has them."""
        if self.exchange is None:
            return self.flat
        whole = self.flat.new_zeros(self.stored)
        whole[self.first : self.first + self.flat.numel()] = self.flat
        self.exchange.fill(whole)
        return whole


def bind(engine: GradientEngine, name: str, flat: torch.Tensor) -> None:
    """`BucketLayout.bind` of the entries that this rank keeps: what is sharded cannot be what the
    model reads, so parameters keep a storage of their own."""
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


def fill(engine: GradientEngine, name: str, flat: torch.Tensor, dense: torch.Tensor) -> None:
    """Write to `flat`, the entries of a state that this rank keeps as `BucketOptimizer.tensors`
    gives them, from the dense tensor on this tensor-parallel rank, with or without the padding at
    its end."""
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
    """What a rank saves of a state: entries `[flat[0], flat[1])` of the flattened box
    `[start, stop)` of the logical tensor, None for all of it, or of those the ones that are stored.
    `values`: 1-D."""

    start: Corner
    stop: Corner
    flat: tuple[int, int] | None
    values: torch.Tensor


def pieces(engine: GradientEngine, name: str, flat: torch.Tensor) -> Iterator[StateSlice]:
    """How to save the entries of a state that this rank keeps, `flat` as `BucketOptimizer.tensors`
    gives them; over the ranks that share a tensor they leave out none and bring none twice.
    Vocabulary padding is left out. A rank may have nothing to save."""
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
            yield StateSlice(start, stop, part, flat[begin:end])


def _ranges(info: ParamInfo) -> Iterator[tuple[tuple[Corner, Corner], tuple[int, int]]]:
    """The boxes of the logical tensor that are here, and where in the flattened one here each
    lies without gaps."""
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
    """Where in the flattened parameter of so many `entries` to cut before its stored entry
    `number`, of `stored`: at its ends if no stored entry is left out there."""
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
    """Number of stored entries before a place."""
    return place if mask is None else int(mask[:place].count_nonzero())
