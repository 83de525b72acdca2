"""Which part of a tensor a tensor-parallel rank holds. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Corner = tuple[int, ...]


def even_share(length: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """`[start, stop)`, the `rank`-th of `ranks` shares of `length` entries, as equal as can be."""
    return length * rank // ranks, length * (rank + 1) // ranks


def padded_rows(length: int, *, rank: int, ranks: int, multiple: int) -> int:
    """Rows in a rank's memory of a table of `length` rows, of which it holds an even share."""
    start, stop = even_share(length, rank=rank, ranks=ranks)
    return -(-(stop - start) // multiple) * multiple


@dataclass(frozen=True)
class Cut:
    """Of each of `blocks` equal blocks of an axis of a tensor of `shape`, entries `[start, stop)`.

    One block for most tensors. A gated MLP's first projection, gate upon value, has two: a rank
    needs the same columns of both, and the whole tensor stays the same whatever the grid is.
    """

    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int
    blocks: int = 1

    def __post_init__(self) -> None:
        assert self.shape[self.axis] % self.blocks == 0, "blocks are equal"
        assert 0 <= self.start < self.stop <= self.block, "no rank is without entries"

    @classmethod
    def evenly(
        cls, shape: tuple[int, ...], *, axis: int, rank: int, ranks: int, blocks: int = 1
    ) -> Cut:
        """The `rank`-th of shares of each block that are as equal as can be."""
        start, stop = even_share(shape[axis] // blocks, rank=rank, ranks=ranks)
        return cls(shape, axis, start, stop, blocks)

    @property
    def block(self) -> int:
        """Length of a block along the axis."""
        return self.shape[self.axis] // self.blocks

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part: the shares of the blocks one after another."""
        length = self.blocks * (self.stop - self.start)
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    @property
    def local_entries(self) -> int:
        """Number of entries of the part."""
        return math.prod(self.local_shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of `shape`, as a tensor of `local_shape`; contiguous."""
        inner = self.shape[self.axis + 1 :]
        folded = whole.reshape(*self.shape[: self.axis], self.blocks, self.block, *inner)
        part = folded.narrow(self.axis + 1, self.start, self.stop - self.start)
        return part.reshape(self.local_shape).contiguous()

    def boxes(self) -> Iterator[tuple[tuple[Corner, Corner], tuple[Corner, Corner]]]:
        """For each block its share, as a box (start and stop corners) of the whole tensor and as
        one of the part."""
        share = self.stop - self.start
        for number in range(self.blocks):
            first, mine = number * self.block + self.start, number * share
            yield (
                _box(self.shape, self.axis, first, first + share),
                _box(self.local_shape, self.axis, mine, mine + share),
            )


def _box(shape: tuple[int, ...], axis: int, start: int, stop: int) -> tuple[Corner, Corner]:
    low = tuple(start if number == axis else 0 for number in range(len(shape)))
    high = tuple(stop if number == axis else size for number, size in enumerate(shape))
    return low, high
