"""Parameters and the flat buckets in which their gradients are reduced (does not import torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from megatron.parallel.tensor_shard import TensorShard

ALIGNMENT = 64
"""The alignment, in elements, of slices, chunks and shards.

Fused AdamW rounds the scalar tail of a tensor differently, so other boundaries would change bits.
"""
STATE_BLOCK = 256
"""Entries of a moment in fp16 or int8 that share a scale; slices and shards of such runs are
aligned to it, so that a block lies in one parameter and one shard."""


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """A logical parameter of the model, as the engine sees it.

    `leaves` share one storage; only an embedding tied to the output layer has two, with a gradient
    each. `logical_shape` is the shape of the whole tensor without vocabulary padding, which is
    always last on a rank. `tp_shard` is the part on this tensor-parallel rank, or None for the
    whole tensor. `partial`: the gradient of a replicated parameter is a term of a sum over
    tensor-parallel ranks, as for a norm that sees a part of the sequence. `tied`: another stage
    holds a copy, and the gradients of both copies are summed.
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
        """The leaf that represents the parameter if only its values matter."""
        return self.leaves[0]

    @property
    def tp_sharded(self) -> bool:
        """True if tensor-parallel ranks hold different parts of the tensor."""
        return self.tp_shard is not None

    @property
    def entries(self) -> int:
        """Number of entries of the whole tensor."""
        return math.prod(self.logical_shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part on this rank, without padding."""
        return self.logical_shape if self.tp_shard is None else self.tp_shard.local_shape

    @property
    def local_entries(self) -> int:
        """Number of entries on this rank, without padding, which follows the entries in memory."""
        return math.prod(self.local_shape)


@dataclass(frozen=True)
class Slice:
    """The positions `[start, start + numel)` of a parameter's stored entries in its bucket."""

    start: int
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of this slice of a bucket-sized flat tensor."""
        return flat[self.start : self.start + self.numel]


class Pending(Protocol):
    """A communication that has not completed yet."""

    def wait(self) -> object:
        """Block until the communication completes (on a GPU, block the current stream only)."""
        ...


class ShardExchange(Protocol):
    """Collectives that combine the shards of data-parallel ranks, in equal order on all ranks."""

    def gather(self, parts: torch.Tensor) -> Pending:
        """All-gather in place the 1-D contiguous `parts`, `BucketShard.length` entries long.

        This rank has set its own part.
        """
        ...

    def fill(self, flat: torch.Tensor) -> None:
        """Combine disjoint non-zero parts of an fp32 vector in place, bit by bit. Blocks."""
        ...


@dataclass(frozen=True, kw_only=True)
class BucketShard:
    """The positions `where` of a bucket whose master weights and moments this rank keeps (ZeRO-1).

    `length` is the total length of the equal shards of all data-parallel ranks, in rank order. The
    last shards may extend past the end of the bucket, over zeros.
    """

    where: Slice
    length: int
    exchange: ShardExchange


@dataclass(kw_only=True)
class GradBucket:
    """A flat run of parameters of one class; the unit that is reduced and updated.

    `grad` is the 1-D accumulation buffer; entries between slices are always 0. A reducer may
    replace `grad` when it commits a step. `tp_sharded`: the parameters are sharded over the
    tensor-parallel group; `partial`: their gradients must be summed over that group; `matrix`: the
    parameters have several axes. If optimizer states are sharded, `shard` is this rank's shard.
    `storage` then begins with `grad` and is as long as all shards, if the reducer needs that or
    `lends_grad`: updated values of all shards overwrite `storage`. Otherwise `grad` is needed after
    the update, and values are received in other memory. Slices and shards begin at multiples of
    `alignment`. `whole`: this bucket is this rank's shard of that one (`own_shard`).
    """

    index: int
    slices: dict[str, Slice]
    grad: torch.Tensor
    weight_decay: bool
    tied: bool
    tp_sharded: bool
    partial: bool = False
    matrix: bool = True
    shard: BucketShard | None = None
    storage: torch.Tensor | None = None
    lends_grad: bool = False
    alignment: int = ALIGNMENT
    whole: GradBucket | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Logical names of the parameters, in the order of their slices."""
        return tuple(self.slices)

    @property
    def numel(self) -> int:
        """Length of the flat bucket, including alignment gaps."""
        return self.grad.numel()

    @property
    def kept(self) -> Slice:
        """Positions whose master weights and moments this rank keeps."""
        return Slice(0, self.numel) if self.shard is None else self.shard.where

    @property
    def num_kept(self) -> int:
        """Number of positions of the bucket that this rank keeps."""
        return min(max(self.numel - self.kept.start, 0), self.kept.numel)

    def kept_of(self, name: str) -> Slice:
        """Return which stored entries of a parameter this rank keeps, possibly none."""
        where = self.slices[name]
        first = min(max(self.kept.start - where.start, 0), where.numel)
        past = min(max(self.kept.start + self.kept.numel - where.start, 0), where.numel)
        return Slice(first, past - first)

    def own_shard(self) -> GradBucket:
        """Return this rank's shard as a bucket whose gradient is a view of `storage`.

        Every parameter has a slice, which is empty if the shard has none of its entries. Padding at
        the end belongs to the gradient, so the shards of all ranks have equal length.
        """
        assert self.shard is not None and self.storage is not None
        own = self.shard.where
        kept = {name: self.kept_of(name) for name in self.slices}
        slices = {
            # An empty slice may start anywhere.
            name: Slice(max(self.slices[name].start + each.start - own.start, 0), each.numel)
            for name, each in kept.items()
        }
        return replace(
            self,
            slices=slices,
            grad=own.of(self.storage),
            shard=None,
            storage=None,
            lends_grad=False,
            whole=self,
        )

    def zero_gaps(self) -> None:
        """Zero the gaps between and after the slices, which another use of the memory overwrote."""
        storage, end = self.grad if self.storage is None else self.storage, 0
        for where in self.slices.values():
            storage[end : where.start].zero_()
            end = where.start + where.numel
        storage[end:].zero_()
