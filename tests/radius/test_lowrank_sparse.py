"""Low-rank plus sparse gradients against the plain formulas in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.reducer import StepContext
from megatron.parallel.groups import Group, ProcessGroups
from megatron.sparse.selection import largest
from radius.baselines.lowrank_sparse import LowRankSparseReducer
from radius.baselines.powersgd import WARM_START, first_q
from tests.contract.harness import copies
from tests.radius.functional_ranks import bucket_of, equals_dense, fill, infos_of, mean_of, random
from tests.ranks import Ranks

SHAPES = {"wide": (6, 50), "small": (3, 4), "tall": (40, 9)}
COMPRESSED = ("wide", "tall")
RANK, DENSITY, SEED = 2, 0.05, 5
COUNTS = {name: math.ceil(DENSITY * math.prod(SHAPES[name])) for name in COMPRESSED}
ALONE = Group((0,), 0)


def reducer_of(infos: list, group: Group, **options: Any) -> LowRankSparseReducer:
    settings: dict[str, Any] = {"rank": RANK, "density": DENSITY, "seed": SEED}
    return LowRankSparseReducer(infos, Exchange(group), **(settings | options))


def on_rank_steps(groups: ProcessGroups, dtype: torch.dtype, scale: float) -> list[dict]:
    infos = infos_of(SHAPES)
    reducer, bucket = reducer_of(infos, groups.dp), bucket_of(infos, dtype=dtype)
    reducer.attach([bucket])
    found = []
    for step in range(4):
        mine = random(SHAPES, step, groups.dp.rank, dtype=dtype)
        mean = mean_of(reducer, bucket, mine, t=step + 1, scale=scale)
        kept, shared = copies(reducer.state_tensors()), copies(reducer.shared_tensors())
        found.append({"mean": mean, "kept": kept, "shared": shared, "stats": reducer.stats()})
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.float32, 512.0), (torch.bfloat16, 1.0)]
)
def test_steps_follow_the_formulas(
    ranks: Ranks, world: int, dtype: torch.dtype, scale: float
) -> None:
    by_rank = ranks.run(world, on_rank_steps, dtype, scale)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2  # two units of bf16 at size 4
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    q = {n: first_q(SEED, n, SHAPES[n][1], RANK).double() for n in COMPRESSED}
    kept = {(r, n): torch.zeros(SHAPES[n]).double() for r in range(world) for n in COMPRESSED}
    for step in range(4):
        mine = [random(SHAPES, step, rank, dtype=dtype) for rank in range(world)]
        for name in COMPRESSED:
            offered = [kept[rank, name] + mine[rank][name].double() for rank in range(world)]
            total = torch.stack(offered).mean(0)
            basis = torch.linalg.qr(total @ torch.linalg.qr(q[name]).Q).Q
            q[name] = total.T @ basis
            low_rank = basis @ q[name].T
            sent = [torch.zeros_like(low_rank) for _ in range(world)]
            for rank, found in enumerate(by_rank):
                rest = offered[rank] - low_rank
                # Entries of nearly equal size may be chosen otherwise after other roundings, so the
                # choice is the reducer's own, and is as good as the best one up to rounding.
                residual = found[step]["kept"][name].view(SHAPES[name]).double()
                chosen = (rest - residual).abs() > 2 * tolerance * (1 + rest.abs())
                assert chosen.sum() <= COUNTS[name]
                best = rest.abs().view(-1)[largest(rest.float().view(-1), COUNTS[name])]
                assert rest[~chosen].abs().max() <= best.min() + 4 * tolerance
                sent[rank][chosen] = rest[chosen]
                kept[rank, name] = residual
            mean = low_rank + torch.stack(sent).mean(0)
            for found in by_rank:
                got = found[step]["mean"][name].double()
                torch.testing.assert_close(got, mean.view(-1), **close)
                assert torch.equal(got, by_rank[0][step]["mean"][name].double())
                assert WARM_START + name in found[step]["shared"]
        whole = torch.stack([gradients["small"] for gradients in mine]).mean(0).view(-1)
        factors, entries = RANK * (6 + 50 + 40 + 9) + 3 * 4, sum(COUNTS.values())
        message = -(-entries * (4 + dtype.itemsize) // 4) * 4
        for found in by_rank:
            torch.testing.assert_close(found[step]["mean"]["small"], whole, **close)
            assert found[step]["kept"].keys() == set(COMPRESSED)
            stats, ring = found[step]["stats"], 2 * (world - 1) / world
            assert stats.bytes_sent == pytest.approx(
                ring * 4 * factors + (world - 1) * message, abs=1
            )
            assert stats.density == (factors + entries) / sum(map(math.prod, SHAPES.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_sent_is_kept(dtype: torch.dtype) -> None:
    infos = infos_of(SHAPES)
    reducer, bucket = reducer_of(infos, ALONE), bucket_of(infos, dtype=dtype)
    reducer.attach([bucket])
    before = {name: torch.zeros(()) for name in SHAPES}
    for step in range(4):
        mine = random(SHAPES, step, dtype=dtype)
        mean = mean_of(reducer, bucket, mine, t=step + 1)
        for name, after in copies(reducer.state_tensors()).items():
            offered = mine[name].view(-1) + before[name]
            # What a 16-bit gradient rounds off is kept, too.
            whole = mean[name].float() + after
            torch.testing.assert_close(whole, offered.float(), rtol=0, atol=2e-6)
            before[name] = after.clone()


def test_a_gradient_of_low_rank_with_outliers_goes_through_whole() -> None:
    infos = infos_of(SHAPES)
    reducer, bucket = reducer_of(infos, ALONE), bucket_of(infos)
    reducer.attach([bucket])
    for t in range(1, 6):
        thin = random({n: (s[0], RANK) for n, s in SHAPES.items()}, 0)
        wide = random({n: (RANK, s[1]) for n, s in SHAPES.items()}, 1)
        mine = {name: thin[name] @ wide[name] for name in SHAPES}
        for name in COMPRESSED:
            mine[name].view(-1)[:: math.prod(SHAPES[name]) // COUNTS[name] + 1] += 1.0
        mean_of(reducer, bucket, mine, t=t)
    # What PowerSGD of this rank keeps of the outliers, the entries send.
    for name, kept in copies(reducer.state_tensors()).items():
        assert kept.abs().max() < 1.0 < mine[name].abs().max(), name


# ---- what goes when -----------------------------------------------------------------------------


class LoggedGroup(Group):
    """Two ranks of which the other always sends the same, noting what is sent and waited for."""

    events: list[str]

    def all_reduce(
        self, tensor: torch.Tensor, op: Any, *, async_op: bool = False, about: str = ""
    ) -> Any:
        self.events.append(f"sum {tensor.numel()}")
        return LoggedWork(self.events, f"sum {tensor.numel()}")

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor, *, async_op: bool = False) -> Any:
        self.events.append(f"gather {mine.numel()}")
        out.view(2, -1).copy_(mine)
        return LoggedWork(self.events, f"gather {mine.numel()}")


class LoggedWork:
    def __init__(self, events: list[str], what: str) -> None:
        self.events, self.what = events, what

    def wait(self) -> None:
        self.events.append(f"wait {self.what}")


def start_two_buckets() -> tuple[LowRankSparseReducer, list[str], list[Any]]:
    """`sum` with the number of entries: P of 8 and 16, Q of 20 and 24; `gather` with bytes."""
    group = LoggedGroup((0, 1), 0)
    object.__setattr__(group, "events", [])
    infos = infos_of({"a": (8, 20), "b": (16, 24)})
    buckets = [bucket_of([info], index=index) for index, info in enumerate(infos)]
    reducer = reducer_of(infos, group, rank=1)
    reducer.attach(buckets)
    for bucket, info in zip(buckets, infos, strict=True):
        fill(bucket, random({info.name: info.logical_shape}, 1))
    work = [reducer.reduce(bucket, StepContext(t=1)) for bucket in buckets]
    return reducer, group.events, work


def test_every_round_is_sent_for_all_buckets_in_their_order() -> None:
    _, events, work = start_two_buckets()
    assert events == ["sum 8", "sum 16"], "reduce waits for nothing"
    work[0].wait()
    second = ["wait sum 8", "sum 20", "wait sum 16", "sum 24"]
    # 8 of 160 and 20 of 384 entries, of 8 bytes each.
    third = ["wait sum 20", "gather 64", "wait sum 24", "gather 160"]
    assert events[2:] == [*second, *third, "wait gather 64"]
    work[1].wait()
    assert events[11:] == ["wait gather 160"]


def test_a_dropped_step_sends_no_second_round_and_changes_nothing() -> None:
    reducer, events, work = start_two_buckets()
    for one in work:
        one.drop()
    for index, info in enumerate(reducer.infos.values()):
        reducer.abort(bucket_of([info], index=index))
    assert events[2:] == ["wait sum 8", "wait sum 16"]
    assert not list(reducer.state_tensors()) and not list(reducer.shared_tensors())


# ---- limits -------------------------------------------------------------------------------------


def on_rank_limit(groups: ProcessGroups, options: dict[str, Any]) -> list[bool]:
    infos = infos_of(SHAPES)
    return equals_dense(groups.dp, reducer_of(infos, groups.dp, **options), infos, SHAPES)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"density": 1.0}, [True] * 4),
        ({"rank": 9}, [True] * 4),
        ({"start_iter": 3}, [True, True, False, False]),
    ],
)
def test_what_saves_nothing_and_steps_before_the_first_are_the_dense_path(
    ranks: Ranks, world: int, options: dict[str, Any], same: list[bool]
) -> None:
    assert ranks.run(world, on_rank_limit, options) == [same] * world
