"""Triton kernels for bitmaps of chosen entries.

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

from megatron.sparse.reference import BLOCK, GROUP, WORDS, Bits

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
# Specialising on lengths, places, or the alignment of single numbers, which lie in rows of tensors,
# would compile kernels for each part of each tensor.


# An argument `apart` is always 0, unknown to Triton, which then assumes scattered entries and
# assigns neighbouring ones to neighbouring threads instead of four in a row to each thread. Loads
# are as fast, and the stores need no exchange between threads.


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


@triton.jit
def magnitude_bits(value):
    """Return the bits of |x| as fp32, int32, as `reference.magnitudes` does."""
    if value.dtype == tl.bfloat16:  # a conversion may lose denormal numbers
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return bits & 0x7FFFFFFF


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
    magnitude = magnitude_bits(found)
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
