"""Rank arithmetic: a bijection in either order, with tp fastest."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product
from typing import Literal

import pytest

from megatron.errors import ConfigError
from megatron.parallel.dims import Coordinates, Order, ParallelDims

ORDERS: tuple[Order, ...] = ("tp-dp-pp", "tp-pp-dp")
GRIDS = [
    ParallelDims(tp=t, dp=d, pp=p, order=order)
    for t, d, p, order in product((1, 2, 3), (1, 2, 4), (1, 2, 5), ORDERS)
]


def test_rank_and_coordinates_are_inverse() -> None:
    for dims in GRIDS:
        everyone = list(range(dims.world_size))
        assert len({dims.coordinates(rank) for rank in everyone}) == dims.world_size, dims
        assert [dims.rank(dims.coordinates(rank)) for rank in everyone] == everyone, dims


@pytest.mark.parametrize("axis", ["tp", "dp", "pp"])
def test_lines_partition_the_world(axis: Literal["tp", "dp", "pp"]) -> None:
    for dims in GRIDS:
        lines = dims.lines(axis)
        assert sorted(rank for line in lines for rank in line) == list(range(dims.world_size)), dims
        assert {len(line) for line in lines} == {getattr(dims, axis)}, dims
        for line in lines:
            others = [dims.coordinates(r)._replace(**{axis: 0}) for r in line]
            assert len(set(others)) == 1 and list(line) == sorted(line), dims


def test_rank_order_is_tp_then_dp_then_pp() -> None:
    dims = ParallelDims(tp=2, dp=3, pp=2)
    assert [dims.coordinates(r) for r in (0, 1, 2, 6)] == [
        Coordinates(0, 0, 0),
        Coordinates(1, 0, 0),
        Coordinates(0, 1, 0),
        Coordinates(0, 0, 1),
    ]


def test_rank_order_is_tp_then_pp_then_dp_where_pipelines_come_first() -> None:
    dims = ParallelDims(tp=2, dp=3, pp=2, order="tp-pp-dp")
    assert [dims.coordinates(r) for r in (0, 1, 2, 4)] == [
        Coordinates(0, 0, 0),
        Coordinates(1, 0, 0),
        Coordinates(0, 0, 1),
        Coordinates(0, 1, 0),
    ]


def test_groups_of_the_first_axes_are_blocks_of_consecutive_ranks() -> None:
    for dims in GRIDS:
        second = "dp" if dims.order == "tp-dp-pp" else "pp"
        size = dims.tp * dims.sizes[second]
        for line in dims.lines("tp"):
            assert list(line) == list(range(line[0], line[0] + dims.tp)), dims
        for line in dims.lines(second):
            assert len({rank // size for rank in line}) == 1, dims
            assert [b - a for a, b in pairwise(line)] == [dims.tp] * (len(line) - 1), dims


def test_the_order_moves_ranks_and_keeps_the_places() -> None:
    for dims in GRIDS:
        other = replace(dims, order="tp-dp-pp" if dims.order == "tp-pp-dp" else "tp-pp-dp")
        mine, theirs = (
            [each.coordinates(rank) for rank in range(dims.world_size)] for each in (dims, other)
        )
        assert set(theirs) == set(mine), dims
        # The first rank writes, and the last one has the loss, in either order.
        assert (theirs[0], theirs[-1]) == (mine[0], mine[-1]), dims
        if dims.dp == 1 or dims.pp == 1:
            assert theirs == mine, dims


@pytest.mark.parametrize(("world", "expected"), [(6, "start 4 or 8 ranks"), (3, "start 4 ranks")])
def test_world_that_does_not_fit_names_the_nearest(world: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"world size {world} is not a multiple of 4.*{expected}"):
        ParallelDims.from_world(world, tp=2, pp=2)


@pytest.mark.push
def test_dims_import_no_torch() -> None:
    code = "import sys, megatron.parallel.dims; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "False", answer.stderr
