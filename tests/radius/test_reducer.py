"""Tests of `RadiusReducer` against the paper's algorithms, and at its limits.

`tests/contract` tests what every gradient path promises; this module tests what Radius promises.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.data_parallel.bucket import GradBucket
from megatron.data_parallel.reducer import StepContext
from megatron.errors import PeerError
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import SHAPES, PathCase, Toy, gradients, same
from tests.radius.algorithm import Algorithm
from tests.radius.toys import (
    DENSE,
    MATRICES,
    STEPS,
    alone,
    densities,
    every_case,
    index_of,
    masks_of,
    params_of,
    radius,
    reducer_of,
    settled,
)
from tests.ranks import Ranks

# ---- the algorithms -----------------------------------------------------------------------------


def on_rank_algorithm(groups: ProcessGroups, case: PathCase, steps: int) -> list[dict]:
    toy = Toy(groups, case)
    found = []
    for t in range(1, steps + 1):
        step = toy.step([gradients(t, groups.dp.rank)], clip_norm=1.0)
        found.append({"norm": step.norm, "masks": masks_of(toy), "params": params_of(toy)})
        found[-1]["residual"] = toy.residual()
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("density", [0.4, 0.1])
@pytest.mark.parametrize("schedule", ["paper", "rolling"])
@pytest.mark.parametrize("clip", ["all", "per-step"])
def test_it_is_the_algorithm(
    ranks: Ranks, world: int, density: float, schedule: str, clip: str
) -> None:
    case = radius(schedule=schedule, density=density, clip=clip)
    by_rank = ranks.run(world, on_rank_algorithm, case, STEPS)
    start = Toy(alone(), DENSE)
    wanted = Algorithm(
        params_of(start),
        world,
        density,
        interval=4,
        start=2,
        rolling=schedule == "rolling",
        per_step=clip == "per-step",
    )
    for t in range(1, STEPS + 1):
        wanted.step(t, [gradients(t, rank) for rank in range(world)])
        for rank, found in enumerate(by_rank):
            now = found[t - 1]
            assert now["norm"] == pytest.approx(wanted.norm, rel=1e-5)
            assert now["masks"].keys() == wanted.mask.keys()
            for name, mask in now["masks"].items():
                assert torch.equal(mask, wanted.mask[name]), (t, name)
            for name in SHAPES:
                torch.testing.assert_close(
                    now["params"][name], wanted.weights[name], rtol=2e-5, atol=2e-6
                )
                torch.testing.assert_close(
                    now["residual"][name].view(SHAPES[name]),
                    wanted.residual[rank][name],
                    rtol=1e-5,
                    atol=1e-6,
                )


@pytest.mark.parametrize("schedule", ["paper", "rolling"])
@pytest.mark.parametrize("density", [0.02, 0.3])
def test_weights_decay_in_every_step_also_where_nothing_is_sent(
    density: float, schedule: str
) -> None:
    """A gradient of zero leaves nothing but the decay, and offsets and bitmaps have their own."""
    still = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sparse, dense = Toy(alone(), radius(schedule=schedule, density=density)), Toy(alone(), DENSE)
    start = params_of(sparse)
    for _ in range(STEPS):
        sparse.step([still])
        dense.step([still])
    for name, weight in params_of(sparse).items():
        assert torch.equal(weight, params_of(dense)[name])
        shrink = (1 - sparse.lr * sparse.weight_decay) ** STEPS if name in MATRICES else 1.0
        torch.testing.assert_close(weight, start[name] * shrink)


@pytest.mark.parametrize(
    ("start", "interval", "dense"),
    [(5, 5, {1, 2, 3, 4, 5, 10, 15}), (1, 6, {*range(1, 7), 12}), (7, 3, {*range(1, 10), 12, 15})],
)
def test_dense_until_the_first_multiple_of_the_interval_from_the_start(
    start: int, interval: int, dense: set[int]
) -> None:
    found = densities(radius(start_iter=start, interval=interval), 15)
    assert {t for t, density in enumerate(found, 1) if density == 1} == dense


def test_k_is_rounded_up_in_every_tensor_from_the_density_as_written() -> None:
    """0.07 x 100 in binary is a little more than 7."""
    case = radius(density=0.07, interval=1, start_iter=1)
    toy = Toy(alone(), case)
    toy.step([gradients(0)])
    for mask in masks_of(toy).values():
        assert int(mask.sum()) == -(-7 * mask.numel() // 100)


def on_rank_bytes(groups: ProcessGroups, case: PathCase) -> list[tuple[int, int, float]]:
    toy = Toy(groups, case)
    found = []
    for t in range(1, 9):
        toy.backward([gradients(t, groups.dp.rank)])
        step = toy.finish()
        payload = sum(reduced.values.nbytes for reduced in step.reduced)
        toy.apply(step)
        stats = toy.engine.stats()
        found.append((payload, stats.bytes_sent, stats.density))
    return found


@pytest.mark.parametrize("schedule", ["paper", "rolling"])
def test_bytes_and_density_are_those_of_what_was_sent(ranks: Ranks, schedule: str) -> None:
    stored = 4 * sum(bucket.numel for bucket in Toy(alone(), DENSE).engine.buckets)
    for found in ranks.run(2, on_rank_bytes, radius(schedule=schedule)):
        for t, (payload, sent, density) in enumerate(found, 1):
            assert sent == pytest.approx(payload, abs=8)  # 2 (n - 1) / n is 1
            assert density == pytest.approx(payload / stored)
            assert (density < 0.8) == (t > 4 and (schedule == "rolling" or t % 4 != 0))


# ---- limits -------------------------------------------------------------------------------------


def on_rank_twins(
    groups: ProcessGroups, cases: list[PathCase], dtypes: list[torch.dtype], steps: int
) -> list[list[str]]:
    """Return the parameters and moments in which each path differs from the first path."""
    toys = [Toy(groups, case, dtype=dtypes[0], grad_dtype=dtypes[1]) for case in cases]
    for number in range(steps):
        for toy in toys:
            toy.step([gradients(number, groups.dp.rank)], clip_norm=1.0)
    states = [
        {k: v for k, v in settled(toy).items() if not k.startswith("shared/")} for toy in toys
    ]
    return [same(states[0], other) for other in states[1:]]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.float32, torch.float32],
        [torch.bfloat16, torch.float32],
        [torch.bfloat16, torch.bfloat16],
    ],
    ids=["fp32", "bf16", "bf16-grads"],
)
def test_its_limits_are_the_dense_path_in_every_bit(
    ranks: Ranks, world: int, dtypes: list[torch.dtype]
) -> None:
    """The limits are density 1 with any other option, and an interval of 1."""
    cases = [
        DENSE,
        radius(density=1.0),
        radius(density=1.0, schedule="rolling"),
        radius(interval=1, start_iter=3),
        radius(interval=1, select="seeded"),
    ]
    assert ranks.run(world, on_rank_twins, cases, dtypes, 10) == [[[]] * 4] * world


def test_density_1_keeps_nothing() -> None:
    toy = Toy(alone(), radius(density=1.0))
    for number in range(6):
        toy.step([gradients(number)])
    stats = toy.engine.stats(full=True)
    assert stats.density == 1 and not stats.extra and not stats.notes
    reducer = reducer_of(toy)
    assert not reducer.wants_update(StepContext(t=4))
    assert [*reducer.state_tensors(), *reducer.shared_tensors()] == []


# ---- what is chosen -----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["paper", "rolling"])
def test_select_gradient_takes_the_largest_means(schedule: str) -> None:
    toy = Toy(alone(), radius(select="gradient", schedule=schedule))
    for t in range(1, 5):
        toy.backward([gradients(t)])
        step = toy.finish()
        mean = toy.reduced(step)
        toy.apply(step)
    cuts = 4 if schedule == "rolling" else 1
    for name, mask in masks_of(toy).items():
        n = mask.numel()
        for lo, hi in ((n * p // cuts, n * (p + 1) // cuts) for p in range(cuts)):
            part, chosen = mean[name][lo:hi].abs(), mask.view(-1)[lo:hi]
            assert part[chosen].min() > part[~chosen].max()


def test_rolling_chooses_by_gradient_anew_in_each_part() -> None:
    toy = Toy(alone(), radius(select="gradient", schedule="rolling"))
    for t in range(1, STEPS + 1):
        toy.backward([gradients(t)])
        step = toy.finish()
        mean = toy.reduced(step)
        toy.apply(step)
        for name, mask in masks_of(toy).items() if t > 4 else ():
            n, p = mask.numel(), t % 4
            cut = slice(n * p // 4, n * (p + 1) // 4)
            part, chosen = mean[name][cut].abs(), mask.view(-1)[cut]
            assert part[chosen].min() > part[~chosen].max()


def on_rank_other_rounding(groups: ProcessGroups, case: PathCase, t: int) -> tuple[int, str]:
    """Return the update at which the run ends, and the error.

    Rank 1 selects other entries after update `t`.
    """
    toy = Toy(groups, case)
    for number in range(1, STEPS):
        if number == t and groups.dp.rank == 1:
            for kind, _, moment in toy.optimizer.tensors():
                if kind == "exp_avg":
                    moment.mul_(1 + 0.1 * torch.randn(moment.shape))
        try:
            toy.step([gradients(number, groups.dp.rank)])
        except PeerError as error:
            return number, str(error)
    return 0, ""


@pytest.mark.parametrize(
    ("schedule", "t", "seen"), [("paper", 4, 4), ("rolling", 4, 4), ("rolling", 5, 8)]
)
def test_ranks_that_choose_others_do_not_go_on(
    ranks: Ranks, schedule: str, t: int, seen: int
) -> None:
    for step, error in ranks.run(2, on_rank_other_rounding, radius(schedule=schedule), t):
        assert step == seen
        assert error.startswith(f"rank 1 selected other entries than rank 0 at update {seen}")


def on_rank_draws(groups: ProcessGroups, seeds: list[int]) -> list[dict]:
    found = []
    for seed in seeds:
        toy = Toy(groups, radius(select="seeded"))
        reducer = reducer_of(toy)
        reducer.settings = type(reducer.settings)(**vars(reducer.settings) | {"seed": seed})
        for t in range(1, 9):
            assert not toy.engine.wants_update
            toy.step([gradients(t, groups.dp.rank)])
            if t in (4, 8):
                found.append(masks_of(toy))
    return found


def test_seeded_draws_are_equal_on_all_ranks_and_new_at_each_resample(ranks: Ranks) -> None:
    first, second = ranks.run(2, on_rank_draws, [1, 1, 2])
    for mine, other in zip(first, second, strict=True):
        assert same(mine, other) == []
    at_4, at_8, again_at_4, _, other_seed_at_4, _ = first
    assert same(at_4, again_at_4) == []
    assert same(at_4, at_8) == same(at_4, other_seed_at_4) == MATRICES
    for name, mask in at_4.items():
        assert int(mask.sum()) == math.ceil(0.4 * mask.numel()), name


def test_without_residual_a_resample_sends_the_gradientalone() -> None:
    toy = Toy(alone(), radius(residual="none"))
    for t in range(1, 9):
        toy.backward([gradients(t)])
        step = toy.finish()
        if t % 4 == 0:
            reduced = toy.reduced(step)
            assert all(torch.equal(reduced[n], gradients(t)[n].view(-1)) for n in SHAPES)
        toy.apply(step)
        assert list(reducer_of(toy).state_tensors()) == []


def trajectory(case: PathCase, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    toy = Toy(alone(), case, grad_dtype=dtype)
    for number in range(STEPS):
        toy.step([gradients(number)], clip_norm=1.0)
        toy.engine.stats(full=True)
    return toy.state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_case
def test_both_kinds_of_index_make_the_same_run(case: PathCase, dtype: torch.dtype) -> None:
    """Offsets, or a bitmap with every available set of kernels."""
    with index_of(bits=False):
        wanted = trajectory(case, dtype)
    with index_of(bits=True):
        found = trajectory(case, dtype)
    for name, tensor in found.items():
        if name.startswith("shared/"):
            assert torch.equal(tensor, wanted[name]), name
        else:
            # Frozen entries are updated in other pieces, whose scalar tails round differently.
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)


def test_what_waits_is_found_while_the_last_bucket_is_on_its_way() -> None:
    toy = Toy(alone(), radius())
    reducer, buckets = reducer_of(toy), toy.engine.buckets
    for t in range(1, 6):
        toy.step([gradients(t)])
    waiting = {own.bucket.index: own.residual._buffer for own in reducer._own if own.parts}
    changed: list[set[int]] = []
    before: dict[int, torch.Tensor] = {}
    reduce = reducer.reduce

    def watched(bucket: GradBucket, step: StepContext) -> Any:
        before[bucket.index] = bucket.grad.clone()
        work = reduce(bucket, step)
        changed.append({n for n, grad in before.items() if not torch.equal(grad, buckets[n].grad)})
        return work

    reducer.reduce = watched
    toy.backward([gradients(6)])
    step = toy.finish()
    *earlier, last = changed
    assert len(waiting) > 1 and not any(earlier) and last == set(waiting)
    sums = {n: pending + before[n] for n, pending in waiting.items()}
    toy.apply(step)
    for n, pending in waiting.items():
        assert torch.equal(reducer._own[n].residual._buffer, sums[n])
        assert buckets[n].grad is pending, "the two trade places"
