"""How much of what is pruned, before there are tensors. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

DRAWS = 5
"""Early-bird masks that must be alike, the newest among them: the length of the paper's queue."""


def is_prunable(name: str, shape: Sequence[int], *, keep_embeddings: bool) -> bool:
    """Whether a tensor is a weight matrix, or an embedding and these are not kept: biases and
    norms, which have one axis, never are. An embedding is what has the word in its name."""
    return len(shape) > 1 and not (keep_embeddings and "embedding" in name)


def stored_count(entries: int, sparsity: Fraction) -> int:
    """Entries to store out of so many: all but floor(p n), and at least one."""
    assert entries > 0 and 0 <= sparsity < 1
    return max(entries - math.floor(sparsity * entries), 1)


def first_ticket(interval: int) -> int:
    """The earliest update after which an early-bird ticket can be drawn."""
    return DRAWS * interval
