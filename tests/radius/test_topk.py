"""Naive top-k against the plain formulas: select, add up, keep the rest."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data_parallel.bucket import GradBucket, Slice
from megatron.data_parallel.exchange import Exchange
from megatron.errors import ConfigError
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import Group, ProcessGroups
from megatron.sparse.selection import SAMPLED, largest
from radius.baselines.message_bytes import count
from radius.baselines.powersgd import PowerSGDReducer
from radius.baselines.topk import TopKReducer
from tests.contract.harness import PathCase, Toy, copies
from tests.radius.functional_ranks import bucket_of, equals_dense, infos_of, mean_of, random
from tests.ranks import Ranks

SHAPES = {"first": (13, 7), "second": (5, 40), "third": (3, 1)}
ALONE = Group((0,), 0)


def by_sorting(values: torch.Tensor, k: int) -> list[int]:
    """Positions of the k largest magnitudes, the lower one first among equals."""
    ordered = sorted(range(len(values)), key=lambda i: (-abs(float(values[i])), i))
    return sorted(ordered[:k])


def test_a_density_is_a_decimal_fraction() -> None:
    assert (count(0.07, 100), count(0.07, 101), count(1e-9, 5)) == (7, 8, 1)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.data())
def test_the_lower_of_equal_magnitudes_goes_first(numbers: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(numbers)))
    values = torch.tensor(numbers, dtype=torch.float32)
    assert largest(values, k).tolist() == by_sorting(values, k)


@pytest.mark.parametrize("n", [1, 63, 1000, 100_003])
@pytest.mark.parametrize("density", [1e-9, 0.01, 0.5, 0.999])
def test_largest_at_length(n: int, density: float) -> None:
    values = torch.randn(n).mul_(8).round_().div_(8)  # with many equal ones
    k = math.ceil(density * n)
    assert largest(values, k).tolist() == by_sorting(values, k)


@pytest.mark.parametrize("k", [1, 300, 2000, 9999])
def test_a_sample_that_misleads_costs_time_alone(k: int) -> None:
    values = torch.randn(10_000)
    values[::SAMPLED] = 50.0
    assert largest(values, k).tolist() == by_sorting(values, k)
    values[::SAMPLED] = 0.0
    assert largest(values, k).tolist() == by_sorting(values, k)


def on_rank_steps(
    groups: ProcessGroups, density: float, dtype: torch.dtype, scale: float
) -> list[dict]:
    infos = infos_of(SHAPES)
    reducer, bucket = (
        TopKReducer(infos, Exchange(groups.dp), density=density),
        bucket_of(infos, dtype=dtype),
    )
    reducer.attach([bucket])
    found = []
    for step in range(5):
        mine = random(SHAPES, step, groups.dp.rank, dtype=dtype)
        mean = mean_of(reducer, bucket, mine, t=step + 1, scale=scale)
        stats = reducer.stats(full=True)
        kept = copies(reducer.state_tensors())
        found.append({"mean": mean, "kept": kept, "stats": stats})
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("density", "dtype", "scale"),
    [
        (0.01, torch.float32, 1.0),
        (0.3, torch.float32, 1024.0),
        (0.3, torch.bfloat16, 1.0),
        (0.3, torch.float16, 64.0),
    ],
)
def test_steps_follow_the_formulas(
    ranks: Ranks, world: int, density: float, dtype: torch.dtype, scale: float
) -> None:
    by_rank = ranks.run(world, on_rank_steps, density, dtype, scale)
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    counts = {name: math.ceil(density * size) for name, size in sizes.items()}
    kept = {(r, n): torch.zeros(size) for r in range(world) for n, size in sizes.items()}
    for step in range(5):
        for name, k in counts.items():
            mean = torch.zeros(sizes[name], dtype=torch.float64)
            for rank in range(world):
                offered = kept[rank, name] + random(SHAPES, step, rank, dtype=dtype)[name].view(-1)
                chosen = by_sorting(offered, k)
                sent = torch.zeros_like(offered)
                sent[chosen] = (offered[chosen] * scale).to(dtype).float() / scale
                kept[rank, name] = offered - sent
                mean += sent.double() / world
                assert torch.equal(by_rank[rank][step]["kept"][name], kept[rank, name])
            tolerance = 1e-6 if dtype == torch.float32 else 1e-2
            for found in by_rank:
                got = found[step]["mean"][name].double()
                torch.testing.assert_close(got, mean, rtol=tolerance, atol=tolerance)
        entries = sum(counts.values())
        message = -(-entries * (4 + dtype.itemsize) // 4) * 4
        for rank, found in enumerate(by_rank):
            stats = found[step]["stats"]
            assert stats.bytes_sent == (world - 1) * message
            assert stats.density == pytest.approx(entries / sum(sizes.values()))
            norm = math.sqrt(sum(float(kept[rank, n].double().square().sum()) for n in sizes))
            assert stats.extra == {"residual_norm": pytest.approx(norm, rel=1e-5)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_lost_not_a_bit(dtype: torch.dtype) -> None:
    infos = infos_of(SHAPES)
    reducer, bucket = (
        TopKReducer(infos, Exchange(ALONE), density=0.2),
        bucket_of(infos, dtype=dtype),
    )
    reducer.attach([bucket])
    before = {name: torch.zeros(math.prod(shape)) for name, shape in SHAPES.items()}
    for step in range(4):
        mine = random(SHAPES, step, dtype=dtype)
        mean = mean_of(reducer, bucket, mine, t=step + 1)
        for name, after in copies(reducer.state_tensors()).items():
            # Both sides exactly: a float is a fraction, and fractions do not round.
            offered = before[name] + mine[name].view(-1)
            for sent, left, total in zip(
                mean[name].tolist(), after.tolist(), offered.tolist(), strict=True
            ):
                assert Fraction(sent) + Fraction(left) == Fraction(total)
            before[name] = after.clone()


def test_vocabulary_padding_is_neither_selected_nor_saved() -> None:
    infos = infos_of({"embedding": (5, 4)}, padded={"embedding": (8, 4)})
    reducer = TopKReducer(infos, Exchange(ALONE), density=0.5)
    bucket = bucket_of(infos)
    reducer.attach([bucket])
    mean = mean_of(reducer, bucket, {"embedding": torch.zeros(8, 4)}, t=1)
    assert reducer.stats().density == 10 / 32
    assert not mean["embedding"].any()
    assert {n: kept.numel() for n, kept in copies(reducer.state_tensors()).items()} == {
        "embedding": 20
    }


def on_rank_limit(groups: ProcessGroups, density: float, start_iter: int) -> list[bool]:
    infos = infos_of(SHAPES)
    reducer = TopKReducer(infos, Exchange(groups.dp), density=density, start_iter=start_iter)
    return equals_dense(groups.dp, reducer, infos, SHAPES)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("density", "start_iter", "same"), [(1.0, 0, [True] * 4), (0.2, 3, [True, True, False, False])]
)
def test_density_one_and_steps_before_the_first_are_the_dense_path(
    ranks: Ranks, world: int, density: float, start_iter: int, same: list[bool]
) -> None:
    assert ranks.run(world, on_rank_limit, density, start_iter) == [same] * world


def test_the_log_tells_once_when_compression_begins() -> None:
    infos = infos_of(SHAPES)
    reducer, bucket = (
        TopKReducer(infos, Exchange(ALONE), density=0.2, start_iter=2),
        bucket_of(infos),
    )
    reducer.attach([bucket])
    told = []
    for t in range(1, 5):
        mean_of(reducer, bucket, random(SHAPES, t), t=t)
        told.append(len(reducer.stats().notes))
    assert told == [0, 1, 0, 0]


@pytest.mark.parametrize(("rank", "count"), [(2, 0), (4096, 1)])
def test_a_rank_that_compresses_no_matrix_is_told_once(rank: int, count: int) -> None:
    infos = infos_of(SHAPES)
    reducer = PowerSGDReducer(infos, Exchange(ALONE), rank=rank, seed=0)
    reducer.attach([bucket_of(infos)])
    told = [note for _ in range(2) for note in reducer.stats().notes]
    assert len(told) == count and all("none would become smaller" in note for note in told)


@pytest.mark.parametrize(
    ("path", "options", "flags"),
    [
        ("topk", {"topk_density": 1.0}, "--topk-density 1"),
        ("lowrank+sparse", {"lowrank_density": 1.0}, "--lowrank-density 1"),
        ("roundrobin", {"roundrobin_interval": 1}, "--roundrobin-interval 1"),
        ("demo", {"demo_chunk": 8, "demo_k": 64}, "--demo-k 64 with --demo-chunk 8"),
    ],
)
def test_settings_that_send_everything_are_told_as_the_reason(
    path: str, options: dict[str, Any], flags: str
) -> None:
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    toy = Toy(groups, PathCase(path, options))
    (note,) = toy.engine.stats().notes
    assert note.startswith(f"{path}: compresses no matrix of this model, as {flags} sends ")


def test_a_bucket_that_positions_cannot_reach_is_refused() -> None:
    (info,) = infos_of({"big": (1, 1)})
    grad = torch.empty(2**31, dtype=torch.bfloat16, device="meta")
    bucket = GradBucket(
        index=0,
        slices={"big": Slice(0, grad.numel())},
        grad=grad,
        weight_decay=True,
        tied=False,
        tp_sharded=False,
    )
    with pytest.raises(ConfigError, match="--ddp-bucket-size"):
        TopKReducer([info], Exchange(ALONE), density=0.01).attach([bucket])
