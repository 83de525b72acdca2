"""A wire may encode the values of a mean; the reducer and the engine do not notice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.encoded_wire import EncodedWire
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.wire import Wire
from megatron.data_parallel.wire_format import part_bytes
from megatron.parallel.groups import Group, ProcessGroups
from megatron.parallel.traffic import Waitable
from tests.contract.harness import PathCase, Toy, gradients, same
from tests.ranks import Ranks

DENSE = PathCase("dense")


class CoarseWire(Wire):
    """Rounds values to multiples of 1/8, and counts two bytes for each."""

    def mean(
        self,
        group: Group,
        values: torch.Tensor,
        *,
        matrix: bool = True,
        lost: torch.Tensor | None = None,
    ) -> tuple[Sequence[Waitable | None], int]:
        codes = (values * 8).round().to(torch.int32)
        group.all_reduce(codes, dist.ReduceOp.SUM)
        values.copy_(codes.float() / (8 * group.size))
        return [], 2 * (group.size - 1) * 2 * values.numel() // group.size


def on_rank(groups: ProcessGroups) -> dict[str, Any]:
    """Reduce one step over the plain wire and over the coarse one."""
    found: dict[str, Any] = {}
    means: dict[str, torch.Tensor] = {}
    for name, wire in (("plain", None), ("coarse", CoarseWire())):
        toy = Toy(groups, DENSE)
        toy.engine.reducer = AllReduceReducer(Exchange(groups.dp, wire))
        toy.backward([gradients(0, groups.dp.rank)])
        step = toy.finish()
        means[name] = torch.cat([bucket.values for bucket in step.reduced])
        found[f"{name} sent"] = toy.engine.stats().bytes_sent
    on_all = groups.dp.all_gather_str(str(means["coarse"].tolist()))
    return found | {
        "equal": len(set(on_all)) == 1,
        "error": float((means["plain"] - means["coarse"]).abs().max()),
        "changed": bool(same({"mean": means["plain"]}, {"mean": means["coarse"]})),
    }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_means_go_through_the_wire(ranks: Ranks, world: int) -> None:
    for found in ranks.run(world, on_rank):
        assert found["equal"] and found["error"] <= 1 / 16 + 1e-6
        assert found["changed"] == (world > 1), "alone, nothing is encoded"
        assert found["coarse sent"] * 2 == found["plain sent"]
        assert (found["plain sent"] > 0) == (world > 1)


LENGTH = 192
"""Entries of a shard: no multiple of a block of 128."""


def on_rank_part(groups: ProcessGroups, name: str) -> dict[str, Any]:
    """Average to shards over an encoded wire, the last of which has padding."""
    ranks, rank = groups.dp.size, groups.dp.rank
    exchange = Exchange(groups.dp, EncodedWire(name, groups.second_dp))
    storage = torch.zeros(ranks * LENGTH)
    used = storage[: storage.numel() - 70]
    used.copy_(torch.randn(used.numel(), generator=torch.Generator().manual_seed(rank)))
    own = storage[rank * LENGTH : (rank + 1) * LENGTH]
    found = {"values": used.clone(), "lost": torch.full_like(used, math.nan)}
    exchange.mean_of_part(own, storage, used=used, lost=found["lost"]).wait()
    return found | {"own": own.clone(), "sent": exchange.take_counters()[0]}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_an_owner_of_a_shard_keeps_its_mean_unrounded(ranks: Ranks, name: str, world: int) -> None:
    found = ranks.run(world, on_rank_part, name)
    means = torch.cat([each["own"] for each in found])
    total, lost = (
        torch.stack([each[name] for each in found]).sum(0) for name in ("values", "lost")
    )
    used = total.numel()
    torch.testing.assert_close(world * means[:used] + lost, total, rtol=0, atol=1e-5)
    assert not means[used:].any(), "padding"
    assert bool(lost.any()) == (name != "fp32")
    for rank, each in enumerate(found):
        assert not each["lost"][rank * LENGTH : (rank + 1) * LENGTH].any()
        assert each["sent"] == (world - 1) * part_bytes(name, LENGTH)
