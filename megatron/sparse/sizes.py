"""Sizes of the bitmaps of sparse tensors. Loads no torch, for the planner."""

from __future__ import annotations

BLOCK = 1024
"""Entries per block; a bitmap keeps the number of chosen entries before each block."""
GROUP = 4
"""Blocks that a kernel may take at once; a bitmap has a multiple of this many."""


def bitmap_bytes(length: int) -> int:
    """Return the bytes of a bitmap of `length` entries.

    A bitmap has one bit per entry, padded to a whole group of blocks, and for each block its count
    and offset of 8 bytes each.
    """
    blocks = -(-length // (GROUP * BLOCK)) * GROUP
    return blocks * (BLOCK // 8 + 16)
