"""The steps of `counting.MagnitudeCounter` as one Triton kernel each, for all tensors of a batch.

A launch takes the host longer than the GPU computes for a small tensor, so that the number of
launches must not grow with the number of tensors. The kernels that read entries get the addresses
of the tensors in a table, and a program finds its tensor by its number; the kernels between them,
which look for a place in counts, have one program for each tensor. Imported on CUDA only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from megatron.sparse import reference
from megatron.sparse.counting import ALL_TIES, EVERYTHING, NOTHING, Candidates
from megatron.sparse.kernels import launch, magnitude_bits
from megatron.sparse.reference import BINS, BLOCK, GROUP, MAGNITUDE, TIE_BLOCK
from megatron.sparse.sizes import BATCH
from megatron.transfer import to_device

_ENTRIES = GROUP * BLOCK
"""Entries per program of the kernels that read entries."""
_PIECE = 1 << 13
"""Counts that a program adds up at once when it looks for a place."""
_SEARCH_WARPS = 16
_NO_PROGRAM = 1 << 62
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class KernelCounter:
    """A `MagnitudeCounter` of tensors of one dtype on a GPU.

    Numbers that the kernels read and write are int64 rows of one table, [numbers, BATCH], which is
    copied to the device once.
    """

    def __init__(self, batch: Sequence[Candidates]) -> None:
        assert 0 < len(batch) <= BATCH
        assert len({(one.values.dtype, one.values.device) for one in batch}) == 1
        self._batch, self._device = batch, batch[0].values.device
        self._dtype = _TYPES[batch[0].values.dtype]
        numels = [one.values.numel() for one in batch]
        strides = [one.sample_stride for one in batch]
        sampled = [-(-numel // stride) for numel, stride in zip(numels, strides, strict=True)]
        ends, sample_ends = _ends(numels), _ends(sampled)
        self._programs, self._sample_programs = ends[-1], sample_ends[-1]
        shards = [one.shard for one in batch]
        # Positions given by runs need a lookup, which no kernel does; rows of 0 entries mark them.
        rows = [shard.row if shard.runs is None else 0 for shard in shards]
        strides_of_rows = [shard.stride for shard in shards]
        offsets, skipped = [shard.offset for shard in shards], [shard.first for shard in shards]
        ones = [1] * len(batch)
        parts = [
            [[one.values.data_ptr() for one in batch]],
            [numels, ones, ends],
            [sampled, strides, sample_ends],
            [rows, strides_of_rows, offsets, skipped],
            [[shard.total for shard in shards]],
            [[one.k for one in batch]],
            [[number] * len(batch) for number in EVERYTHING],
            [[number] * len(batch) for number in NOTHING],
            [ones],
        ]
        padding = [_NO_PROGRAM] * (BATCH - len(batch))
        numbers = torch.tensor([row + padding for part in parts for row in part])
        table = to_device(numbers, self._device)
        (
            self._addresses,
            self._entries,
            self._sample,
            self._places,
            self._totals,
            self._wanted,
            self._bracket,
            self._again,
            self._blocks,
        ) = table.split([len(part) for part in parts])
        # A GPU adds int32 in half the time; use int32 if no count can overflow.
        self._kind = torch.int32 if max(numels) < 2**31 else torch.int64
        self._cut = self._empty(torch.bool)
        self.thresholds, self.cutoffs = self._empty(torch.int32), self._empty(torch.int64)

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(len(self._batch), dtype=dtype, device=self._device)

    def _zeros(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(len(self._batch), width, dtype=dtype, device=self._device)

    def _over_entries(
        self, kernel: Any, *arguments: Any, sample: bool = False, **sizes: int
    ) -> None:
        """Launch a program for each piece of each tensor, or of its sample."""
        programs = self._sample_programs if sample else self._programs
        extents = (self._addresses, self._sample if sample else self._entries)
        sizes |= {"ROWS": BATCH, "ENTRIES": _ENTRIES, "STRIDED": sample}
        launch(kernel, programs, *extents, *arguments, 0, **sizes, DTYPE=self._dtype)

    def _over_tensors(self, kernel: Any, *arguments: Any, **sizes: int) -> None:
        """Launch a program for each tensor."""
        sizes |= {"PIECE": _PIECE}
        launch(kernel, len(self._batch), *arguments, warps=_SEARCH_WARPS, **sizes)

    def _histograms(self, bracket: torch.Tensor, *, sample: bool = False) -> torch.Tensor:
        counts = self._zeros(BINS + 1, self._kind)
        self._over_entries(_histogram, bracket, counts, sample=sample, BINS=BINS)
        return counts

    def count_sample(self) -> torch.Tensor:
        return self._histograms(self._bracket, sample=True)

    def narrow(self, seen: torch.Tensor) -> None:
        numbers = (self._totals, self._wanted, self._bracket)
        _, _, shift = EVERYTHING
        self._over_tensors(_narrow, seen, *numbers, BINS=BINS, ROWS=BATCH, SHIFT=shift)

    def count(self) -> torch.Tensor:
        return self._histograms(self._bracket)

    def widen(self, counts: torch.Tensor) -> None:
        numbers = (self._wanted, self._bracket, self._again)
        first, last, shift = EVERYTHING
        everything = {"FIRST": first, "LAST": last, "SHIFT": shift}
        self._over_tensors(_widen, counts, *numbers, BINS=BINS, ROWS=BATCH, **everything)

    def count_again(self) -> torch.Tensor:
        return self._histograms(self._again)

    def zoom(self, counts: torch.Tensor, again: torch.Tensor | None) -> None:
        both = (counts, counts if again is None else again)
        numbers = (self._wanted, self._bracket, self._again)
        self._over_tensors(_zoom, *both, *numbers, BINS=BINS, ROWS=BATCH)

    def find_thresholds(self, counts: torch.Tensor) -> bool:
        numbers = (self._wanted, self._bracket)
        found = (self.thresholds, self._cut)
        self._over_tensors(_find_thresholds, counts, *numbers, *found, BINS=BINS, HIGHEST=MAGNITUDE)
        return True

    def count_ties(self) -> torch.Tensor:
        blocks = max(-(-one.shard.total // TIE_BLOCK) for one in self._batch)
        counts = self._zeros(blocks, torch.int64)
        limits = (self._places, self.thresholds, self._cut)
        self._over_entries(_count_ties, *limits, counts, blocks, TIE_BLOCK=TIE_BLOCK)
        for number, one in self._given_by_runs():
            limit = (self.thresholds[number], self._cut[number])
            reference.add_tie_counts(one.values, *limit, one.shard, counts[number])
        return counts

    def find_blocks(self, counts: torch.Tensor) -> None:
        numbers = (self._wanted, self._cut, self._blocks)
        self._over_tensors(_find_blocks, counts, *numbers, counts.shape[1])

    def mark_ties(self) -> torch.Tensor:
        marks = self._zeros(TIE_BLOCK, torch.int64)
        limits = (self._places, self.thresholds, self._cut, self._blocks)
        self._over_entries(_mark_ties, *limits, marks, TIE_BLOCK=TIE_BLOCK)
        for number, one in self._given_by_runs():
            limit = (self.thresholds[number], self._blocks[0, number])
            reference.mark_ties(one.values, *limit, one.shard, marks[number])
        return marks

    def find_cutoffs(self, marks: torch.Tensor) -> None:
        numbers = (self._wanted, self._cut, self._blocks, self.cutoffs)
        self._over_tensors(_find_cutoffs, marks, *numbers, TIE_BLOCK=TIE_BLOCK, ALL_TIES=ALL_TIES)

    def _given_by_runs(self) -> list[tuple[int, Candidates]]:
        return [(i, one) for i, one in enumerate(self._batch) if one.shard.runs is not None]


def _ends(numels: Sequence[int]) -> list[int]:
    """Return the number of programs up to each tensor's last."""
    return list(accumulate(-(-numel // _ENTRIES) for numel in numels))


@triton.jit
def _own_piece(extents, ROWS: tl.constexpr, ENTRIES: tl.constexpr):
    """Return a program's tensor, its first entry, and the number of entries left from there."""
    program = tl.program_id(0).to(tl.int64)
    ends = tl.load(extents + 2 * ROWS + tl.arange(0, ROWS))
    row = tl.sum((ends <= program).to(tl.int32), axis=0)
    numel, end = tl.load(extents + row), tl.load(extents + 2 * ROWS + row)
    begin = (program - end + tl.cdiv(numel, ENTRIES)) * ENTRIES
    left = tl.minimum(numel - begin, ENTRIES).to(tl.int32)
    return row, begin, left


@triton.jit
def _magnitudes(
    addresses,
    extents,
    row,
    begin,
    left,
    at,
    ROWS: tl.constexpr,
    STRIDED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the bits of |x| as fp32 of entries `begin + at`, int32; -1 from `left` on."""
    kind = tl.pointer_type(DTYPE)  # pyright: ignore[reportArgumentType]
    values = tl.load(addresses + row).to(kind)
    if STRIDED:
        stride = tl.load(extents + ROWS + row)
        found = tl.load(values + (begin + at) * stride, mask=at < left, other=0.0)
    else:
        found = tl.load(values + begin + at, mask=at < left, other=0.0)
    return tl.where(at < left, magnitude_bits(found), -1)


@triton.jit(do_not_specialize=["apart"])
def _histogram(
    addresses,
    extents,
    bracket,
    counts,
    apart,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STRIDED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    row, begin, left = _own_piece(extents, ROWS, ENTRIES)
    first, last = tl.load(bracket + row).to(tl.int32), tl.load(bracket + ROWS + row).to(tl.int32)
    shift = tl.load(bracket + 2 * ROWS + row).to(tl.int32)
    if first <= last:
        at = tl.arange(0, ENTRIES) + apart
        magnitude = _magnitudes(addresses, extents, row, begin, left, at, ROWS, STRIDED, DTYPE)
        mine = counts + row.to(tl.int64) * (BINS + 1)
        kind = counts.dtype.element_ty
        above = tl.sum((magnitude > last).to(tl.int32), axis=0)
        tl.atomic_add(mine + BINS, above.to(kind), sem="relaxed")
        # Millions of atomic additions to the counter of zeros would be serialized.
        if first == 0:
            zeros = tl.sum((magnitude == 0).to(tl.int32), axis=0)
            tl.atomic_add(mine, zeros.to(kind), sem="relaxed")
        inside = (magnitude >= tl.maximum(first, 1)) & (magnitude <= last)
        one = tl.full((ENTRIES,), 1, kind)
        tl.atomic_add(mine + ((magnitude - first) >> shift), one, mask=inside, sem="relaxed")


@triton.jit
def _total(counts, length, PIECE: tl.constexpr):
    """Return the sum of `length` counts, int64."""
    total = tl.zeros((), tl.int64)
    for first in range(0, length, PIECE):
        at = first + tl.arange(0, PIECE)
        held = tl.load(counts + at, mask=at < length, other=0)
        total += tl.sum(held.to(tl.int64), axis=0)
    return total


@triton.jit
def _reaching(counts, step, length, wanted, PIECE: tl.constexpr):
    """Return where sums of `length` counts reach `wanted`, and how many of that place are needed.

    The counts are `counts[0]`, `counts[step]`, `counts[2 * step]` and so on, and their sum is
    `wanted` or more.
    """
    place = tl.zeros((), tl.int64)
    before = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.int64)
    for first in range(0, length, PIECE):
        at = first + tl.arange(0, PIECE)
        held = tl.load(counts + at * step, mask=at < length, other=0)
        total += tl.sum(held.to(tl.int64), axis=0)
        if total < wanted:
            place = tl.minimum(first + PIECE, length - 1).to(tl.int64)
            before = total
    at = place + tl.arange(0, PIECE)
    held = tl.load(counts + at * step, mask=at < length, other=0).to(tl.int64)
    sums = tl.cumsum(held, axis=0) + before
    short = (sums < wanted) & (at < length - 1)
    before = tl.maximum(before, tl.max(tl.where(short, sums, 0), axis=0))
    return place + tl.sum(short.to(tl.int64), axis=0), wanted - before


@triton.jit
def _from_top(counts, BINS: tl.constexpr, wanted, PIECE: tl.constexpr):
    """Return the bin where sums from the last bin down reach `wanted`, and how many are needed."""
    place, rest = _reaching(counts + BINS - 1, -1, BINS, wanted, PIECE)
    return BINS - 1 - place, rest


@triton.jit
def _narrow(
    counts,
    totals,
    wanted,
    bracket,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    SHIFT: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mine = counts + row * (BINS + 1)
    size = _total(mine, BINS, PIECE)
    place = tl.load(wanted + row) * size // tl.load(totals + row)
    margin = (3 * tl.sqrt(size.to(tl.float64))).to(tl.int64)
    top, bottom = tl.full((), BINS - 1, tl.int64), tl.zeros((), tl.int64)
    if place > margin:
        top, _ = _from_top(mine, BINS, place - margin, PIECE)
    if place + margin < size:
        bottom, _ = _from_top(mine, BINS, place + margin, PIECE)
    # Bins are narrower by the least power of two that suffices for the bracket.
    powers = tl.full((32,), 2, tl.int64) << tl.arange(0, 32)
    narrower = tl.sum((powers < top - bottom + 1).to(tl.int64), axis=0)
    tl.store(bracket + row, bottom << SHIFT)
    tl.store(bracket + ROWS + row, ((top + 1) << SHIFT) - 1)
    tl.store(bracket + 2 * ROWS + row, narrower)


@triton.jit
def _widen(
    counts,
    wanted,
    bracket,
    again,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SHIFT: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mine, needed = counts + row * (BINS + 1), tl.load(wanted + row)
    above = tl.load(mine + BINS).to(tl.int64)
    if (needed <= above) | (needed > above + _total(mine, BINS, PIECE)):
        _store_bracket(bracket + row, FIRST, LAST, SHIFT, ROWS)
        _store_bracket(again + row, FIRST, LAST, SHIFT, ROWS)


@triton.jit
def _store_bracket(bracket, first, last, shift, ROWS: tl.constexpr):
    tl.store(bracket, first)
    tl.store(bracket + ROWS, last)
    tl.store(bracket + 2 * ROWS, shift)


@triton.jit
def _zoom(
    counts,
    recounted,
    wanted,
    bracket,
    again,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mine = counts + row * (BINS + 1)
    if tl.load(again + row) <= tl.load(again + ROWS + row):
        mine = recounted + row * (BINS + 1)
    first, last = tl.load(bracket + row), tl.load(bracket + ROWS + row)
    shift = tl.load(bracket + 2 * ROWS + row)
    needed = tl.load(wanted + row) - tl.load(mine + BINS).to(tl.int64)
    place, rest = _from_top(mine, BINS, needed, PIECE)
    low = first + (place << shift)
    high = tl.minimum(low + (tl.full((), 1, tl.int64) << shift) - 1, last)
    tl.store(wanted + row, rest)
    _store_bracket(bracket + row, low, high, 0, ROWS)


@triton.jit
def _find_thresholds(
    counts,
    wanted,
    bracket,
    thresholds,
    cut,
    BINS: tl.constexpr,
    HIGHEST: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mine = counts + row * (BINS + 1)
    value, rest = _from_top(mine, BINS, tl.load(wanted + row), PIECE)
    tl.store(wanted + row, rest)
    tl.store(thresholds + row, tl.minimum(tl.load(bracket + row) + value, HIGHEST).to(tl.int32))
    tl.store(cut + row, rest < tl.load(mine + value).to(tl.int64))


@triton.jit
def _whole_places(places, row, at, ROWS: tl.constexpr):
    """Return the positions in the whole tensor of a tensor's entries `at`; see `FlatShard`."""
    run, stride = tl.load(places + row), tl.load(places + ROWS + row)
    offset, skipped = tl.load(places + 2 * ROWS + row), tl.load(places + 3 * ROWS + row)
    moved = at + skipped
    place = moved + offset
    if run != stride:
        place += moved // run * (stride - run)
    return place


@triton.jit(do_not_specialize=["blocks", "apart"])
def _count_ties(
    addresses,
    extents,
    places,
    thresholds,
    cut,
    counts,
    blocks,
    apart,
    TIE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STRIDED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    row, begin, left = _own_piece(extents, ROWS, ENTRIES)
    if tl.load(cut + row) & (tl.load(places + row) > 0):
        at = tl.arange(0, ENTRIES) + apart
        magnitude = _magnitudes(addresses, extents, row, begin, left, at, ROWS, STRIDED, DTYPE)
        block = _whole_places(places, row, begin + at, ROWS) // TIE_BLOCK
        one = tl.full((ENTRIES,), 1, tl.int64)
        tied = magnitude == tl.load(thresholds + row)
        mine = counts + row.to(tl.int64) * blocks
        tl.atomic_add(mine + block, one, mask=tied, sem="relaxed")


@triton.jit(do_not_specialize=["length"])
def _find_blocks(counts, wanted, cut, blocks, length, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(cut + row):
        block, rest = _reaching(counts + row * length, 1, length, tl.load(wanted + row), PIECE)
        tl.store(blocks + row, block)
        tl.store(wanted + row, rest)


@triton.jit(do_not_specialize=["apart"])
def _mark_ties(
    addresses,
    extents,
    places,
    thresholds,
    cut,
    blocks,
    marks,
    apart,
    TIE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STRIDED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    row, begin, left = _own_piece(extents, ROWS, ENTRIES)
    if tl.load(cut + row) & (tl.load(places + row) > 0):
        first = tl.load(blocks + row) * TIE_BLOCK
        # Places ascend with entries: only a piece that meets the block is read.
        lowest = _whole_places(places, row, begin, ROWS)
        highest = _whole_places(places, row, begin + left - 1, ROWS)
        if (highest >= first) & (lowest < first + TIE_BLOCK):
            at = tl.arange(0, ENTRIES) + apart
            magnitude = _magnitudes(addresses, extents, row, begin, left, at, ROWS, STRIDED, DTYPE)
            within = _whole_places(places, row, begin + at, ROWS) - first
            tied = (magnitude == tl.load(thresholds + row)) & (within >= 0) & (within < TIE_BLOCK)
            one = tl.full((ENTRIES,), 1, tl.int64)
            tl.store(marks + row.to(tl.int64) * TIE_BLOCK + within, one, mask=tied)


@triton.jit
def _find_cutoffs(
    marks,
    wanted,
    cut,
    blocks,
    cutoffs,
    TIE_BLOCK: tl.constexpr,
    ALL_TIES: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cutoff = tl.full((), ALL_TIES, tl.int64)
    if tl.load(cut + row):
        needed = tl.load(wanted + row)
        last, _ = _reaching(marks + row * TIE_BLOCK, 1, TIE_BLOCK, needed, PIECE)
        cutoff = tl.where(needed > 0, tl.load(blocks + row) * TIE_BLOCK + last + 1, 0)
    tl.store(cutoffs + row, cutoff)
