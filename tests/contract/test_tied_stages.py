"""Contract 5 on two stages: the copies of a tied embedding see one sum and stay bit-equal."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import Group, ProcessGroups
from tests.contract.harness import PATHS, TIED, PathCase, Toy, case_id, gradients
from tests.ranks import Ranks


def on_stage(
    groups: ProcessGroups, case: PathCase
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    # The same two processes, now as the two stages of one pipeline.
    alone = Group((groups.world.rank,), 0)
    stages = dataclasses.replace(
        groups,
        dims=ParallelDims(tp=1, dp=1, pp=2),
        dp=alone,
        pp=groups.world,
        embedding=groups.world,
    )
    toy = Toy(stages, case)
    toy.backward([gradients(0, groups.world.rank)])
    waited = len(toy.engine._work) == len(toy.engine.buckets) - 1
    step = toy.finish()
    reduced = toy.reduced(step)[TIED]
    toy.apply(step)
    weight = next(info.param for info in toy.infos if info.name == TIED)
    return reduced, toy.residual()[TIED], weight.detach().clone(), waited


@pytest.mark.parametrize("case", PATHS, ids=case_id)
def test_5_tied_copies_are_summed_over_their_stages_after_the_last_backward(
    ranks: Ranks, case: PathCase
) -> None:
    stages = ranks.run(2, on_stage, case)
    assert all(waited for *_, waited in stages), "no sum while other stages still run backwards"
    (first, kept, first_weight, _), (second, also_kept, second_weight, _) = stages
    assert torch.equal(first, second) and torch.equal(first_weight, second_weight)
    assert torch.equal(kept, also_kept)
    wanted = (gradients(0, 0)[TIED] + gradients(0, 1)[TIED]).reshape(-1)
    torch.testing.assert_close(first + kept, wanted, rtol=1e-5, atol=1e-6)
