"""Counting that finds the k-th largest magnitudes of several tensors at once.

The bits of a magnitude as fp32 are an integer, ordered as magnitudes are. A histogram over all of
them has a bin of 2^15 magnitudes that holds the k-th largest; a second histogram, over this bin,
has a bin for each magnitude, which gives the threshold. Where some entries at the threshold are
left out, two more counts give the position before which they are chosen: of such entries in each
TIE_BLOCK, then in one TIE_BLOCK.

`selection.py` calls the steps and sums their counts over the ranks that hold shards of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.sparse import reference
from megatron.sparse.reference import BINS, MAGNITUDE, TIE_BLOCK
from megatron.sparse.shard import FlatShard
from megatron.sparse.sizes import SAMPLE
from megatron.transfer import to_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose values are ordered by the bits of their magnitude as fp32."""
EVERYTHING = (0, MAGNITUDE, 15)
"""The bracket (first, last, shift) of all magnitudes, in bins of 2^15."""
NOTHING = (1, 0, 0)
"""A bracket in which nothing is counted. Kernels and a CPU read nothing for it."""
ALL_TIES = 1 << 62
"""A cutoff beyond every position."""


@dataclass(frozen=True)
class Candidates:
    """A tensor or shard to select from: `k` is the number of entries to select over all shards.

    `values` are 1-D, contiguous fp32, bf16 or fp16 without NaN.
    """

    values: torch.Tensor
    k: int
    shard: FlatShard

    def __post_init__(self) -> None:
        values, shard = self.values, self.shard
        assert values.dtype in DTYPES and values.dim() == 1 and values.is_contiguous()
        assert 0 <= self.k <= shard.total and values.numel() == shard.numel

    @property
    def sample_stride(self) -> int:
        """Distance of the entries of a sample; odd, so that it visits every column of a matrix."""
        return (self.values.numel() // SAMPLE) | 1


class MagnitudeCounter(Protocol):
    """The steps of a selection from m tensors, in the order in which they are called.

    A method that counts returns a contiguous int32 or int64 tensor with a row for each tensor; the
    method after it takes these counts summed over the ranks. The bracket of each tensor is all
    magnitudes at first. Nothing here makes the host wait for a GPU.

    `thresholds` (int32 [m]) and `cutoffs` (int64 [m]) are those of `LargestSelection`, valid after
    the last step.
    """

    thresholds: torch.Tensor
    cutoffs: torch.Tensor

    def count_sample(self) -> torch.Tensor:
        """Return a histogram [m, BINS + 1] of a sample of each tensor."""
        ...

    def narrow(self, seen: torch.Tensor) -> None:
        """Narrow each bracket, by a sample, so that it almost certainly holds the k-th largest."""
        ...

    def count(self) -> torch.Tensor:
        """Return histograms [m, BINS + 1] of the brackets, as `reference.add_histogram` counts."""
        ...

    def widen(self, counts: torch.Tensor) -> None:
        """Take all magnitudes as the bracket again where it does not hold the k-th largest."""
        ...

    def count_again(self) -> torch.Tensor:
        """Return histograms [m, BINS + 1] of the brackets that were widened; of others, zeros."""
        ...

    def zoom(self, counts: torch.Tensor, again: torch.Tensor | None) -> None:
        """Take the bin that holds the k-th largest magnitude as the bracket.

        `again`: the result of `count_again`, None without a sample.
        """
        ...

    def find_thresholds(self, counts: torch.Tensor) -> bool:
        """Compute `thresholds` from histograms with a bin for each magnitude.

        Returns:
            Whether entries at a threshold may be left out. On a GPU, where the host does not know,
            this is True. Otherwise the cutoffs are known too, and no step is left.
        """
        ...

    def count_ties(self) -> torch.Tensor:
        """Return the number of entries at the threshold in each TIE_BLOCK, int64 [m, blocks]."""
        ...

    def find_blocks(self, counts: torch.Tensor) -> None:
        """Take the TIE_BLOCK that holds the last entry that is chosen at the threshold."""
        ...

    def mark_ties(self) -> torch.Tensor:
        """Return 1 for each entry of the TIE_BLOCK at the threshold, int64 [m, TIE_BLOCK]."""
        ...

    def find_cutoffs(self, marks: torch.Tensor) -> None:
        """Compute `cutoffs`."""
        ...


class TorchCounter:
    """A `MagnitudeCounter` in plain torch, for CPUs and for CUDA without Triton."""

    def __init__(self, batch: Sequence[Candidates]) -> None:
        # Numbers are columns [m, 1], and branches are `torch.where`, as results stay on the device.
        self._batch = batch
        self._device = batch[0].values.device
        self._totals = self._column([one.shard.total for one in batch])
        self._wanted = self._column([one.k for one in batch])
        self._bracket = self._brackets(EVERYTHING)
        self._again = self._brackets(NOTHING)
        self._cut = self._block = self._wanted
        self.thresholds = self.cutoffs = torch.empty(0)

    def _column(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64).view(-1, 1), self._device)

    def _brackets(self, numbers: tuple[int, int, int]) -> torch.Tensor:
        """Return (first, last, shift) as a row for each tensor, int64 [m, 3]."""
        row = to_device(torch.tensor(numbers), self._device)
        return row.expand(len(self._batch), 3)

    def _rows(self, width: int) -> torch.Tensor:
        return torch.zeros(len(self._batch), width, dtype=torch.int64, device=self._device)

    def _histograms(self, values: Sequence[torch.Tensor], brackets: torch.Tensor) -> torch.Tensor:
        counts = self._rows(BINS + 1)
        for each, bracket, row in zip(values, brackets.unbind(), counts.unbind(), strict=True):
            reference.add_histogram(each, bracket, row)
        return counts

    def count_sample(self) -> torch.Tensor:
        samples = [one.values[:: one.sample_stride].contiguous() for one in self._batch]
        return self._histograms(samples, self._bracket)

    def narrow(self, seen: torch.Tensor) -> None:
        counts = seen[:, :BINS]
        size = counts.sum(dim=1, keepdim=True)
        place = self._wanted * size // self._totals
        margin = (3 * size.double().sqrt()).long()  # six standard deviations at the median
        top = torch.where(place > margin, _from_top(counts, place - margin)[0], BINS - 1)
        bottom_place = torch.minimum(place + margin, size)
        bottom = torch.where(place + margin < size, _from_top(counts, bottom_place)[0], 0)
        _, _, shift = EVERYTHING
        # Bins are narrower by the least power of two that suffices for the bracket.
        powers = 2 << torch.arange(16, device=counts.device)
        narrower = (powers < top - bottom + 1).sum(dim=1, keepdim=True)
        first, last = bottom << shift, ((top + 1) << shift) - 1
        self._bracket = torch.cat([first, last, narrower], dim=1)

    def count(self) -> torch.Tensor:
        return self._histograms([one.values for one in self._batch], self._bracket)

    def widen(self, counts: torch.Tensor) -> None:
        above = counts[:, BINS:]
        reached = counts.sum(dim=1, keepdim=True)
        missed = (self._wanted <= above) | (self._wanted > reached)
        everything = self._brackets(EVERYTHING)
        self._again = torch.where(missed, everything, self._again)
        self._bracket = torch.where(missed, everything, self._bracket)

    def count_again(self) -> torch.Tensor:
        return self._histograms([one.values for one in self._batch], self._again)

    def zoom(self, counts: torch.Tensor, again: torch.Tensor | None) -> None:
        if again is not None:
            counts = torch.where(self._again[:, :1] <= self._again[:, 1:2], again, counts)
        first, last, shift = self._bracket.split(1, dim=1)
        bin_, self._wanted = _from_top(counts[:, :BINS], self._wanted - counts[:, BINS:])
        low = first + (bin_ << shift)
        high = torch.minimum(low + (1 << shift) - 1, last)
        self._bracket = torch.cat([low, high, torch.zeros_like(low)], dim=1)

    def find_thresholds(self, counts: torch.Tensor) -> bool:
        value, self._wanted = _from_top(counts[:, :BINS], self._wanted)
        found = (self._bracket[:, :1] + value).clamp_(max=MAGNITUDE)
        self.thresholds = found.to(torch.int32).view(-1)
        self._cut = self._wanted < counts.gather(1, value)
        self.cutoffs = torch.full_like(found.view(-1), ALL_TIES)
        return self._device.type != "cpu" or bool(self._cut.any())

    def count_ties(self) -> torch.Tensor:
        counts = self._rows(max(-(-one.shard.total // TIE_BLOCK) for one in self._batch))
        rows = (self.thresholds.unbind(), self._cut.view(-1).unbind(), counts.unbind())
        for one, threshold, needed, row in zip(self._batch, *rows, strict=True):
            reference.add_tie_counts(one.values, threshold, needed, one.shard, row)
        return counts

    def find_blocks(self, counts: torch.Tensor) -> None:
        self._block, self._wanted = _reaching(counts, self._wanted)

    def mark_ties(self) -> torch.Tensor:
        marks = self._rows(TIE_BLOCK)
        rows = (self.thresholds.unbind(), self._block.view(-1).unbind(), marks.unbind())
        for one, threshold, block, row in zip(self._batch, *rows, strict=True):
            reference.mark_ties(one.values, threshold, block, one.shard, row)
        return marks

    def find_cutoffs(self, marks: torch.Tensor) -> None:
        last, _ = _reaching(marks, self._wanted)
        cutoffs = torch.where(self._wanted > 0, self._block * TIE_BLOCK + last + 1, 0)
        self.cutoffs = torch.where(self._cut, cutoffs, ALL_TIES).view(-1)


def _reaching(counts: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the counts of each row reach `wanted`, and how many of that place are needed."""
    sums = counts.cumsum(1)
    place = torch.searchsorted(sums, wanted).clamp_(max=counts.shape[1] - 1)
    return place, wanted - (sums - counts).gather(1, place)


def _from_top(counts: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `_reaching`, with counts added up from the last place down."""
    place, rest = _reaching(counts.flip(1), wanted)
    return counts.shape[1] - 1 - place, rest
