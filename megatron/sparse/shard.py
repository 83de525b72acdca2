"""Where the entries that a tensor-parallel rank holds lie in the whole tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.parallel.cut import Cut


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
    def of(cls, cut: Cut) -> Shard:
        """The flattened part that a cut leaves to this rank."""
        inner = math.prod(cut.shape[cut.axis + 1 :])
        row, stride = (cut.stop - cut.start) * inner, cut.block * inner
        numel, total, offset = cut.local_entries, math.prod(cut.shape), cut.start * inner
        if numel == row:  # one run, wherever it begins
            return cls(numel, total, offset=offset)
        return cls(numel, total, row, stride, offset)

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

    def below(self, logical: int) -> int:
        """How many of this rank's entries come before entry `logical` of the whole tensor."""
        moved = logical - self.offset
        if moved <= 0:
            return 0
        if self.is_run:
            return min(moved, self.numel)
        rows, within = divmod(moved, self.stride)
        return min(rows * self.row + min(within, self.row), self.numel)
