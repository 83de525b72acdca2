"""How much of a parameter each baseline sends. No torch: the planner asks too."""

from __future__ import annotations

import math


def count(density: float, entries: int) -> int:
    """k = ceil(d n), so that top-k leaves no parameter out."""
    return math.ceil(density * entries)


def is_smaller(rows: int, columns: int, rank: int) -> bool:
    """Whether factors of this rank have fewer entries than the matrix, which bounds the rank by
    both sides as well."""
    return rank * (rows + columns) < rows * columns
