"""Parameters and the flat buckets in which their gradients are reduced. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from megatron.parallel.tensor_shard import TensorShard

ALIGNMENT = 64
"""Elements. Fused AdamW rounds the scalar tail of a tensor differently, so slices, chunks and
shards all begin at multiples of this: other cuts would change bits."""


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """A logical parameter of the model, as the engine sees it.

    `leaves` are the autograd leaves over its one storage: one for most, two for an embedding tied
    to the output layer (each use accumulates its own gradient). `logical_shape` is that of the
    whole tensor and leaves out rows that exist in memory only (vocabulary padding, always last on
    a rank). `tp_shard`: the part of it on this tensor-parallel rank, None where each rank holds the
    whole. `partial`: the gradient that backward makes of a whole one is this rank's part of a
    sum over them, as of a norm that sees a part of the sequence.
    """

    name: str
    leaves: tuple[torch.nn.Parameter, ...]
    logical_shape: tuple[int, ...]
    tp_shard: TensorShard | None = None
    partial: bool = False
    tied: bool = False
    weight_decay: bool = True

    @property
    def param(self) -> torch.nn.Parameter:
        """The leaf that stands for the parameter where only values matter."""
        return self.leaves[0]

    @property
    def tp_sharded(self) -> bool:
        """Whether tensor-parallel ranks hold different parts of the tensor."""
        return self.tp_shard is not None

    @property
    def entries(self) -> int:
        """Number of entries of the whole tensor."""
        return math.prod(self.logical_shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what is on this rank, without padding."""
        return self.logical_shape if self.tp_shard is None else self.tp_shard.local_shape

    @property
    def local_entries(self) -> int:
        """Number of entries on this rank, without padding: they come first in its memory."""
        return math.prod(self.local_shape)


@dataclass(frozen=True)
class Slice:
    """Where a parameter's stored entries lie in its bucket: `[start, start + numel)`."""

    start: int
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """View of this slice of a bucket-sized flat tensor."""
        return flat[self.start : self.start + self.numel]


class Pending(Protocol):
    """Something sent that is not there yet."""

    def wait(self) -> object:
        """Block until it is (on a GPU: let what follows on the current stream wait)."""
        ...


class ShardExchange(Protocol):
    """Brings together what data-parallel ranks keep a part of each. Collective over them, in the
    same order on all; counted in the reducer's `ReducerStats`."""

    def gather(self, parts: torch.Tensor) -> Pending:
        """Let every rank have every rank's part of `parts`, 1-D, contiguous and as long as
        `BucketShard.length`, in which this rank has set its own; in place."""
        ...

    def fill(self, flat: torch.Tensor) -> None:
        """Let every rank have all entries of an fp32 vector in which each has set other ones and
        left zeros elsewhere; no bit of an entry changes. Blocks."""
        ...


@dataclass(frozen=True, kw_only=True)
class BucketShard:
    """The part of a bucket whose master weights and moments this data-parallel rank keeps and
    updates: `where`, one of equal parts of `length` positions in all, in rank order. The last parts
    may reach past the bucket's end, into nothing but zeros."""

    where: Slice
    length: int
    exchange: ShardExchange


@dataclass(kw_only=True)
class GradBucket:
    """A flat run of parameters of one class, the unit that is sent and updated.

    `grad` is the accumulation buffer, 1-D; entries between slices are 0 and stay 0. A reducer may
    put another of the kind in its place when it commits a step. `tp_sharded`: its parameters are
    cut over the tensor-parallel group; `partial`: their gradients are to be summed over it. Where
    optimizer states are sharded, `shard` says what this rank has of them and `storage` is the
    memory that `grad` begins, as long as all shards together."""

    index: int
    slices: dict[str, Slice]
    grad: torch.Tensor
    weight_decay: bool
    tied: bool
    tp_sharded: bool
    partial: bool = False
    shard: BucketShard | None = None
    storage: torch.Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Logical names of its parameters, in the order of their slices."""
        return tuple(self.slices)

    @property
    def numel(self) -> int:
        """Length of the flat bucket, alignment included."""
        return self.grad.numel()

    @property
    def kept(self) -> Slice:
        """Positions whose master weights and moments this rank keeps."""
        return Slice(0, self.numel) if self.shard is None else self.shard.where

    def kept_of(self, name: str) -> Slice:
        """Which of a parameter's stored entries those are; over the ranks they follow one another
        and leave out none. A rank may have none."""
        where = self.slices[name]
        first = min(max(self.kept.start - where.start, 0), where.numel)
        past = min(max(self.kept.start + self.kept.numel - where.start, 0), where.numel)
        return Slice(first, past - first)

    def zero_gaps(self) -> None:
        """Restore the zeros between slices, and after them, that another use of the memory took."""
        storage, end = self.grad if self.storage is None else self.storage, 0
        for where in self.slices.values():
            storage[end : where.start].zero_()
            end = where.start + where.numel
        storage[end:].zero_()
