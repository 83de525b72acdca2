"""A wire may encode the values of a mean; the reducer and the engine do not notice."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket_plan import PathBytes, plan_wire
from megatron.data_parallel.codecs import PIECE
from megatron.data_parallel.encoded_wire import EncodedWire, _EncodedMean
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.wire import Wire
from megatron.data_parallel.wire_format import part_bytes
from megatron.parallel.groups import Group, ProcessGroups
from megatron.parallel.traffic import Waitable
from tests.contract.harness import PathCase, Toy, config_of, gradients, same
from tests.planner.shapes import rank_of
from tests.radius.test_memory import most_at_once
from tests.ranks import Ranks
from tools.bench.common.tensors import storages

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


# ---- memory -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Arrival:
    """The end of an exchange, once `event` is set."""

    event: threading.Event

    def wait(self) -> None:
        self.event.wait()


class Loopback(Group):
    """A group of two whose other rank sends what this rank sends, once `arrives` is set."""

    def __init__(self) -> None:
        super().__init__((0, 1), 0)
        self.arrives = threading.Event()

    def all_to_all(
        self, out: torch.Tensor, mine: torch.Tensor, *, async_op: bool = False, about: str = ""
    ) -> Waitable:
        for number, row in enumerate(mine):
            out[1 - number].copy_(row)
        return Arrival(self.arrives)

    def all_gather(
        self, out: torch.Tensor, mine: torch.Tensor, *, async_op: bool = False, about: str = ""
    ) -> None:
        out[1 - self.rank].copy_(mine)


def planned_wire(name: str, entries: int, buckets: int, device: str = "cpu") -> PathBytes:
    """Return the planned bytes of a wire between two ranks for equal buckets of matrices."""
    rank = rank_of({"w": (entries, 1)}, ranks=2, device=device, alignment=128)
    (bucket,) = rank.buckets
    config = config_of(PathCase("dense", wire=name))
    return plan_wire(config, dataclasses.replace(rank, buckets=[bucket] * buckets))


@pytest.mark.push
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_means_in_progress_hold_encoded_values_and_few_chunks(name: str, feedback: bool) -> None:
    entries, buckets = 100_096, 8
    group = Loopback()
    wire, values = EncodedWire(name, group), torch.randn(buckets, entries)
    lost = torch.zeros_like(values)
    before = storages()
    work = [
        wire.mean(group, each, lost=kept if feedback else None)[0][0]
        for each, kept in zip(values, lost, strict=True)
    ]
    held = sum(size for at, size in storages().items() if at not in before)
    group.arrives.set()
    for each in work:
        assert each is not None
        each.wait()
    planned = planned_wire(name, entries, buckets).passing
    assert 0 <= held - planned["encoded values"] <= planned["decoded values"]


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_few_chunks_at_a_time_are_decoded(name: str) -> None:
    entries, group = 1 << 22, Loopback()
    group.arrives.set()
    # The codecs take a few pieces, of a few bytes a value.
    slack = 24 * PIECE
    values, chunk = torch.randn(entries), 4 * entries // 2
    encoded = planned_wire(name, entries, 1).passing["encoded values"]
    mean = _EncodedMean(name, group, values, torch.zeros(entries), entries // 2)
    taken = most_at_once(lambda: mean.scatter())
    assert chunk <= taken - encoded // 2 <= chunk + slack
    taken = most_at_once(lambda: mean.gather(None, group))
    assert 2 * chunk <= taken <= 2 * chunk + slack
    planned = [planned_wire(name, entries, 3, d).passing["decoded values"] for d in ("cuda", "cpu")]
    assert planned == [2 * chunk, 3 * chunk], "a hook of a CPU encodes while another mean is taken"


# ---- shards -------------------------------------------------------------------------------------

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
