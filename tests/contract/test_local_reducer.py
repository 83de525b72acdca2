"""A reducer may exchange nothing, as methods that average weights every H steps do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.data_parallel.all_reduce import TransferWork
from megatron.data_parallel.bucket import GradBucket
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.reducer import GradientReducer, StepContext, Work
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import PathCase, Toy, gradients, same
from tests.ranks import Ranks

DENSE = PathCase("dense")
ALONE = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)


class LocalReducer(GradientReducer):
    """Gives each rank its own gradient."""

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        return TransferWork(bucket.grad, None)


def on_rank(groups: ProcessGroups) -> dict[str, Any]:
    """Compare three steps with the same steps on one rank alone.

    Each rank has its own gradients. Then one gradient on the last rank is not finite.
    """
    rank, alone = groups.dp.rank, Toy(ALONE, DENSE)
    toy = Toy(groups, DENSE)
    toy.engine.reducer = LocalReducer(Exchange(groups.dp))
    differ: list[str] = []
    for number in range(3):
        mine = [gradients(number, rank)]
        steps = [one.step(mine, clip_norm=0.0) for one in (toy, alone)]
        assert all(step.ok for step in steps)
        differ += same(toy.state(), alone.state())
    sent = toy.engine.stats().bytes_sent
    broken = gradients(9, rank)
    if rank == groups.dp.size - 1:
        broken["second.weight"].view(-1)[0] = math.nan
    return {"differ": differ, "sent": sent, "ok": toy.step([broken]).ok}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_applies_its_own_gradient_and_all_skip_a_step_together(
    ranks: Ranks, world: int
) -> None:
    assert ranks.run(world, on_rank) == [{"differ": [], "sent": 0, "ok": False}] * world
