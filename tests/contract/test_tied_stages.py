"""Tests of contract 5 on two stages: copies of a tied embedding get one sum and stay bit-equal."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import Group, ProcessGroups
from tests.contract.harness import PATHS, TIED, PathCase, Toy, case_id, gradients
from tests.ranks import Ranks

STEPS = 9
"""More steps than up to the second resample of the cases with an interval."""


def on_stage(groups: ProcessGroups, case: PathCase) -> list[dict[str, torch.Tensor]]:
    """Return what each step finds, with the two processes as the stages of one pipeline."""
    alone = Group((groups.world.rank,), 0)
    stages = dataclasses.replace(
        groups,
        dims=ParallelDims(tp=1, dp=1, pp=2),
        dp=alone,
        pp=groups.world,
        embedding=groups.world,
    )
    toy = Toy(stages, case)
    weight = next(info.param for info in toy.infos if info.name == TIED)
    found = []
    for t in range(STEPS):
        exists = toy.exists(TIED).clone()
        toy.backward([gradients(t, groups.world.rank)])
        assert len(toy.engine._work) == len(toy.engine.buckets) - 1, (
            "no sum while other stages still run backwards"
        )
        step = toy.finish()
        # Clone: the tensors may lie in a buffer that is used again.
        sent = {"reduced": toy.reduced(step)[TIED].clone()}
        toy.apply(step)
        sent |= {"kept": toy.residual()[TIED], "weight": weight.detach().clone(), "exists": exists}
        found.append(sent)
    return found


ON_STAGES = [case for case in PATHS if "dsr_interval" not in case.options]
"""Dynamic sparse training, which compares the weights of all stages, is refused."""


@pytest.mark.parametrize("case", ON_STAGES, ids=case_id)
def test_5_tied_copies_are_summed_over_their_stages_after_the_last_backward(
    ranks: Ranks, case: PathCase
) -> None:
    first, second = ranks.run(2, on_stage, case)
    before = torch.zeros_like(first[0]["kept"])
    for t, (mine, other) in enumerate(zip(first, second, strict=True)):
        for what in mine:
            assert torch.equal(mine[what], other[what]), (t, what)
        if not case.conserves or "outer_compression" in case.options:
            continue  # what is kept is no part of the sum, or a part of other changes
        wanted = (gradients(t, 0)[TIED] + gradients(t, 1)[TIED]).reshape(-1)
        wanted = wanted * mine["exists"] + before
        torch.testing.assert_close(mine["reduced"] + mine["kept"], wanted, rtol=1e-5, atol=1e-5)
        before = mine["kept"]
