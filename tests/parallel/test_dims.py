"""Rank arithmetic: a bijection in either order, with tp fastest."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product

import pytest

from megatron.errors import ConfigError
from megatron.parallel.dims import Coordinates, Order, ParallelDims

ORDERS: tuple[Order, ...] = ("tp-dp-pp", "tp-pp-dp")
GRIDS = [
    ParallelDims(tp=t, dp=d, pp=p, order=order)
    for t, d, p, order in product((1, 2, 3), (1, 2, 4), (1, 2, 5), ORDERS)
]


@pytest.mark.parametrize("dims", GRIDS, ids=str)
def test_rank_and_coordinates_are_inverse(dims: ParallelDims) -> None:
    seen = {dims.coordinates(rank) for rank in range(dims.world_size)}
    assert len(seen) == dims.world_size
    assert [dims.rank(dims.coordinates(r)) for r in range(dims.world_size)] == list(
        range(dims.world_size)
    )


@pytest.mark.parametrize("dims", GRIDS, ids=str)
@pytest.mark.parametrize("axis", ["tp", "dp", "pp"])
def test_lines_partition_the_world(dims: ParallelDims, axis: str) -> None:
    lines = dims.lines(axis)  # type: ignore[arg-type]
    assert sorted(rank for line in lines for rank in line) == list(range(dims.world_size))
    assert {len(line) for line in lines} == {getattr(dims, axis)}
    for line in lines:
        others = [dims.coordinates(r)._replace(**{axis: 0}) for r in line]
        assert len(set(others)) == 1 and list(line) == sorted(line)


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


@pytest.mark.parametrize("dims", GRIDS, ids=str)
def test_groups_of_the_first_axes_are_blocks_of_consecutive_ranks(dims: ParallelDims) -> None:
    second = "dp" if dims.order == "tp-dp-pp" else "pp"
    size = dims.tp * dims.sizes[second]
    for line in dims.lines("tp"):
        assert list(line) == list(range(line[0], line[0] + dims.tp))
    for line in dims.lines(second):
        assert len({rank // size for rank in line}) == 1
        assert [b - a for a, b in pairwise(line)] == [dims.tp] * (len(line) - 1)


@pytest.mark.parametrize("dims", GRIDS, ids=str)
def test_the_order_moves_ranks_and_keeps_the_places(dims: ParallelDims) -> None:
    other = replace(dims, order="tp-dp-pp" if dims.order == "tp-pp-dp" else "tp-pp-dp")
    places = {other.coordinates(rank) for rank in range(other.world_size)}
    assert places == {dims.coordinates(rank) for rank in range(dims.world_size)}
    # The first rank writes, and the last one has the loss, in either order.
    for rank in (0, dims.world_size - 1):
        assert other.coordinates(rank) == dims.coordinates(rank)
    if dims.dp == 1 or dims.pp == 1:
        assert [other.coordinates(r) for r in range(dims.world_size)] == [
            dims.coordinates(r) for r in range(dims.world_size)
        ]


@pytest.mark.parametrize(("world", "expected"), [(6, "start 4 or 8 ranks"), (3, "start 4 ranks")])
def test_world_that_does_not_fit_names_the_nearest(world: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"world size {world} is not a multiple of 4.*{expected}"):
        ParallelDims.from_world(world, tp=2, pp=2)


def test_dims_import_no_torch() -> None:
    code = "import sys, megatron.parallel.dims; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "False", answer.stderr
