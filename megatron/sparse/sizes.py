"""The lengths of bitmaps.

Loads no torch: the planner uses it too. Loads no torch: the planner asks too.
"""

from __future__ import annotations

BLOCK = 1024
"""Entries for which it is kept how many are chosen before them."""
GROUP = 4
"""Blocks that a kernel may take at once: a bitmap has a multiple of so many."""


def bitmap_bytes(length: int) -> int:
    """Return the bytes of a bitmap with counts.

    It has a bit for each entry, up to a whole group of blocks, and for each block its count and the
    number before it, 8 bytes each.
    """
    blocks = -(-length // (GROUP * BLOCK)) * GROUP
    return blocks * (BLOCK // 8 + 16)
