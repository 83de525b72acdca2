"""Tests of the functions for hand-written training loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from megatron.sparse.selection import select_largest
from radius.functional import select, sparse_all_reduce
from tests.radius.toys import index_of
from tests.ranks import Ranks

ZERO = 74
"""Position where the update is 0, which is never selected."""


def on_rank_by_hand(groups: ProcessGroups, bad: float, bits: bool) -> dict[str, torch.Tensor]:
    with index_of(bits):
        return by_hand(groups, bad)


def by_hand(groups: ProcessGroups, bad: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(groups.dp.rank)
    local, residual = (torch.randn(300, generator=generator) for _ in range(2))
    if groups.dp.rank == 1 and not math.isfinite(bad):
        local[ZERO] = bad
    update = torch.arange(300.0) % 150 - ZERO
    index = select(update, 0.41, group=None)
    positions = torch.empty(index.numel, dtype=torch.int64)
    index.gather(torch.arange(300), positions)
    residual[positions] = 0.0
    sparse, dense, kept = local.clone(), local.clone(), residual.clone()
    rest = sparse_all_reduce(sparse, index, residual, dist.group.WORLD)
    flushed = sparse_all_reduce(dense, None, residual)
    assert torch.equal(residual, kept), "the caller's until the step is taken"
    found = {"local": local, "residual": residual, "positions": positions, "update": update}
    return found | {"sparse": sparse, "rest": rest, "dense": dense, "flushed": flushed}


@pytest.mark.parametrize("bits", [False, True])
def test_by_hand_sends_what_is_chosen_and_keeps_the_rest(ranks: Ranks, bits: bool) -> None:
    one, two = ranks.run(2, on_rank_by_hand, 0.0, bits)
    positions = one["positions"]
    # Ties go to the first entries: four entries have each magnitude.
    order = torch.sort(one["update"].abs(), descending=True, stable=True).indices
    assert torch.equal(positions, order[: math.ceil(0.41 * 300)].sort().values)
    sent = torch.zeros(300).index_fill_(0, positions, 1.0)
    for rank in (one, two):
        assert torch.equal(rank["rest"], (rank["residual"] + rank["local"]) * (1 - sent))
        assert torch.equal(rank["sparse"], (one["local"] + two["local"]) / 2 * sent)
        whole = [r["local"] + r["residual"] for r in (one, two)]
        torch.testing.assert_close(rank["dense"], sum(whole) / 2)
        assert not rank["flushed"].any()


@pytest.mark.parametrize("bits", [False, True])
def test_by_hand_every_rank_sees_a_gradient_that_is_not_finite(ranks: Ranks, bits: bool) -> None:
    found = ranks.run(2, on_rank_by_hand, math.inf, bits)
    assert all(ZERO not in rank["positions"].tolist() for rank in found)
    assert not any(rank["sparse"].isfinite().all() for rank in found)


def on_rank_other_rounding(groups: ProcessGroups, bits: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the common selection of all ranks, and what this rank alone would select."""
    generator = torch.Generator().manual_seed(0)
    update = torch.randn(300, generator=generator).mul_(10).round_()  # rounded: many are equal
    noise = torch.randn(300, generator=torch.Generator().manual_seed(groups.dp.rank))
    update *= 1 + 1e-6 * noise
    alone = torch.zeros(300, dtype=torch.bool)
    alone[select_largest(update, 120).positions(0, 300).long()] = True
    with index_of(bits):
        packed = select(update, 0.4, group=dist.group.WORLD).packed(0, 300)
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=300)).bool(), alone


@pytest.mark.parametrize("bits", [False, True])
def test_by_hand_ranks_that_round_differently_take_the_choice_of_the_first(
    ranks: Ranks, bits: bool
) -> None:
    (one, first), (two, other) = ranks.run(2, on_rank_other_rounding, bits)
    assert not torch.equal(first, other), "else there is nothing to agree on"
    assert torch.equal(one, first) and torch.equal(two, first)


def test_by_hand_refuses_what_is_not_flat() -> None:
    with pytest.raises(ConfigError, match=r"update: shape \(3, 4\)"):
        select(torch.zeros(3, 4), 0.5, group=None)
    with pytest.raises(ConfigError, match="residual: 5 entries for a gradient of 6"):
        sparse_all_reduce(torch.zeros(6), None, torch.zeros(5))
