"""Boxes and flat ranges of row-major tensors: the arithmetic under slices and resharding.

A box is a pair of corners `(start, stop)`, one entry per axis, stop not included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Corner = tuple[int, ...]
Box = tuple[Corner, Corner]


def volume(box: Box) -> int:
    """Number of entries in a box; 1 without axes."""
    return math.prod(stop - start for start, stop in zip(*box, strict=True))


def common(one: Box, other: Box) -> Box | None:
    """The box that two boxes share, None where they share no entry."""
    start = tuple(map(max, one[0], other[0]))
    stop = tuple(map(min, one[1], other[1]))
    return (start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def within(box: Box, origin: Corner) -> tuple[slice, ...]:
    """Index of a box in an array whose first entry is the tensor's entry `origin`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(*box, origin, strict=True))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut entries `[start, stop)` of a flattened tensor into boxes, in row-major order.

    Each box lies without gaps in that range, the boxes follow one another in it, and there are at
    most 2 x axes - 1 of them: a ragged first row, full rows, a ragged last row, on every axis.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = tuple(shape[1:])
    size = math.prod(inner)
    first, head = divmod(start, size)
    last, tail = divmod(stop, size)
    if first == last:
        yield from _in_row(first, inner, head, tail)
        return
    if head:
        yield from _in_row(first, inner, head, size)
        first += 1
    if first < last:
        yield (first, *(0 for _ in inner)), (last, *inner)
    yield from _in_row(last, inner, 0, tail)


def _in_row(row: int, shape: Corner, start: int, stop: int) -> Iterator[Box]:
    for low, high in flat_boxes(shape, start, stop):
        yield (row, *low), (row + 1, *high)
