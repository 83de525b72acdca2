"""Triton kernels that choose entries: histograms of magnitudes, counts of ties, and bitmaps.

`reference.py` has the same functions in plain torch. Kernels elsewhere use `launch_moving` and
`chosen_entries` to move chosen entries: the bitmap words of a program's blocks and the number of
entries chosen before them give the positions of its values, without a list or a count on the host.
Imported on CUDA only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from megatron.sparse.reference import BINS, BLOCK, GROUP, TIE_BLOCK, WORDS, Bits

if TYPE_CHECKING:
    from megatron.sparse.shard import FlatShard

_WARPS = 8
_MOVED, _MOVING_WARPS = 2, 4
"""Blocks and warps per program of the kernels that move chosen entries.

Of 1, 2 and 4 blocks with 4 and 8 warps, these take the least time on an H200
(`tools/bench/gpu/h200/selection.txt`).
"""
_ENTRIES = GROUP * BLOCK
"""Entries per program."""
# Specialising on lengths, places, or the alignment of single numbers and of counts, which lie in
# rows of tensors, would compile kernels for each part of each tensor.


def launch(
    kernel: Any, programs: int, *arguments: Any, warps: int = _WARPS, **options: Any
) -> None:
    """Launch `programs` programs of a Triton kernel on the current stream."""
    if programs:
        # Set explicitly, as Triton's default for fused multiply-add will change.
        kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=True, **options)


def launch_over(
    kernel: Any, at_once: int, bits: Bits, blocks: int, *arguments: Any, **options: Any
) -> None:
    """Launch a kernel on `at_once` blocks per program, with the bitmap as its first arguments."""
    if bits.patch is None or bits.patches is None:
        # An unpatched kernel does not read the patch arguments.
        chosen = (bits.words, bits.offsets, bits.words, bits.words)
    else:
        chosen = (bits.words, bits.offsets, bits.patch, bits.patches)
    sizes = {"BLOCKS": at_once, "WORDS": WORDS, "PATCHED": bits.patches is not None}
    launch(kernel, -(-blocks // at_once), *chosen, *arguments, **options, **sizes)


def launch_moving(kernel: Any, bits: Bits, blocks: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel that moves the chosen entries of a bitmap's blocks."""
    launch_over(kernel, _MOVED, bits, blocks, *arguments, warps=_MOVING_WARPS, **options)


def add_histogram(values: torch.Tensor, bracket: torch.Tensor, counts: torch.Tensor) -> None:
    """Count as `reference.add_histogram` does; an empty bracket costs a launch and no reading."""
    numel = values.numel()
    sizes = {"BINS": BINS, "ENTRIES": _ENTRIES}
    launch(_histogram, -(-numel // _ENTRIES), values, bracket, counts, numel, 0, **sizes)


def add_tie_counts(
    values: torch.Tensor,
    threshold: torch.Tensor,
    wanted: torch.Tensor,
    shard: FlatShard,
    counts: torch.Tensor,
) -> None:
    """Count as `reference.add_tie_counts` does; nothing is read unless `wanted`."""
    _launch_ties(_tie_counts, values, threshold, wanted, counts, shard)


def mark_ties(
    values: torch.Tensor,
    threshold: torch.Tensor,
    block: torch.Tensor,
    shard: FlatShard,
    marks: torch.Tensor,
) -> None:
    """Mark as `reference.mark_ties` does; only entries that may be in the block are read."""
    _launch_ties(_mark_ties, values, threshold, block, marks, shard)


def _launch_ties(
    kernel: Any,
    values: torch.Tensor,
    threshold: torch.Tensor,
    which: torch.Tensor,
    out: torch.Tensor,
    shard: FlatShard,
) -> None:
    numel = values.numel()
    where = (shard.row, shard.stride, shard.offset, shard.first)
    sizes = {"TIE_BLOCK": TIE_BLOCK, "ENTRIES": _ENTRIES}
    programs = -(-numel // _ENTRIES)
    launch(kernel, programs, values, threshold, which, out, numel, *where, 0, **sizes)


def write_bits(
    words: torch.Tensor,
    start: int,
    values: torch.Tensor,
    threshold: torch.Tensor,
    cutoff: torch.Tensor,
    shard: FlatShard,
) -> None:
    """Write as `reference.write_bits` does."""
    numel = values.numel()
    first, last = start // _ENTRIES, -(-(start + numel) // _ENTRIES)
    launch(
        _write_bits,
        last - first,
        words,
        values,
        threshold,
        cutoff,
        first,
        start,
        numel,
        shard.row,
        shard.stride,
        shard.offset,
        shard.first,
        IS_RUN=shard.is_run,
        WORDS=_ENTRIES // 32,
    )


def count_blocks(words: torch.Tensor) -> torch.Tensor:
    """Count as `reference.count_blocks` does."""
    rows = words.shape[0]
    counts = torch.empty(rows, dtype=torch.int64, device=words.device)
    if rows:
        launch(_count_blocks, -(-rows // 64), words, counts, rows, ROWS=64, WORDS=WORDS)
    return counts


# `apart` is always 0, unknown to Triton, which then assumes scattered entries and assigns
# neighbouring ones to neighbouring threads instead of four in a row to each thread. Loads are as
# fast, and the stores need no exchange between threads.


@triton.jit
def _magnitudes(values, at, numel):
    """Return the bits of |x| as fp32 of entries `at`, int32; -1 from entry `numel` on."""
    found = tl.load(values + at, mask=at < numel, other=0.0)
    return tl.where(at < numel, _magnitude(found), -1)


@triton.jit
def _magnitude(value):
    """Return the bits of |x| as fp32, int32, as `reference.magnitudes` does."""
    if value.dtype == tl.bfloat16:  # a conversion may lose denormal numbers
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return bits & 0x7FFFFFFF


@triton.jit(
    do_not_specialize=["numel", "apart"], do_not_specialize_on_alignment=["bracket", "counts"]
)
def _histogram(values, bracket, counts, numel, apart, BINS: tl.constexpr, ENTRIES: tl.constexpr):
    first, last = tl.load(bracket).to(tl.int32), tl.load(bracket + 1).to(tl.int32)
    shift = tl.load(bracket + 2).to(tl.int32)
    if first <= last:
        begin = tl.program_id(0).to(tl.int64) * ENTRIES
        left = tl.minimum(numel - begin, ENTRIES).to(tl.int32)
        magnitude = _magnitudes(values + begin, tl.arange(0, ENTRIES) + apart, left)
        kind = counts.dtype.element_ty
        above = tl.sum((magnitude > last).to(tl.int32), axis=0)
        tl.atomic_add(counts + BINS, above.to(kind), sem="relaxed")
        # Millions of atomic additions to the counter of zeros would be serialized.
        if first == 0:
            zeros = tl.sum((magnitude == 0).to(tl.int32), axis=0)
            tl.atomic_add(counts, zeros.to(kind), sem="relaxed")
        inside = (magnitude >= tl.maximum(first, 1)) & (magnitude <= last)
        one = tl.full((ENTRIES,), 1, kind)
        tl.atomic_add(counts + ((magnitude - first) >> shift), one, mask=inside, sem="relaxed")


@triton.jit(
    do_not_specialize=["numel", "row", "stride", "offset", "skipped", "apart"],
    do_not_specialize_on_alignment=["threshold", "wanted", "counts"],
)
def _tie_counts(
    values,
    threshold,
    wanted,
    counts,
    numel,
    row,
    stride,
    offset,
    skipped,
    apart,
    TIE_BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    if tl.load(wanted):
        begin = tl.program_id(0).to(tl.int64) * ENTRIES
        left = tl.minimum(numel - begin, ENTRIES).to(tl.int32)
        at = tl.arange(0, ENTRIES) + apart
        tied = _magnitudes(values + begin, at, left) == tl.load(threshold)
        place = begin + skipped + at
        logical = place // row * stride + place % row + offset
        one = tl.full((ENTRIES,), 1, tl.int64)
        tl.atomic_add(counts + logical // TIE_BLOCK, one, mask=tied, sem="relaxed")


@triton.jit(
    do_not_specialize=["numel", "row", "stride", "offset", "skipped", "apart"],
    do_not_specialize_on_alignment=["threshold", "block", "marks"],
)
def _mark_ties(
    values,
    threshold,
    block,
    marks,
    numel,
    row,
    stride,
    offset,
    skipped,
    apart,
    TIE_BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * ENTRIES
    left = tl.minimum(numel - begin, ENTRIES).to(tl.int32)
    first = tl.load(block) * TIE_BLOCK
    lowest, highest = begin + skipped, begin + skipped + left - 1
    # Places ascend with entries.
    starts = lowest // row * stride + lowest % row + offset
    ends = highest // row * stride + highest % row + offset
    if (ends >= first) & (starts < first + TIE_BLOCK):
        at = tl.arange(0, ENTRIES) + apart
        tied = _magnitudes(values + begin, at, left) == tl.load(threshold)
        place = lowest + at
        within = place // row * stride + place % row + offset - first
        one = tl.full((ENTRIES,), 1, tl.int64)
        inside = tied & (within >= 0) & (within < TIE_BLOCK)
        tl.store(marks + within, one, mask=inside)


@triton.jit(
    do_not_specialize=["first", "numel", "row", "stride", "offset", "skipped"],
    do_not_specialize_on_alignment=["threshold", "cutoff"],
)
def _write_bits(
    words,
    values,
    threshold,
    cutoff,
    first,
    start,
    numel,
    row,
    stride,
    offset,
    skipped,
    IS_RUN: tl.constexpr,
    WORDS: tl.constexpr,
):
    ENTRIES: tl.constexpr = WORDS * 32
    number = tl.program_id(0).to(tl.int64) + first
    target = words + number * WORDS + tl.arange(0, WORDS)
    entry = tl.arange(0, 32)[None, :]
    at = tl.arange(0, WORDS)[:, None] * 32 + entry
    # Offsets within a program fit 32 bits; large terms are subtracted beforehand.
    begin = number * ENTRIES - start
    lowest = tl.maximum(-begin, 0).to(tl.int32)
    left = tl.minimum(numel - begin, ENTRIES).to(tl.int32)
    whole = (lowest == 0) & (left == ENTRIES)
    if whole:  # unmasked loads read four entries at once
        found = tl.load(values + begin + at)
    else:
        found = tl.load(values + begin + at, mask=(at >= lowest) & (at < left), other=0.0)
    magnitude = _magnitude(found)
    limit, before = tl.load(threshold), tl.load(cutoff)
    if IS_RUN:
        early = at < tl.maximum(tl.minimum(before - offset - begin, ENTRIES), 0).to(tl.int32)
    else:
        local = begin + skipped + at
        early = local // row * stride + local % row + offset < before
    chosen = (magnitude > limit) | ((magnitude == limit) & early)
    # Eight entries to a byte, the first in its highest bit: entry e has bit e ^ 7 of its word.
    word = tl.sum(chosen.to(tl.int32) << (entry ^ 7), axis=1)
    if not whole:
        inside = (at >= lowest) & (at < left)
        written = tl.sum(inside.to(tl.int32) << (entry ^ 7), axis=1)
        held = tl.load(target)
        word = held ^ ((held ^ word) & written)
    tl.store(target, word)


@triton.jit(do_not_specialize=["rows"])
def _count_blocks(words, counts, rows, ROWS: tl.constexpr, WORDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    held = _popcount(tl.load(words + at, mask=(row < rows)[:, None], other=0))
    tl.store(counts + row, tl.sum(held, axis=1).to(tl.int64), mask=row < rows)


@triton.jit
def chosen_entries(
    words,
    patch,
    patches,
    first,
    PATCHED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Return whether each entry of a program's blocks is chosen, and its place among the chosen."""
    at = tl.arange(0, BLOCKS * WORDS)
    if PATCHED:
        row = tl.load(patch + first + at // WORDS).to(tl.int64)
        own = tl.load(words + first * WORDS + at, mask=row < 0, other=0)
        word = own | tl.load(patches + row * WORDS + at % WORDS, mask=row >= 0, other=0)
    else:
        word = tl.load(words + first * WORDS + at)
    # Eight entries to a byte, the first in its highest bit: entry e has bit e ^ 7 of its word, and
    # before it come the bytes below its own and the bits above its own.
    entry = tl.arange(0, 32)
    bytes_before = (1 << (entry & 24)) - 1
    bits_before = ((0xFF00 >> (entry & 7)) & 0xFF) << (entry & 24)
    bit = (word[:, None] >> (entry ^ 7)[None, :]) & 1
    count = _popcount(word)
    earlier = _popcount(word[:, None] & (bytes_before | bits_before)[None, :])
    place = (tl.cumsum(count, axis=0) - count)[:, None] + earlier
    # One dimension, since Triton may otherwise assign the wrong one to threads.
    ENTRIES: tl.constexpr = BLOCKS * WORDS * 32
    return tl.reshape(bit, (ENTRIES,)) != 0, tl.reshape(place, (ENTRIES,))


@triton.jit
def _popcount(word):
    """Return the number of bits set in each int32 (Warren, Hacker's Delight, 5-1)."""
    # The compiler recognizes this form as the machine's own instruction.
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)
