"""Exact selection of the k largest entries of a tensor, also across tensor-parallel ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch

from megatron.sparse.counting import ALL_TIES, Candidates, MagnitudeCounter, TorchCounter
from megatron.sparse.reference import CHUNK, magnitudes
from megatron.sparse.shard import FlatShard
from megatron.sparse.sizes import BATCH, SAMPLE, TOGETHER

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


DRAWN_BLOCK = 64
"""Entries drawn together, so that a gather copies runs; slices of a bucket align to this too."""
FEW = 1 << 19
"""Largest number of entries for which partition beats counting on a CPU."""
SumBins = Callable[[torch.Tensor], None]


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
    counted: dict[tuple[bool, torch.dtype, torch.device], list[int]] = {}
    for number, (values, k, shard) in enumerate((t.values, t.k, t.shard) for t in tensors):
        assert values.numel() or sum_bins is not None
        on_gpu = _on_gpu(values)
        if not on_gpu and sum_bins is None and 0 < k and values.numel() <= FEW:
            found[number] = LargestSelection(values, *_by_partition(values, k), shard, k)
        elif sum_bins is not None and shard.total <= TOGETHER:
            whole = select_largest(_together(values, shard, sum_bins), k)
            found[number] = LargestSelection(values, whole.threshold, whole.cutoff, shard, None)
        else:
            sampled = on_gpu and shard.total > 16 * SAMPLE
            counted.setdefault((sampled, values.dtype, values.device), []).append(number)
    for (sampled, _, _), numbers in counted.items():
        together = BATCH if _on_gpu(tensors[numbers[0]].values) else 1  # a CPU gains nothing
        for first in range(0, len(numbers), together):
            some = numbers[first : first + together]
            batch = [tensors[number] for number in some]
            found |= zip(some, _by_counting(batch, sum_bins, sampled=sampled), strict=True)
    return [found[number] for number in range(len(tensors))]


def _on_gpu(values: torch.Tensor) -> bool:
    return values.device.type == "cuda"


def _by_counting(
    batch: Sequence[Candidates], sum_bins: SumBins | None, *, sampled: bool
) -> Iterator[LargestSelection]:
    """Select by histograms, of a sample first if `sampled`; on a GPU from tensors of one dtype."""
    counter = _counter(batch)

    def summed(counts: torch.Tensor) -> torch.Tensor:
        if sum_bins is None:
            return counts
        counts = counts.long()  # the sum over the ranks may not fit in 32 bits
        sum_bins(counts)
        return counts

    if sampled:
        counter.narrow(summed(counter.count_sample()))
    counts, again = summed(counter.count()), None
    if sampled:
        # The device decides which brackets are wide enough; the host does not wait.
        counter.widen(counts)
        again = summed(counter.count_again())
    counter.zoom(counts, again)
    if counter.find_thresholds(summed(counter.count())):
        counter.find_blocks(summed(counter.count_ties()))
        counter.find_cutoffs(summed(counter.mark_ties()))
    thresholds, cutoffs = counter.thresholds.unbind(), counter.cutoffs.unbind()
    for one, threshold, cutoff in zip(batch, thresholds, cutoffs, strict=True):
        count = one.k if sum_bins is None else None
        yield LargestSelection(one.values, threshold, cutoff, one.shard, count)


def _counter(batch: Sequence[Candidates]) -> MagnitudeCounter:
    """Return the counter of a batch: in Triton kernels on CUDA if Triton is installed."""
    if not _on_gpu(batch[0].values) or find_spec("triton") is None:
        return TorchCounter(batch)
    from megatron.sparse.counting_kernels import KernelCounter

    return KernelCounter(batch)


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
    cutoff = int(ties[wanted - 1]) + 1 if wanted < ties.size else ALL_TIES
    return torch.tensor(threshold), torch.tensor(cutoff)


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
