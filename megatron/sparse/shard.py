"""Where the entries that a tensor-parallel rank holds lie in the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """Where this rank's `numel` entries lie among the `total` of a tensor: local entry i is entry
    i // row * stride + offset + i % row."""

    numel: int
    total: int
    row: int = 1
    stride: int = 1
    offset: int = 0

    @classmethod
    def cut(cls, shape: Sequence[int], *, axis: int, rank: int, ranks: int) -> Shard:
        """The `rank`-th of equal parts of a tensor of this shape, cut along an axis."""
        assert shape[axis] % ranks == 0, "parts are equal"
        total = math.prod(shape)
        stride = math.prod(shape[axis:])
        row = stride // ranks
        if axis == 0:
            return cls(row, total, offset=rank * row)
        return cls(total // ranks, total, row, stride, rank * row)

    @property
    def is_run(self) -> bool:
        """Whether the entries lie side by side in the whole tensor."""
        return self.row == self.stride

    def logical(self, local: torch.Tensor) -> torch.Tensor:
        """Positions in the whole tensor of local ones (int64)."""
        if self.is_run:
            return local + self.offset
        rows = local // self.row
        return rows * (self.stride - self.row) + local + self.offset

    def local(self, logical: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Local positions of entries of the whole tensor (int64), and which of them are on this
        rank: the positions of others mean nothing."""
        moved = logical - self.offset
        rows = moved // self.stride
        within = moved - rows * self.stride
        found = rows * self.row + within
        return found, (within < self.row) & (found >= 0) & (found < self.numel)
