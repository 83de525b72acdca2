"""DeMo against the plain formulas: loops over chunks, a DCT by its sum, coefficients by sorting."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import GPTConfig, parse
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.norm import sum_of_squares
from megatron.data_parallel.reducer import StepContext
from megatron.errors import ConfigError
from megatron.optimizer.update_rules import SGD
from megatron.parallel.groups import Group, ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from radius.baselines import demo
from radius.baselines.demo import ChunkGrid, DeMoConfig, DeMoReducer, dct_matrix
from tests.contract.harness import PathCase, Toy, copies, gradients
from tests.planner.shapes import rank_of
from tests.radius.functional_ranks import bucket_of, equals_dense, fill, infos_of, mean_of, random
from tests.ranks import Ranks

pytestmark = pytest.mark.push

SHAPES = {"first": (13, 7), "second": (5, 40), "third": (6, 2, 4), "row": (1, 3)}
OPTIONS = DeMoConfig(demo_chunk=6, demo_k=3, demo_decay=0.9, demo_sign=False)
ALONE = Group((0,), 0)
SIGN_SGD = "--optimizer sgd --sgd-momentum 0 --clip-grad 0"


# ---- the formulas -------------------------------------------------------------------------------


def cut(side: int, chunk: int) -> list[list[int]]:
    """The positions of each chunk of a side: as few chunks as possible, and these equally long."""
    count = math.ceil(side / chunk)
    length = math.ceil(side / count)
    return [list(range(i * length, (i + 1) * length)) for i in range(count)]


def dct_of(n: int) -> torch.Tensor:
    """Return the orthonormal DCT-II, fp64, entry by entry."""
    rows = [
        [math.sqrt((2 if i else 1) / n) * math.cos(math.pi * i * (2 * j + 1) / (2 * n))]
        for i in range(n)
        for j in range(n)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(n, n)


def sent_of(
    momentum: torch.Tensor, options: DeMoConfig, dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """Return what a rank sends of its momentum, fp64 [rows, columns], as entries of the matrix."""
    found = torch.zeros_like(momentum)
    rows, columns = momentum.shape
    for down in cut(rows, options.demo_chunk):
        for across in cut(columns, options.demo_chunk):
            block = torch.zeros(len(down), len(across), dtype=torch.float64)
            inside = [(i, j) for i, r in enumerate(down) for j, c in enumerate(across)
                      if r < rows and c < columns]  # fmt: skip
            for i, j in inside:
                block[i, j] = momentum[down[i], across[j]]
            left, right = dct_of(len(down)), dct_of(len(across))
            coefficients = (left @ block @ right.T).flatten()
            largest = sorted(range(coefficients.numel()), key=lambda i: -abs(coefficients[i]))
            kept = torch.zeros_like(coefficients)
            for i in largest[: options.demo_k]:
                kept[i] = (coefficients[i] * scale).to(dtype).double() / scale
            back = left.T @ kept.view_as(block) @ right
            for i, j in inside:
                found[down[i], across[j]] = back[i, j]
    return found


def on_rank_steps(
    groups: ProcessGroups, options: DeMoConfig, dtype: torch.dtype, scale: float
) -> list[dict[str, Any]]:
    infos = infos_of(SHAPES)
    reducer = DeMoReducer(infos, Exchange(groups.dp), options)
    bucket = bucket_of(infos, dtype=dtype)
    reducer.attach([bucket])
    found = []
    for step in range(5):
        mine = random(SHAPES, step, groups.dp.rank, dtype=dtype)
        mean = mean_of(reducer, bucket, mine, t=step + 1, scale=scale)
        stats = reducer.stats(full=True)
        found.append({"mean": mean, "kept": copies(reducer.state_tensors()), "stats": stats})
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"),
    [
        (torch.float32, 1.0, 1e-5),
        (torch.float32, 1024.0, 1e-5),
        # A rounded coefficient of up to 10; the mean is rounded again.
        (torch.bfloat16, 1.0, 10 * 2**-8),
        (torch.float16, 64.0, 10 * 2**-11),
    ],
)
def test_steps_follow_the_formulas(
    ranks: Ranks, world: int, dtype: torch.dtype, scale: float, tolerance: float
) -> None:
    by_rank = ranks.run(world, on_rank_steps, OPTIONS, dtype, scale)
    flat = {name: (shape[0], math.prod(shape[1:])) for name, shape in SHAPES.items()}
    kept = {(r, n): torch.zeros(s).double() for r in range(world) for n, s in flat.items()}
    for step in range(5):
        for name, shape in flat.items():
            mean = torch.zeros(shape, dtype=torch.float64)
            for rank in range(world):
                gradient = random(SHAPES, step, rank, dtype=dtype)[name].view(shape).double()
                momentum = 0.9 * kept[rank, name] + gradient
                sent = sent_of(momentum, OPTIONS, dtype, scale)
                mean += sent / world
                kept[rank, name] = momentum - sent
                left = by_rank[rank][step]["kept"][name].view(shape).double()
                torch.testing.assert_close(left, kept[rank, name], rtol=0, atol=tolerance)
                kept[rank, name] = left
            for found in by_rank:
                got = found[step]["mean"][name].view(shape).double()
                torch.testing.assert_close(got, mean, rtol=0, atol=tolerance)
                assert torch.equal(found[step]["mean"][name], by_rank[0][step]["mean"][name])
        # 3 x 2, 1 x 7, 1 x 2 and 1 x 1 chunks, each with 3 coefficients.
        entries = 3 * (6 + 7 + 2 + 1)
        message = -(-entries * (2 + dtype.itemsize) // 4) * 4
        for found in by_rank:
            stats = found[step]["stats"]
            assert stats.bytes_sent == (world - 1) * message
            assert stats.density == entries / sum(map(math.prod, SHAPES.values()))
            squares = [k.double().square().sum() for k in found[step]["kept"].values()]
            norm = math.sqrt(sum(map(float, squares)))
            assert stats.extra == {"residual_norm": pytest.approx(norm, rel=1e-5)}


def test_bands_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = on_rank_steps(_alone(), OPTIONS, torch.float32, 1.0)
    monkeypatch.setattr(demo, "BAND", 1)  # a row of chunks at a time
    for one, other in zip(whole, on_rank_steps(_alone(), OPTIONS, torch.float32, 1.0), strict=True):
        for name in SHAPES:
            torch.testing.assert_close(other["mean"][name], one["mean"][name], rtol=0, atol=1e-6)
            torch.testing.assert_close(other["kept"][name], one["kept"][name], rtol=0, atol=1e-6)


def _alone() -> Any:
    """The groups of one rank, as far as `on_rank_steps` reads them."""
    return dataclasses.make_dataclass("Groups", ["dp"])(ALONE)


@pytest.mark.parametrize("n", [1, 2, 7, 64, 181])
def test_the_dct_is_orthonormal(n: int) -> None:
    matrix = dct_matrix(n)
    torch.testing.assert_close(matrix, dct_of(n).float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(n), rtol=0, atol=1e-5)


@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 181), st.integers(1, 5000))
def test_chunks_cover_the_matrix_with_little_to_spare(
    rows: int, columns: int, chunk: int, k: int
) -> None:
    grid = ChunkGrid.of((rows, columns), DeMoConfig(demo_chunk=chunk, demo_k=k))
    assert 0 <= grid.down * grid.height - rows < grid.down
    assert 0 <= grid.across * grid.width - columns < grid.across
    assert max(grid.height, grid.width) <= chunk and grid.height * grid.width <= 2**15
    assert grid.k == min(k, grid.height * grid.width)
    bands = list(grid.bands())
    assert [row for rows_of, _ in bands for row in range(rows)[rows_of]] == list(range(rows))
    numbers = range(grid.down * grid.across)
    assert [number for _, chunks in bands for number in numbers[chunks]] == list(numbers)


# ---- the sign -----------------------------------------------------------------------------------


def on_rank_signs(groups: ProcessGroups, scale: float) -> list[bool]:
    shapes = SHAPES | {"bias": (9,)}
    infos = infos_of(shapes)
    matrices, vectors = infos[:-1], infos[-1:]
    options = dataclasses.replace(OPTIONS, demo_start_iter=3)
    found = []
    pair = [
        DeMoReducer(infos, Exchange(groups.dp), dataclasses.replace(options, demo_sign=sign))
        for sign in (False, True)
    ]
    buckets = [[bucket_of(matrices), bucket_of(vectors, index=1)] for _ in pair]
    for reducer, mine in zip(pair, buckets, strict=True):
        reducer.attach(mine)
    for t in range(1, 6):
        for number in range(2):
            plain, signed = (
                _reduced(reducer, mine[number], random(shapes, t, groups.dp.rank), t, scale)
                for reducer, mine in zip(pair, buckets, strict=True)
            )
            found += [
                torch.equal(signed.values, plain.values.sign() * scale),
                torch.equal(signed.squared_norm, sum_of_squares(plain.values)),
                plain.squared_norm is None,
            ]
        kept = [copies(reducer.state_tensors()) for reducer in pair]
        found += [torch.equal(kept[0][name], kept[1][name]) for name in kept[0]]
        found.append(len(kept[0]) == len(kept[1]) == (len(SHAPES) if t >= 3 else 0))
    return found


def _reduced(reducer: DeMoReducer, bucket: Any, mine: dict, t: int, scale: float) -> Any:
    fill(bucket, {name: mine[name] * scale for name in bucket.slices})
    reduced = reducer.reduce(bucket, StepContext(t=t, loss_scale=scale)).wait()
    reduced = dataclasses.replace(reduced, values=reduced.values.clone())
    reducer.commit(bucket, None)
    return reduced


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_sign_is_that_of_the_mean_and_the_norm_too(
    ranks: Ranks, world: int, scale: float
) -> None:
    """The sign is of compressed matrices, of vectors and of dense steps; no momentum changes."""
    for found in ranks.run(world, on_rank_signs, scale):
        assert found == [True] * len(found) and len(found) == 5 * 7 + 3 * len(SHAPES)


def on_rank_weights(groups: ProcessGroups, steps: int) -> list[dict[str, torch.Tensor]]:
    toy = Toy(groups, PathCase("demo"), lr=1e-3, weight_decay=0.0, rule=SGD(momentum=0.0))
    found = []
    for number in range(steps):
        toy.step([gradients(number, groups.dp.rank)])
        if number in (0, steps - 1):
            found.append({info.name: info.param.detach().clone() for info in toy.infos})
    return found


@pytest.mark.parametrize(
    ("world", "steps"),
    [
        (2, 300),
        pytest.param(2, 1000, marks=pytest.mark.full),
        pytest.param(4, 1000, marks=pytest.mark.full),
    ],
)
def test_weights_are_bit_equal_on_all_ranks_after_many_steps(
    ranks: Ranks, world: int, steps: int
) -> None:
    first, *others = ranks.run(world, on_rank_weights, steps)
    assert len(others) == world - 1
    for name, last in first[-1].items():
        for other in others:
            assert torch.equal(other[-1][name], last), name
        # Each step moves a weight by 1e-3 up or down.
        far = (last - first[0][name]).abs().max()
        assert 5e-3 < far < 1.0, name


# ---- steps that are dropped, limits, padding ----------------------------------------------------


def test_a_dropped_step_is_forgotten() -> None:
    infos, found = infos_of(SHAPES), []
    for drops in (False, True):
        reducer = DeMoReducer(infos, Exchange(ALONE), OPTIONS)
        reducer.attach([bucket := bucket_of(infos)])
        for t in range(1, 5):
            if drops:
                fill(bucket, random(SHAPES, t, 100))
                reducer.reduce(bucket, StepContext(t=t)).drop()
                reducer.abort(bucket)
            mean = mean_of(reducer, bucket, random(SHAPES, t), t=t)
        found.append((mean, copies(reducer.state_tensors())))
    for name in SHAPES:
        assert all(torch.equal(one[name], other[name]) for one, other in zip(*found, strict=True))


def on_rank_limit(groups: ProcessGroups, k: int, start_iter: int) -> list[bool]:
    infos = infos_of(SHAPES)
    options = dataclasses.replace(OPTIONS, demo_k=k, demo_start_iter=start_iter)
    reducer = DeMoReducer(infos, Exchange(groups.dp), options)
    return equals_dense(groups.dp, reducer, infos, SHAPES)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("k", "start_iter", "same"), [(36, 0, [True] * 4), (3, 3, [True, True, False, False])]
)
def test_all_coefficients_and_steps_before_the_first_are_the_dense_path(
    ranks: Ranks, world: int, k: int, start_iter: int, same: list[bool]
) -> None:
    assert ranks.run(world, on_rank_limit, k, start_iter) == [same] * world


def test_vocabulary_padding_is_neither_sent_nor_saved() -> None:
    shapes = {"embedding": (5, 4), "none of it": (0, 4)}
    infos = infos_of(shapes, padded={"embedding": (8, 4), "none of it": (8, 4)})
    reducer = DeMoReducer(infos, Exchange(ALONE), OPTIONS)
    reducer.attach([bucket := bucket_of(infos)])
    ones = {"embedding": torch.ones(5, 4), "none of it": torch.zeros(8, 4)}
    mean = mean_of(reducer, bucket, ones, t=1)
    # All is in one coefficient.
    torch.testing.assert_close(mean["embedding"][:20], torch.ones(20))
    assert not mean["embedding"][20:].any() and not mean["none of it"].any()
    assert reducer.stats().density == 3 / 64
    kept = {name: tensor.numel() for name, tensor in copies(reducer.state_tensors()).items()}
    assert kept == {"embedding": 20, "none of it": 0}


# ---- the command line and the planner -----------------------------------------------------------


def read(flags: str) -> GPTConfig:
    small = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --grad-path demo"
    )
    return parse(f"{small} {flags}".split(), paths=GRADIENT_PATHS)


def test_options_and_their_defaults() -> None:
    assert read(SIGN_SGD).extensions == {
        "demo": DeMoConfig(
            demo_chunk=64, demo_k=32, demo_decay=0.999, demo_sign=True, demo_start_iter=0
        )
    }
    mean = read("--demo-sign false --demo-decay 1").extensions["demo"]
    assert mean == DeMoConfig(demo_sign=False, demo_decay=1.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--sgd-momentum 0 --clip-grad 0", ["optimizer is 'adam'", "--optimizer sgd"]),
        ("--optimizer sgd --clip-grad 0", ["sgd_momentum is 0.9", "--sgd-momentum 0"]),
        ("--optimizer sgd --sgd-momentum 0", ["clip_grad is 1", "--clip-grad 0", "--demo-sign"]),
        (f"{SIGN_SGD} --fp16", ["fp16", "--accumulate-allreduce-grads-in-fp32"]),
        (f"{SIGN_SGD} --grad-wire bf16", ["grad_wire", "in their own way"]),
        (f"{SIGN_SGD} --use-distributed-optimizer", ["use_distributed_optimizer", "drop"]),
        (f"{SIGN_SGD} --predivide-loss", ["predivide_loss", "drop it"]),
        (f"{SIGN_SGD} --demo-chunk 182", ["--demo-chunk: 182", "181"]),
        (f"{SIGN_SGD} --demo-k 0", ["--demo-k: 0", "at least 1"]),
        (f"{SIGN_SGD} --demo-decay 1.5", ["--demo-decay: 1.5", "1"]),
        (f"{SIGN_SGD} --demo-start-iter 11", ["demo_start_iter: 11", "last step, 10"]),
        (f"{SIGN_SGD} --topk-density 0.1", ["--topk-density", "--grad-path topk"]),
    ],
)
def test_refusals_name_option_value_and_way_out(flags: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("precision", ["", "--bf16 --grad-reduce-in-bf16"])
@pytest.mark.parametrize("world", [2, 4])
def test_planned_messages_are_those_counted(ranks: Ranks, world: int, precision: str) -> None:
    config = read(f"{SIGN_SGD} --demo-chunk 6 --demo-k 3 --demo-start-iter 2 {precision}")
    dtype = getattr(torch, config.precision.grad_dtype)
    path = GRADIENT_PATHS["demo"]
    early, late = path.plan_traffic(config, rank_of(SHAPES, ranks=world))
    assert (early.steps, late.steps) == (1, 9)
    (message,) = late.sent
    assert message.kind == "all-gather"
    found = ranks.run(world, on_rank_steps, OPTIONS, dtype, 1.0)
    for steps in found:
        assert [step["stats"].bytes_sent for step in steps] == [late.bytes_sent(world)] * 5
    planned = path.plan_bytes(config, rank_of(SHAPES, ranks=world))
    assert planned.passing == {"messages": message.nbytes * (world + 1)}
    assert planned.kept == {"residual": 8 * sum(map(math.prod, SHAPES.values()))}
    assert path.plan_bytes(read(f"{SIGN_SGD} --demo-k 4096"), rank_of(SHAPES)).kept == {
        "residual": 0
    }
