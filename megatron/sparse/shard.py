"""The positions of a tensor-parallel rank's entries in the whole tensor."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron.transfer import to_device

if TYPE_CHECKING:
    from megatron.parallel.tensor_shard import TensorShard


@dataclass(frozen=True)
class FlatShard:
    """A map from this rank's `numel` entries to the `total` entries of a flattened tensor.

    Local entry i is entry j // row * stride + offset + j % row of the whole, where j = first + i.
    Irregular shards have `runs` instead: int64 [runs] on the CPU, the first local entry of each run
    and its position in the whole tensor, both ascending.
    """

    numel: int
    total: int
    row: int = 1
    stride: int = 1
    offset: int = 0
    first: int = 0
    runs: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, compare=False)
    _moved: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(cls, shard: TensorShard) -> FlatShard:
        """Flatten a tensor-parallel rank's shard of a tensor."""
        inner = math.prod(shard.shape[shard.axis + 1 :])
        row, stride = (shard.stop - shard.start) * inner, shard.block * inner
        numel, total, offset = shard.local_entries, math.prod(shard.shape), shard.start * inner
        if numel == row:  # one run
            return cls(numel, total, offset=offset)
        return cls(numel, total, row, stride, offset)

    @classmethod
    def of_stored(cls, counts: torch.Tensor, rank: int) -> FlatShard:
        """Create the shard of a tensor's stored entries, numbered among the stored entries only.

        `counts`, int64 [ranks, rows], are the entries that each rank stores of each of its rows.
        The whole tensor has the first row of every rank, in rank order, then the second, and so on.
        """
        places = counts.T.reshape(-1).cumsum(0).view(counts.shape[1], -1) - counts.T
        mine = counts[rank]
        starts = mine.cumsum(0) - mine
        return cls._of_runs(int(mine.sum()), int(counts.sum()), starts, places[:, rank], mine)

    @classmethod
    def _of_runs(
        cls,
        numel: int,
        total: int,
        starts: torch.Tensor,
        places: torch.Tensor,
        lengths: torch.Tensor,
    ) -> FlatShard:
        starts, places = starts[lengths > 0], places[lengths > 0]
        if starts.numel() < 2:
            return cls(numel, total, offset=int(places.sum()))
        return cls(numel, total, runs=(starts, places))

    def _runs_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `runs` on a device, copied at most once."""
        assert self.runs is not None
        if device not in self._moved:
            starts, places = self.runs
            self._moved[device] = to_device(starts, device), to_device(places, device)
        return self._moved[device]

    @property
    def is_run(self) -> bool:
        """True if the entries are contiguous in the whole tensor."""
        return self.row == self.stride and self.runs is None

    def logical(self, local: torch.Tensor) -> torch.Tensor:
        """Convert local positions (int64) to positions in the whole tensor."""
        if self.runs is not None:
            starts, places = self._runs_on(local.device)
            run = torch.searchsorted(starts, local, right=True) - 1
            return local + (places - starts)[run]
        if self.is_run:
            return local + self.offset
        moved = local + self.first
        return moved // self.row * (self.stride - self.row) + moved + self.offset

    def local(self, logical: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert positions in the whole tensor (int64) to local positions.

        Returns:
            The local positions, and a bool tensor that marks entries on this rank; the positions of
            other entries are undefined.
        """
        if self.runs is not None:
            starts, places = self._runs_on(logical.device)
            run = torch.searchsorted(places, logical, right=True) - 1
            found = starts[run] + logical - places[run]
            ends = F.pad(starts[1:], (0, 1), value=self.numel)
            return found, (run >= 0) & (found < ends[run])
        moved = logical - self.offset
        rows = moved // self.stride
        within = moved - rows * self.stride
        found = rows * self.row + within - self.first
        return found, (within < self.row) & (found >= 0) & (found < self.numel)

    def below(self, logical: int) -> int:
        """Return the number of this rank's entries before entry `logical` of the whole tensor."""
        if self.runs is not None:
            starts, places = self.runs
            run = int(torch.searchsorted(places, logical)) - 1
            end = int(starts[run + 1]) if run + 1 < starts.numel() else self.numel
            return min(int(starts[run]) + logical - int(places[run]), end) if run >= 0 else 0
        moved = logical - self.offset
        if not self.is_run:
            rows, within = divmod(moved, self.stride)
            moved = rows * self.row + min(within, self.row) - self.first
        return min(max(moved, 0), self.numel)

    def local_part(self, first: int, stop: int) -> FlatShard:
        """Return the shard that consists of this rank's entries `[first, stop)` only."""
        if first == stop:
            return FlatShard(0, self.total)
        if self.runs is not None:
            starts, places = self.runs
            ends = F.pad(starts[1:], (0, 1), value=self.numel)
            begin, end = starts.clamp(min=first), ends.clamp(max=stop)
            moved = places + begin - starts
            return self._of_runs(stop - first, self.total, begin - first, moved, end - begin)
        if self.is_run:
            return FlatShard(stop - first, self.total, offset=self.offset + first)
        return FlatShard(
            stop - first, self.total, self.row, self.stride, self.offset, self.first + first
        )

    def part(self, start: int, stop: int) -> FlatShard:
        """Return this rank's shard of the range `[start, stop)`, as if the range were the whole."""
        inside = self.local_part(self.below(start), self.below(stop))
        if not inside.numel:
            return FlatShard(0, stop - start)
        if inside.runs is not None:
            starts, places = inside.runs
            return FlatShard(inside.numel, stop - start, runs=(starts, places - start))
        return dataclasses.replace(
            inside, total=stop - start, offset=inside.offset - start, _moved={}
        )
