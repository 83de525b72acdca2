"""Sizes of bitmaps, and of the counts that ranks sum to select. Loads no torch, for the planner."""

from __future__ import annotations

BLOCK = 1024
"""Entries per block; a bitmap keeps the number of chosen entries before each block."""
GROUP = 4
"""Blocks that a kernel may take at once; a bitmap has a multiple of this many."""
BINS = 1 << 16
"""Bins of a histogram of magnitudes."""
TIE_BLOCK = 1 << 16
"""Entries among which ties at a threshold are counted together."""
SAMPLE = 1 << 18
"""Entries in a GPU's first sample.

A sample narrows the bracket that is counted, as atomic additions to counters cost more than reading
the entries.
"""
BATCH = 16
"""Tensors counted together on a GPU, a power of two; the counts of each take 2 MiB."""
TOGETHER = 1 << 17
"""Largest sharded tensor that is cheaper to send whole than as two histograms, in entries."""


def bitmap_bytes(length: int) -> int:
    """Return the bytes of a bitmap of `length` entries.

    A bitmap has one bit per entry, padded to a whole group of blocks, and for each block its count
    and offset of 8 bytes each.
    """
    blocks = -(-length // (GROUP * BLOCK)) * GROUP
    return blocks * (BLOCK // 8 + 16)


def counted_bytes(total: int, device: str) -> list[int]:
    """Return the bytes of each sum over the ranks that select from a tensor of `total` entries.

    Ties at the threshold count where they are always looked for, which is on "cuda".
    """
    if total <= TOGETHER:
        return [4 * total]
    histogram = 8 * (BINS + 1)
    # Of a sample, around the threshold, and of everything if the sample misleads; then exact.
    passes = 4 if device == "cuda" and total > 16 * SAMPLE else 2
    ties = [8 * -(-total // TIE_BLOCK), 8 * TIE_BLOCK] if device == "cuda" else []
    return [histogram] * passes + ties
