"""Groups: text travels whole, and ranks fail together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.errors import DataError
from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks

TEXTS = ["", "a", "longer text: é, 漢字\n" * 50, "x" * 10_000]


def on_rank_gather(groups: ProcessGroups) -> list[str]:
    return groups.world.gather_text(TEXTS[groups.world.rank])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gather_text_brings_every_rank_every_text(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, on_rank_gather) == [TEXTS[:world]] * world


def on_rank_agreed(groups: ProcessGroups, bad_rank: int) -> str:
    def work() -> int:
        if groups.world.rank == bad_rank:
            raise DataError("corpus.bin: gone")
        return groups.world.rank

    try:
        return f"fine {groups.world.agreed(work)}"
    except DataError as error:
        return f"{error.exit_code} {error}"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_agreed_raises_on_every_rank_or_on_none(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, on_rank_agreed, world - 1) == ["3 corpus.bin: gone"] * world
    assert ranks.run(world, on_rank_agreed, -1) == [f"fine {r}" for r in range(world)]


def on_rank_sum(groups: ProcessGroups) -> list[float]:
    value = torch.tensor([float(groups.dp.rank + 1)])
    groups.dp.all_reduce(value, dist.ReduceOp.SUM)
    alone = torch.tensor([5.0])
    assert groups.tp.size == 1 and groups.tp.all_reduce(alone, dist.ReduceOp.SUM) is None
    return [value.item(), alone.item()]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_group_of_one_is_a_no_op(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, on_rank_sum) == [[world * (world + 1) / 2, 5.0]] * world
