"""Every gradient path computes on every grid of four ranks the same as on one rank."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.launch import Launch, Runtime
from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks, grid
from tests.tiers import sampled
from tools import parity
from tools.parity_cases import CASES, ParityCase, ParityGrid
from tools.parity_compare import Differences, Gathered, compare, gather
from tools.parity_rank import run_case

GRIDS = [
    ParityGrid(tp=4, sequence_parallel=True),
    ParityGrid(pp=4),
    ParityGrid(tp=2, dp=2),
    ParityGrid(pp=2, dp=2),
    ParityGrid(pp=2, dp=2, virtual_layers=1),
    ParityGrid(tp=2, pp=2, sequence_parallel=True),
]
ON_PUSH = [ParityGrid(tp=2, dp=2)]
"""Golden runs hold each path to one rank on each axis of the grid."""
BY_NAME = {case.name: case for case in CASES}
SHORT = [
    BY_NAME["dense"],
    BY_NAME["samo, 0.5 by magnitude"],
    BY_NAME["radius, density 0.4"],
    BY_NAME["samo+radius, 0.5 and 0.4"],
]
"""The others are their limits, of which contract 9 says that they are bitwise the same."""
ENDS = [SHORT[0], SHORT[-1]]
"""Nothing changed, and everything: layout and reducer. The grid that has it all runs all four."""


def on_grid(
    world: ProcessGroups, sizes: ParityGrid, cases: list[ParityCase]
) -> list[dict[str, Any]]:
    rank, size = world.world.rank, world.world.size
    launch = Launch(
        launcher="test", rank=rank, world_size=size, local_rank=rank, local_world_size=size
    )
    runtime = Runtime(launch=launch, device=torch.device("cpu"), backend="gloo")
    groups = grid(world, tp=sizes.tp, pp=sizes.pp)
    with tempfile.TemporaryDirectory() as own:
        return [run_case(case, sizes, runtime, groups, Path(own)) for case in cases]


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks.run(1, on_grid, ParityGrid(), SHORT)[0]


@pytest.mark.push
@pytest.mark.parametrize("sizes", sampled(GRIDS, ON_PUSH), ids=str)
def test_a_grid_computes_what_one_rank_computes(
    ranks: Ranks, alone: list[dict[str, Any]], sizes: ParityGrid
) -> None:
    cases = SHORT if sizes.tp > 1 and sizes.pp > 1 else ENDS
    found = ranks.run(sizes.ranks, on_grid, sizes, cases)
    for number, case in enumerate(cases):
        one = gather(iter([alone[SHORT.index(case)]]))
        other = gather(iter(rank[number] for rank in found))
        result = compare(one, other, case)
        assert result.good, str(result)


def _found(**changes: Any) -> dict[str, Any]:
    whole = [((0, 0), (2, 3))] * 2
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    found: dict[str, Any] = {
        "losses": [3.0, 2.0],
        "gradients": {"w": tensor},
        "weights": {"w": tensor},
        "pieces": {"w": {"shape": (2, 3), "boxes": [whole]}},
    }
    return found | changes


def _differences(*ranks: dict[str, Any]) -> Differences:
    def gathered(*found: dict[str, Any]) -> Gathered:
        return gather(iter(found))

    return compare(gathered(_found()), gathered(*ranks), BY_NAME["dense"])


def test_what_is_more_than_rounding_is_told() -> None:
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert _differences(_found()).good
    off = _differences(_found(weights={"w": tensor + 1e-3}))
    assert not off.good and "DIFFERS" in str(off) and "most in w" in str(off)
    assert not _differences(_found(gradients={"w": tensor * np.nan})).good
    assert not _differences(_found(losses=[3.0, 2.1])).good


def test_copies_and_parts_are_compared() -> None:
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    other = tensor.copy()
    other[1, 1] = np.nextafter(other[1, 1], 9)
    assert _differences(_found(), _found(weights={"w": other})).unequal == ("w",)
    half = {"w": {"shape": (2, 3), "boxes": [[((0, 0), (1, 3))] * 2]}}
    first = _found(gradients={"w": tensor[:1]}, weights={"w": tensor[:1]}, pieces=half)
    assert _differences(first).unequal == ("w",), "a part that nobody holds"


def test_wrong_values_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["--tp", "3"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "num_attention_heads 8" in told
    assert parity.main(["--pp", "2", "--", "--num-layers", "1"]) == 2
    assert "num_layers 1" in capsys.readouterr().err
