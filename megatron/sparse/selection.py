"""Which entries of a tensor are sent: those of largest magnitude, or drawn from a seed.

Neither `torch.topk` nor a sort: at 40 % of a large tensor they take tens of nanoseconds an entry,
int64 positions of eight bytes each and, on CUDA, a wait of the host. The magnitude of the k-th
largest entry is found by counting instead, in two passes over the bits of |x|: counts of at most
65536 ranges of magnitude, then of the single values in the range where the k-th lies. Counts add
up over ranks that each hold a part of the tensor, and entries of equal magnitude are told apart by
their position in the whole tensor, so that every rank and every grid chooses the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from megatron.sparse import reference
from megatron.sparse.reference import BINS, CHUNK, MAGNITUDE, TIE_BLOCK, magnitudes
from megatron.sparse.shard import Shard

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of values that can be told apart by the bits of their magnitude as fp32."""
DRAWN_BLOCK = 64
"""Entries drawn together, so that a gather copies runs; also what slices of a bucket align to."""
FEW = 1 << 19
"""Entries up to which a CPU finds the threshold sooner by partition than by counting."""
SAMPLE = 1 << 18
"""Entries that a GPU looks at first, so as to count single magnitudes near the threshold alone:
adding to counters in its memory costs more than reading the entries."""
TOGETHER = 1 << 17
"""Entries of a tensor cut over ranks up to which it is less to send them all than two counts."""
SumBins = Callable[[torch.Tensor], None]
_EVERYTHING = (0, MAGNITUDE, 15)
_NOTHING = (1, 0, 0)
_ALL_TIES = 1 << 62


class Selection(Protocol):
    """Which of a tensor's entries on this rank are chosen."""

    @property
    def n(self) -> int:
        """Number of entries to choose from."""
        ...

    @property
    def count(self) -> int | None:
        """Number of entries chosen; None where only the device knows."""
        ...

    def positions(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The chosen ones of [start, stop), ascending, less `start`; int32. CUDA makes the host
        wait for them."""
        ...


@dataclass(frozen=True)
class Largest:
    """Entries whose magnitude is above `threshold` (int32 [], bits of |x|), or at it with a place
    before `cutoff` (int64 []) in the whole tensor. Reads `values` whenever it is asked."""

    values: torch.Tensor
    threshold: torch.Tensor
    cutoff: torch.Tensor
    shard: Shard
    count: int | None

    @property
    def n(self) -> int:
        return self.values.numel()

    def positions(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        stop = self.n if stop is None else stop
        pieces = [torch.empty(0, dtype=torch.int32, device=self.values.device)]
        for first in range(start, stop, CHUNK):
            mask = self.mask(first, min(first + CHUNK, stop))
            if mask.device.type == "cpu":  # numpy finds them in a fifth of torch's time
                found = torch.from_numpy(np.flatnonzero(mask.numpy()))
            else:
                found = mask.nonzero().view(-1)
            pieces.append(found.to(torch.int32).add_(first - start))
        return pieces[1] if len(pieces) == 2 else torch.cat(pieces)

    def mask(self, start: int, stop: int) -> torch.Tensor:
        """Whether each entry of [start, stop) is chosen."""
        magnitude = magnitudes(self.values[start:stop])
        if magnitude.device.type == "cpu" and self.shard.is_run:
            cutoff = int(self.cutoff) - self.shard.offset
            if stop <= cutoff:
                return magnitude >= self.threshold
            if start >= cutoff:
                return magnitude > self.threshold
        local = torch.arange(start, stop, device=magnitude.device)
        early = self.shard.logical(local) < self.cutoff
        return (magnitude > self.threshold) | ((magnitude == self.threshold) & early)


def select_largest(
    values: torch.Tensor,
    k: int,
    *,
    sum_bins: SumBins | None = None,
    shard: Shard | None = None,
) -> Largest:
    """The k entries of largest magnitude of a 1-D fp32, bf16 or fp16 tensor without NaN; of equal
    ones those that come first. Decides at once, without a wait on CUDA; `values` are read again
    when the selection is used. 16-bit values are widened piece by piece.

    Where the tensor is cut over ranks, k counts them all, `shard` says which entries these are, and
    `sum_bins` adds integers over the ranks in place; all of them call this, those without any entry
    too.
    """
    shard = shard or Shard(values.numel(), values.numel())
    assert values.dtype in DTYPES and values.dim() == 1 and values.is_contiguous()
    assert 0 <= k <= shard.total and values.numel() == shard.numel
    assert values.numel() or sum_bins is not None
    if values.device.type == "cpu" and sum_bins is None and 0 < k and values.numel() <= FEW:
        return Largest(values, *_by_partition(values, k), shard, k)
    if sum_bins is not None and shard.total <= TOGETHER:
        whole = select_largest(_together(values, shard, sum_bins), k)
        return Largest(values, whole.threshold, whole.cutoff, shard, None)
    count = _Counter(values, sum_bins)
    wanted = torch.full((1,), k, dtype=torch.int64, device=values.device)
    if values.device.type == "cuda" and shard.total > 16 * SAMPLE:
        bins = count.sampled(wanted, shard.total)
    else:
        bins = count.within(count.bracket(_EVERYTHING))
    threshold, ties, wanted = count.threshold(bins, wanted)
    cutoff = count.cutoff(threshold, ties, wanted, shard)
    return Largest(values, threshold, cutoff, shard, k if sum_bins is None else None)


def _together(values: torch.Tensor, shard: Shard, sum_bins: SumBins) -> torch.Tensor:
    """Magnitudes of all entries of a tensor that is cut over ranks, fp32."""
    bits = torch.zeros(shard.total, dtype=torch.int32, device=values.device)
    places = shard.logical(torch.arange(shard.numel, device=values.device))
    bits.index_copy_(0, places, magnitudes(values))
    sum_bins(bits)
    return bits.view(torch.float32)


def _by_partition(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Threshold and cutoff of a tensor too short to be worth counting 65536 bins for."""
    magnitude = magnitudes(values).numpy()
    threshold = np.partition(magnitude, values.numel() - k)[values.numel() - k]
    wanted = k - int((magnitude > threshold).sum())
    ties = np.flatnonzero(magnitude == threshold)
    cutoff = int(ties[wanted - 1]) + 1 if wanted < ties.size else _ALL_TIES
    return torch.tensor(threshold), torch.tensor(cutoff)


@dataclass(frozen=True)
class _Bins:
    """Counts of magnitudes: `counts` [BINS] of those in `bracket` (first, last, shift) and `above`
    [1], of those above it; all int64."""

    counts: torch.Tensor
    above: torch.Tensor
    bracket: torch.Tensor


@dataclass(frozen=True)
class _Counter:
    """The passes over one tensor, over all ranks that hold a part of it. What it finds stays on the
    device: numbers are tensors of one entry, choices are `torch.where`."""

    values: torch.Tensor
    sum_bins: SumBins | None

    def bracket(self, numbers: tuple[int, int, int]) -> torch.Tensor:
        # Filled one by one on the device: a copy would make CUDA wait for the host's memory.
        parts = [torch.full((), n, dtype=torch.int64, device=self.values.device) for n in numbers]
        return torch.stack(parts)

    def within(self, bracket: torch.Tensor, values: torch.Tensor | None = None) -> _Bins:
        """Count the magnitudes within a bracket; nothing is read for an empty one."""
        values = self.values if values is None else values
        counts = _kernels(values).histogram(values, bracket)
        self._sum(counts)
        return _Bins(counts[:BINS], counts[BINS:], bracket)

    def sampled(self, wanted: torch.Tensor, total: int) -> _Bins:
        """Counts in which the `wanted`-th largest lies: of a narrow bracket that a sample suggests,
        and only where that misses, which the device finds out by itself, of everything."""
        # An odd stride meets every column of a matrix.
        sample = self.values[:: (self.values.numel() // SAMPLE) | 1].contiguous()
        seen = self.within(self.bracket(_EVERYTHING), sample)
        narrow = self.within(_around(seen.counts, wanted, total))
        hit = (narrow.above < wanted) & (wanted <= narrow.above + narrow.counts.sum())
        everything, nothing = self.bracket(_EVERYTHING), self.bracket(_NOTHING)
        full = self.within(torch.where(hit, nothing, everything))
        return _Bins(
            torch.where(hit, narrow.counts, full.counts),
            torch.where(hit, narrow.above, full.above),
            torch.where(hit, narrow.bracket, everything),
        )

    def threshold(
        self, bins: _Bins, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Bits of the `wanted`-th largest magnitude (int32 []), how many entries have it and how
        many of these are wanted (int64 [1])."""
        first, last, shift = bins.bracket.split(1)
        bin_, rest = _from_top(bins.counts, wanted - bins.above)
        low = first + (bin_ << shift)
        high = torch.minimum(low + (1 << shift) - 1, last)
        exact = self.within(torch.cat([low, high, torch.zeros_like(low)]))
        value, rest = _from_top(exact.counts, rest)
        threshold = (low + value).clamp_(max=MAGNITUDE)
        return threshold.to(torch.int32).view(()), exact.counts.index_select(0, value), rest

    def cutoff(
        self, threshold: torch.Tensor, ties: torch.Tensor, wanted: torch.Tensor, shard: Shard
    ) -> torch.Tensor:
        """Place in the whole tensor before which there are `wanted` entries at the threshold, or
        one beyond every place where all `ties` are wanted (int64 [])."""
        values, cut = self.values, wanted < ties
        if values.device.type == "cpu" and not cut:
            return torch.tensor(_ALL_TIES)
        kernels = _kernels(values) if shard.runs is None else reference
        counts = kernels.tie_counts(values, threshold, cut.view(()), shard)
        self._sum(counts)
        block, rest = _reaching(counts, wanted)
        places = block * TIE_BLOCK + torch.arange(TIE_BLOCK, device=values.device)
        tied = torch.zeros_like(places)
        if values.numel():
            local, here = shard.local(places)
            found = magnitudes(values.index_select(0, local.clamp_(0, values.numel() - 1)))
            tied += (found == threshold) & here
        self._sum(tied)
        last, _ = _reaching(tied, rest)
        cutoff = torch.where(wanted > 0, block * TIE_BLOCK + last + 1, 0)
        return torch.where(cut, cutoff, _ALL_TIES).view(())

    def _sum(self, counts: torch.Tensor) -> None:
        if self.sum_bins is not None:
            self.sum_bins(counts)


def _reaching(counts: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place up to which the counts sum to `wanted`, and how many of it are needed."""
    sums = counts.cumsum(0)
    place = torch.searchsorted(sums, wanted).clamp_(max=counts.numel() - 1)
    return place, wanted - (sums - counts).index_select(0, place)


def _from_top(counts: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the last place down."""
    place, rest = _reaching(counts.flip(0), wanted)
    return counts.numel() - 1 - place, rest


def _around(counts: torch.Tensor, wanted: torch.Tensor, total: int) -> torch.Tensor:
    """A bracket that holds the `wanted`-th largest of `total` magnitudes almost certainly, from a
    sample's counts over everything."""
    size = counts.sum()
    place = wanted * size // total
    margin = (3 * size.double().sqrt()).long()  # six standard deviations at the median
    top = torch.where(place > margin, _from_top(counts, place - margin)[0], BINS - 1)
    bottom_place = torch.minimum(place + margin, size)
    bottom = torch.where(place + margin < size, _from_top(counts, bottom_place)[0], 0)
    _, _, shift = _EVERYTHING
    # Bins of the bracket are as much narrower as it is: the least power of two that suffices.
    powers = 1 << torch.arange(17, device=counts.device)
    narrower = (powers < top - bottom + 1).sum().view(1)
    first, last = bottom << shift, ((top + 1) << shift) - 1
    return torch.cat([first, last, (narrower - 1).clamp_(min=0)])


@dataclass(frozen=True)
class Given:
    """A selection given as booleans, one for each entry."""

    chosen: torch.Tensor

    @property
    def n(self) -> int:
        return self.chosen.numel()

    @property
    def count(self) -> int:
        return int(self.chosen.sum())

    def positions(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.chosen[start:stop].nonzero().view(-1).int()


@dataclass(frozen=True)
class Draw:
    """Runs of entries of the whole tensor, `[starts, starts + lengths)`, ascending int64 on the
    CPU; those of them that are on this rank are what it chooses."""

    starts: torch.Tensor
    lengths: torch.Tensor
    shard: Shard

    @property
    def n(self) -> int:
        return self.shard.numel

    @property
    def count(self) -> int:
        if self.shard.numel == self.shard.total:
            return int(self.lengths.sum())
        pieces = range(0, self.n, CHUNK)
        return sum(self.positions(a, min(a + CHUNK, self.n)).numel() for a in pieces)

    def positions(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        stop = self.n if stop is None else stop
        ends = self.shard.logical(torch.tensor([start, max(stop - 1, start)]))
        low, high = torch.searchsorted(self.starts, ends, right=True).tolist()
        within = torch.arange(DRAWN_BLOCK)
        drawn = slice(max(low - 1, 0), high)
        places = self.starts[drawn, None] + within
        local, here = self.shard.local(places[within < self.lengths[drawn, None]])
        here &= (local >= start) & (local < stop)
        return (local[here] - start).to(torch.int32)


def draw_seeded(
    n: int, k: int, *, seed: int, step: int, name: str, shard: Shard | None = None
) -> Draw:
    """k of the n entries of the tensor `name`, from these numbers and the name alone: whole blocks
    of 64 entries, of which one is cut to make it k. `shard` says which are on this rank."""
    assert 0 <= k <= n
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    order = torch.randperm(-(-n // DRAWN_BLOCK), generator=generator)
    lengths = (n - order * DRAWN_BLOCK).clamp_(max=DRAWN_BLOCK)
    drawn = lengths.cumsum(0)
    needed = int(torch.searchsorted(drawn, k)) + 1 if k else 0
    lengths = lengths[:needed]
    lengths[-1:] -= drawn[needed - 1 : needed] - k
    blocks, by_place = order[:needed].sort()
    return Draw(blocks * DRAWN_BLOCK, lengths[by_place], shard or Shard(n, n))


def _kernels(values: torch.Tensor) -> ModuleType:
    """Triton's where they serve: on CUDA, if it is installed."""
    if values.device.type != "cuda" or find_spec("triton") is None:
        return reference
    from megatron.sparse import kernels

    return kernels
