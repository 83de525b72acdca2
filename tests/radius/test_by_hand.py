"""The functions for loops written by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from radius.by_hand import select, sparse_all_reduce
from tests.radius.toys import index_of
from tests.ranks import Ranks

ZERO = 74
"""Where the update is 0, which is never chosen."""


def on_rank_by_hand(groups: ProcessGroups, bad: float, bits: bool) -> dict[str, torch.Tensor]:
    with index_of(bits):
        return by_hand(groups, bad)


def by_hand(groups: ProcessGroups, bad: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(groups.dp.rank)
    local, residual = (torch.randn(300, generator=generator) for _ in range(2))
    if groups.dp.rank == 1 and not math.isfinite(bad):
        local[ZERO] = bad
    update = torch.arange(300.0) % 150 - ZERO
    index = select(update, 0.41)
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
    # Of equal magnitudes the first: there are four entries of each.
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


def test_by_hand_refuses_what_is_not_flat() -> None:
    with pytest.raises(ConfigError, match=r"update: shape \(3, 4\)"):
        select(torch.zeros(3, 4), 0.5)
    with pytest.raises(ConfigError, match="residual: 5 entries for a gradient of 6"):
        sparse_all_reduce(torch.zeros(6), None, torch.zeros(5))
