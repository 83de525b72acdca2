"""Flat ranges cut into boxes: right order, nothing twice, few."""

from __future__ import annotations

import math
import random

import numpy as np

from megatron.checkpoint.format import common, flat_boxes, volume, within


def test_boxes_follow_one_another_in_row_major_order() -> None:
    draw = random.Random(1)
    for _ in range(500):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 4)))
        size = math.prod(shape)
        start, stop = sorted((draw.randint(0, size), draw.randint(0, size)))
        numbers = np.arange(size).reshape(shape)
        boxes = list(flat_boxes(shape, start, stop))
        runs = [numbers[within(box, (0,) * len(shape))].reshape(-1) for box in boxes]
        assert np.array_equal(np.concatenate([[], *runs]), np.arange(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        assert sum(map(volume, boxes)) == stop - start


def test_common_box() -> None:
    assert common(((0, 0), (4, 4)), ((2, 3), (9, 9))) == ((2, 3), (4, 4))
    assert common(((0, 0), (4, 4)), ((4, 0), (5, 4))) is None
    assert common(((), ()), ((), ())) == ((), ())


def test_an_empty_tensor_has_no_boxes() -> None:
    assert list(flat_boxes((0, 3), 0, 0)) == []
