"""Exact selection of the k largest entries of a tensor, also across tensor-parallel ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from megatron.sparse import reference
from megatron.sparse.reference import CHUNK, MAGNITUDE, magnitudes
from megatron.sparse.shard import FlatShard
from megatron.sparse.sizes import BINS, SAMPLE, TIE_BLOCK, TOGETHER
from megatron.transfer import to_device

SAMPLED = 61
"""Stride of the first sample; a prime, so that no row length is a multiple."""


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ascending int64 positions of the `k` entries of largest magnitude of a 1-D tensor.

    Ties go to the lower position.
    """
    magnitude = values.abs()
    if magnitude.device.type == "cpu":
        # `topk` takes 30 ns per entry on one thread at d = 0.01, finding candidates takes 5.
        likely = _candidates(magnitude, k)
        if likely.numel() >= k:
            return likely[_largest(magnitude[likely], k)]
    return _largest(magnitude, k)


def _candidates(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """Return ascending positions of all entries above a bound estimated from a sample."""
    # `k` or more candidates contain the k largest; fewer mean that the sample was bad or too small.
    sample = magnitude[::SAMPLED]
    share = k / SAMPLED
    enough = math.ceil(share + 4 * math.sqrt(share) + 4)  # four standard deviations
    if enough > sample.numel():
        return torch.empty(0, dtype=torch.int64)
    bound = sample.topk(enough, sorted=False).values.min()
    return (magnitude >= bound).nonzero().view(-1)


def _largest(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """Return the same positions as `largest`, from magnitudes, without synchronizing."""
    top, where = magnitude.topk(k)  # descending: entries above the k-th come first
    tied = torch.nonzero_static(magnitude == top[-1], size=k).view(-1)  # the first k of them
    place = torch.arange(k, device=magnitude.device) - (top > top[-1]).sum()  # among the tied
    return torch.where(place < 0, where, tied[place.clamp_(min=0)]).sort().values


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose values are ordered by the bits of their magnitude as fp32."""
DRAWN_BLOCK = 64
"""Entries drawn together, so that a gather copies runs; slices of a bucket align to this too."""
FEW = 1 << 19
"""Largest number of entries for which partition beats counting on a CPU."""
BATCH = 16
"""Tensors counted together on a GPU; counts and intermediate results take 5 MiB of each."""
SumBins = Callable[[torch.Tensor], None]
_EVERYTHING = (0, MAGNITUDE, 15)
_NOTHING = (1, 0, 0)
_ALL_TIES = 1 << 62


class Selection(Protocol):
    """The chosen entries among a tensor's entries on this rank."""

    @property
    def n(self) -> int:
        """Number of entries on this rank to choose from."""
        ...

    @property
    def count(self) -> int | None:
        """Number of chosen entries on this rank; None if only the device knows it."""
        ...

    def positions(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the chosen positions in [start, stop), relative to `start`, ascending; int32.

        Synchronizes with a CUDA device.
        """
        ...


@dataclass(frozen=True)
class LargestSelection:
    """The entries above a threshold, and those at the threshold before a cutoff.

    `threshold`: int32 [], bits of |x|. `cutoff`: int64 [], a position in the whole tensor. `values`
    are not copied, and are read at each use.
    """

    values: torch.Tensor
    threshold: torch.Tensor
    cutoff: torch.Tensor
    shard: FlatShard
    count: int | None

    @property
    def n(self) -> int:
        return self.values.numel()

    def positions(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        stop = self.n if stop is None else stop
        pieces = [torch.empty(0, dtype=torch.int32, device=self.values.device)]
        for first in range(start, stop, CHUNK):
            mask = self.mask(first, min(first + CHUNK, stop))
            if mask.device.type == "cpu":  # numpy takes a fifth of torch's time
                found = torch.from_numpy(np.flatnonzero(mask.numpy()))
            else:
                found = mask.nonzero().view(-1)
            pieces.append(found.to(torch.int32).add_(first - start))
        return pieces[1] if len(pieces) == 2 else torch.cat(pieces)

    def mask(self, start: int, stop: int) -> torch.Tensor:
        """Return a bool mask of the entries [start, stop)."""
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


def select_largest(
    values: torch.Tensor,
    k: int,
    *,
    sum_bins: SumBins | None = None,
    shard: FlatShard | None = None,
) -> LargestSelection:
    """Select the k entries of largest magnitude; ties go to the first position.

    On CUDA the host does not wait. 16-bit values are widened in pieces. If the tensor is sharded,
    all ranks call this, including those without entries.

    Args:
        values: 1-D fp32, bf16 or fp16 without NaN; read again when the selection is used.
        k: entries to select over all ranks.
        sum_bins: a function that sums integers over the ranks in place.
        shard: the positions of `values` in the whole tensor.
    """
    shard = shard or FlatShard(values.numel(), values.numel())
    (found,) = select_largest_each([Candidates(values, k, shard)], sum_bins=sum_bins)
    return found


def select_largest_each(
    tensors: Sequence[Candidates], *, sum_bins: SumBins | None = None
) -> list[LargestSelection]:
    """Select from each tensor as `select_largest` does, with fewer launches on a GPU.

    Either all tensors are whole, or all are sharded over the ranks of `sum_bins`, which call this
    with shards of the same tensors in the same order.
    """
    found: dict[int, LargestSelection] = {}
    counted: dict[bool, list[int]] = {False: [], True: []}
    for number, (values, k, shard) in enumerate((t.values, t.k, t.shard) for t in tensors):
        assert values.numel() or sum_bins is not None
        device = values.device.type
        if device == "cpu" and sum_bins is None and 0 < k and values.numel() <= FEW:
            found[number] = LargestSelection(values, *_by_partition(values, k), shard, k)
        elif sum_bins is not None and shard.total <= TOGETHER:
            whole = select_largest(_together(values, shard, sum_bins), k)
            found[number] = LargestSelection(values, whole.threshold, whole.cutoff, shard, None)
        else:
            counted[device == "cuda" and shard.total > 16 * SAMPLE].append(number)
    for sampled, numbers in counted.items():
        for some in _batches(numbers, tensors):
            batch = [tensors[number] for number in some]
            found |= zip(some, _by_counting(batch, sum_bins, sampled=sampled), strict=True)
    return [found[number] for number in range(len(tensors))]


def _batches(numbers: Sequence[int], tensors: Sequence[Candidates]) -> Iterator[Sequence[int]]:
    """Group tensors to be counted together; on a CPU, which gains nothing, one at a time."""
    on_cpu = not numbers or tensors[numbers[0]].values.device.type == "cpu"
    size = 1 if on_cpu else BATCH
    return (numbers[first : first + size] for first in range(0, len(numbers), size))


def _by_counting(
    batch: Sequence[Candidates], sum_bins: SumBins | None, *, sampled: bool
) -> Iterator[LargestSelection]:
    """Select by histograms of magnitudes, of a sample first if `sampled`."""
    count = _Counter(batch, sum_bins)
    bins = count.sampled() if sampled else count.within(count.bracket(_EVERYTHING))
    threshold, ties, wanted = count.threshold(bins)
    cutoffs = count.cutoff(threshold, ties, wanted).view(-1).unbind()
    for one, limit, cutoff in zip(batch, threshold.view(-1).unbind(), cutoffs, strict=True):
        whole = one.k if sum_bins is None else None
        yield LargestSelection(one.values, limit, cutoff, one.shard, whole)


def _together(values: torch.Tensor, shard: FlatShard, sum_bins: SumBins) -> torch.Tensor:
    """Return the fp32 magnitudes of a whole sharded tensor; collective over its ranks."""
    bits = torch.zeros(shard.total, dtype=torch.int32, device=values.device)
    places = shard.logical(torch.arange(shard.numel, device=values.device))
    bits.index_copy_(0, places, magnitudes(values))
    sum_bins(bits)
    return bits.view(torch.float32)


def _by_partition(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return threshold and cutoff of a tensor too short for a histogram of 65536 bins."""
    magnitude = magnitudes(values).numpy()
    threshold = np.partition(magnitude, values.numel() - k)[values.numel() - k]
    wanted = k - int((magnitude > threshold).sum())
    ties = np.flatnonzero(magnitude == threshold)
    cutoff = int(ties[wanted - 1]) + 1 if wanted < ties.size else _ALL_TIES
    return torch.tensor(threshold), torch.tensor(cutoff)


@dataclass(frozen=True)
class _Bins:
    """Histograms of the magnitudes of m tensors; all int64."""

    counts: torch.Tensor  # [m, BINS], of magnitudes in the bracket
    above: torch.Tensor  # [m, 1], above the bracket
    bracket: torch.Tensor  # [m, 3]: first, last, shift


class _Counter:
    """The counting passes over m tensors and all ranks that hold shards of them."""

    def __init__(self, batch: Sequence[Candidates], sum_bins: SumBins | None) -> None:
        # Results stay on the device: numbers are tensors [m, 1], and branches are `torch.where`.
        self.batch, self.sum_bins = batch, sum_bins
        self.device = batch[0].values.device
        self.wanted = self._column([one.k for one in batch])

    def bracket(self, numbers: tuple[int, int, int]) -> torch.Tensor:
        """Return (first, last, shift) as a row for each tensor, int64 [m, 3]."""
        row = to_device(torch.tensor(numbers), self.device)
        return row.expand(len(self.batch), 3)

    def within(self, brackets: torch.Tensor, values: Sequence[torch.Tensor] | None = None) -> _Bins:
        """Count the magnitudes within each tensor's bracket; an empty bracket reads nothing."""
        values = [one.values for one in self.batch] if values is None else values
        longest = max(each.numel() for each in values)
        # A GPU adds int32 in half the time; use int32 if no count can overflow.
        dtype = torch.int32 if longest < 2**31 else torch.int64
        counts = torch.zeros(len(values), BINS + 1, dtype=dtype, device=self.device)
        for each, bracket, row in zip(values, brackets.unbind(), counts.unbind(), strict=True):
            _kernels(each).add_histogram(each, bracket, row)
        counts = counts.long()
        self._sum(counts)
        return _Bins(counts[:, :BINS], counts[:, BINS:], brackets)

    def sampled(self) -> _Bins:
        """Count in a narrow bracket around the wanted entry, or in full if the sample misleads."""
        # An odd stride visits every column of a matrix.
        samples = [
            one.values[:: (one.values.numel() // SAMPLE) | 1].contiguous() for one in self.batch
        ]
        seen = self.within(self.bracket(_EVERYTHING), samples)
        totals = self._column([one.shard.total for one in self.batch])
        narrow = self.within(_around(seen.counts, self.wanted, totals))
        reached = narrow.above + narrow.counts.sum(dim=1, keepdim=True)
        # The device decides which bracket is right; the host does not wait.
        hit = (narrow.above < self.wanted) & (self.wanted <= reached)
        everything, nothing = self.bracket(_EVERYTHING), self.bracket(_NOTHING)
        full = self.within(torch.where(hit, nothing, everything))
        return _Bins(
            torch.where(hit, narrow.counts, full.counts),
            torch.where(hit, narrow.above, full.above),
            torch.where(hit, narrow.bracket, everything),
        )

    def threshold(self, bins: _Bins) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the k-th largest magnitude's bits, its number of ties, and the ties wanted.

        The bits are int32 [m, 1], the numbers int64 [m, 1].
        """
        first, last, shift = bins.bracket.split(1, dim=1)
        bin_, rest = _from_top(bins.counts, self.wanted - bins.above)
        low = first + (bin_ << shift)
        high = torch.minimum(low + (1 << shift) - 1, last)
        exact = self.within(torch.cat([low, high, torch.zeros_like(low)], dim=1))
        value, rest = _from_top(exact.counts, rest)
        threshold = (low + value).clamp_(max=MAGNITUDE)
        return threshold.to(torch.int32), exact.counts.gather(1, value), rest

    def cutoff(
        self, thresholds: torch.Tensor, ties: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Return the positions [m, 1] before which `wanted` entries are at the threshold."""
        # The cutoff is beyond every position if all ties are wanted.
        cut = wanted < ties
        if not self._has_ties(cut):
            return torch.full_like(wanted, _ALL_TIES)
        blocks = max(-(-one.shard.total // TIE_BLOCK) for one in self.batch)
        counts = torch.zeros(len(self.batch), blocks, dtype=torch.int64, device=self.device)
        rows = (thresholds.view(-1).unbind(), cut.view(-1).unbind(), counts.unbind())
        for one, threshold, needed, row in zip(self.batch, *rows, strict=True):
            _tie_kernels(one).add_tie_counts(one.values, threshold, needed, one.shard, row)
        self._sum(counts)
        block, rest = _reaching(counts, wanted)
        tied = torch.zeros(len(self.batch), TIE_BLOCK, dtype=torch.int64, device=self.device)
        rows = (thresholds.view(-1).unbind(), block.view(-1).unbind(), tied.unbind())
        for one, threshold, number, row in zip(self.batch, *rows, strict=True):
            _tie_kernels(one).mark_ties(one.values, threshold, number, one.shard, row)
        self._sum(tied)
        last, _ = _reaching(tied, rest)
        cutoff = torch.where(wanted > 0, block * TIE_BLOCK + last + 1, 0)
        return torch.where(cut, cutoff, _ALL_TIES)

    def _has_ties(self, cut: torch.Tensor) -> bool:
        """Return whether ties may be left out; True on a GPU, as the host would have to wait."""
        return self.device.type != "cpu" or bool(cut.any())

    def _column(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64).view(-1, 1), self.device)

    def _sum(self, counts: torch.Tensor) -> None:
        if self.sum_bins is not None:
            self.sum_bins(counts)


def _reaching(counts: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the counts of each row reach `wanted`, and how many of that place are needed."""
    sums = counts.cumsum(1)
    place = torch.searchsorted(sums, wanted).clamp_(max=counts.shape[1] - 1)
    return place, wanted - (sums - counts).gather(1, place)


def _from_top(counts: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `_reaching`, with counts added up from the last place down."""
    place, rest = _reaching(counts.flip(1), wanted)
    return counts.shape[1] - 1 - place, rest


def _around(counts: torch.Tensor, wanted: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return brackets [m, 3] that almost certainly hold the `wanted`-th largest of `total`."""
    size = counts.sum(dim=1, keepdim=True)
    place = wanted * size // total
    margin = (3 * size.double().sqrt()).long()  # six standard deviations at the median
    top = torch.where(place > margin, _from_top(counts, place - margin)[0], BINS - 1)
    bottom_place = torch.minimum(place + margin, size)
    bottom = torch.where(place + margin < size, _from_top(counts, bottom_place)[0], 0)
    _, _, shift = _EVERYTHING
    # Bins are narrower by the least power of two that suffices for the bracket.
    powers = 1 << torch.arange(17, device=counts.device)
    narrower = (powers < top - bottom + 1).sum(dim=1, keepdim=True)
    first, last = bottom << shift, ((top + 1) << shift) - 1
    return torch.cat([first, last, (narrower - 1).clamp_(min=0)], dim=1)


@dataclass(frozen=True)
class GivenSelection:
    """A selection given by a bool tensor."""

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
class DrawnSelection:
    """A selection of runs `[starts, starts + lengths)` of the whole tensor, on this rank's shard.

    `starts` and `lengths` are int64 on the CPU, ordered by start.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    shard: FlatShard

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
    n: int, k: int, *, seed: int, step: int, name: str, shard: FlatShard | None = None
) -> DrawnSelection:
    """Draw k of the n entries of a tensor from seed, step and name alone.

    Whole blocks of 64 entries are drawn, and the last one drawn is shortened to make the total k.
    `shard` is this rank's shard of the tensor.
    """
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
    return DrawnSelection(blocks * DRAWN_BLOCK, lengths[by_place], shard or FlatShard(n, n))


def _kernels(values: torch.Tensor) -> ModuleType:
    """Return the Triton kernels on CUDA if Triton is installed, else the reference."""
    if values.device.type != "cuda" or find_spec("triton") is None:
        return reference
    from megatron.sparse import kernels

    return kernels


def _tie_kernels(one: Candidates) -> ModuleType:
    """Return the kernels for ties; Triton's do not support shards with runs."""
    return _kernels(one.values) if one.shard.runs is None else reference
