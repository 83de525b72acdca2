"""Exchanges over inner and outer groups together find the mean over all data-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch

from megatron.data_parallel.exchange import Exchange
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks

ENTRIES = 10
"""Not a multiple of the inner ranks, so that the last shard is padded."""


def on_rank(groups: ProcessGroups) -> dict[str, Any]:
    """Shard over pairs of neighbours, average the shards over the pairs, gather the means."""
    pairs = ProcessGroups.build(ParallelDims(tp=2, dp=2, pp=1), rank=groups.world.rank)
    inner, outer = Exchange(pairs.tp), Exchange(pairs.dp)
    length = -(-ENTRIES // inner.ranks)
    whole = torch.zeros(length * inner.ranks)
    used = whole[:ENTRIES]
    used.copy_(torch.arange(ENTRIES) + 100.0 * groups.world.rank)
    own = whole.chunk(inner.ranks)[inner.rank]
    inner.mean_of_part(own, whole, used=used, divides=True).wait()
    outer.mean(own).wait()
    inner.gather_in_place(whole).wait()
    sent = [exchange.take_counters()[0] for exchange in (inner, outer)]
    return {"mean": used.tolist(), "sent": sent, "ranks": (inner.ranks, outer.ranks)}


def test_shards_are_averaged_over_outer_groups(ranks: Ranks) -> None:
    expected = [entry + 150.0 for entry in range(ENTRIES)]
    shard = 4 * ENTRIES // 2
    for found in ranks.run(4, on_rank):
        assert found["mean"] == expected and found["ranks"] == (2, 2)
        # A reduce-scatter and an all-gather within the pair; an all-reduce of the shard outside.
        assert found["sent"] == [2 * shard, shard]
