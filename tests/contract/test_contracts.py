"""Tests of the contracts in docs/architecture.md, for every gradient path at 1, 2 and 4 ranks.

Function names give the number of the contract. Each `on_rank_*` runs on every rank. The cases are
those of `tests.contract.pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron.data_parallel.bucket import GradBucket
from megatron.data_parallel.reducer import StepContext
from megatron.data_parallel.wire_format import format_of, mean_bytes
from megatron.errors import ConfigError, PeerError
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.update_rules import SGD
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tests.contract.harness import (
    PATHS,
    RANDOM,
    SHAPES,
    TIED,
    PathCase,
    SavedToy,
    Toy,
    gradients,
    same,
)
from tests.contract.pairs import cases, choices
from tests.ranks import Ranks


class SpyReducer:
    """A reducer that records which buckets are sent, committed and aborted, in order."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.sent: list[int] = []
        self.committed: list[int] = []
        self.aborted: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def reduce(self, bucket: GradBucket, step: StepContext) -> Any:
        self.sent.append(bucket.index)
        return self.inner.reduce(bucket, step)

    def commit(self, bucket: GradBucket, update: Any) -> None:
        self.committed.append(bucket.index)
        self.inner.commit(bucket, update)

    def abort(self, bucket: GradBucket) -> None:
        self.aborted.append(bucket.index)
        self.inner.abort(bucket)


class HidingReducer(SpyReducer):
    """A reducer that sends zeros for huge and non-finite entries, as a lossy path may."""

    def reduce(self, bucket: GradBucket, step: StepContext) -> Any:
        bucket.grad.nan_to_num_(0.0).masked_fill_(bucket.grad.abs() > 1e18, 0.0)
        return super().reduce(bucket, step)


every_case = cases()
every_shared_case = cases(lambda case, world: not case.local)
"""Cases whose ranks have equal weights and skip steps together."""
every_shared_case_on_four_too = cases(lambda case, world: not case.local, four=True)
every_case_on_two_ranks = cases(lambda case, world: world > 1 and case.inner == 1)
"""Cases of several ranks, for a test of a fixed number of ranks. Two are no inner groups of two."""


def test_every_registered_path_is_held_to_the_contracts() -> None:
    assert {case.name for case in PATHS} == set(GRADIENT_PATHS)


# ---- 1: gradients belong to the engine ----------------------------------------------------------


def on_rank_ownership(groups: ProcessGroups, case: PathCase) -> list[bool]:
    toy = Toy(groups, case)
    seen = []
    toy.backward([gradients(1, groups.dp.rank), gradients(2, groups.dp.rank)])
    seen.append(all(leaf.grad is None for info in toy.infos for leaf in info.leaves))
    step = toy.finish()
    toy.apply(step)
    seen.append(all(leaf.grad is None for info in toy.infos for leaf in info.leaves))
    return seen


@every_case
def test_1_no_parameter_holds_a_gradient(ranks: Ranks, case: PathCase, world: int) -> None:
    assert ranks.run(world, on_rank_ownership, case) == [[True, True]] * world


# ---- 2, 3: the mean, equal everywhere, nothing lost ---------------------------------------------


def on_rank_mean(
    groups: ProcessGroups, case: PathCase, scale: float, dtype: torch.dtype
) -> list[dict]:
    toy = Toy(groups, case, grad_dtype=dtype)
    found = []
    for number in range(6):
        before = toy.residual()
        exists = {name: toy.exists(name) for name in SHAPES}
        mine = [gradients(number, micro, groups.dp.rank) for micro in range(2)]
        updater = toy.engine.mask_updater
        is_final = updater is None or updater.layout_is_final
        toy.backward(mine, loss_scale=scale)
        step = toy.finish()
        reduced = toy.reduced(step)
        toy.apply(step)
        found.append(
            {
                "is_final": is_final,
                "reduced": reduced,
                "gradient": {n: (mine[0][n] + mine[1][n]).reshape(-1) * exists[n] for n in SHAPES},
                "before": before,
                "after": toy.residual(),
            }
        )
    return found


ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Relative tolerance for values of size 1 after a few sums."""


CODES = {"int8": 127, "int4": 7}
"""Largest code of a wire."""


def lost_for_good(case: PathCase, name: str, offered: torch.Tensor) -> float:
    """Return a bound of what a wire loses of a mean before the masks of a run are final.

    Nothing is kept until then. A rank, and the mean, are rounded by half a code of their largest
    value at most; a scale in bf16 adds less than a tenth.
    """
    if case.wire not in CODES or len(SHAPES[name]) == 1:
        return 0.0
    return 1.1 * float(offered.abs().max()) / CODES[case.wire]


def sent_as(case: PathCase, name: str) -> torch.dtype:
    """Return the format to which a mean is rounded for good; residuals make up for int8 and int4.

    1-D parameters, which keep no residual, travel in bf16 then.
    """
    is_rounded = case.wire == "bf16" or (case.wire in ("int8", "int4") and len(SHAPES[name]) == 1)
    return torch.bfloat16 if is_rounded else torch.float32


@every_shared_case_on_four_too
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (1.0, torch.float32),
        (1024.0, torch.float32),
        (1.0, torch.bfloat16),
        (64.0, torch.float16),
    ],
)
def test_2_3_mean_is_equal_on_every_rank_and_nothing_is_lost(
    ranks: Ranks, case: PathCase, world: int, scale: float, dtype: torch.dtype
) -> None:
    by_rank = ranks.run(world, on_rank_mean, case, scale, dtype)
    for number in range(6):
        here = [found[number] for found in by_rank]
        for name in SHAPES:
            reduced = here[0]["reduced"][name]
            assert all(torch.equal(reduced, other["reduced"][name]) for other in here)
            if not case.conserves:
                continue
            offered = torch.stack([r["gradient"][name].double() + r["before"][name] for r in here])
            kept = torch.stack([r["after"][name].double() for r in here])
            expected = (offered - kept).mean(0)
            close = 10 * max(ROUNDING[dtype], ROUNDING[sent_as(case, name)])
            most = close + (0.0 if here[0]["is_final"] else lost_for_good(case, name, offered))
            torch.testing.assert_close(reduced.double() / scale, expected, rtol=close, atol=most)
            if case.lossless:
                assert not kept.any()


def on_rank_units(groups: ProcessGroups, case: PathCase, scale: float) -> tuple[list, dict]:
    toy = Toy(groups, case, weight_decay=0.0)
    toy.optimizer = BucketOptimizer(toy.engine, SGD(momentum=0.9))
    norms = []
    for number in range(4):
        clip = 1.0 if number % 2 else 0.0
        mine = [gradients(number, groups.dp.rank)]
        norms.append(toy.step(mine, clip_norm=clip, loss_scale=scale).norm)
    return norms, {info.name: info.param.detach().clone() for info in toy.infos}


@every_case
def test_3_the_loss_scale_leaves_norm_and_update_alone(
    ranks: Ranks, case: PathCase, world: int
) -> None:
    """A power of two, so that not a bit may change; SGD, which would show any factor."""
    plain = ranks.run(world, on_rank_units, case, 1.0)
    scaled = ranks.run(world, on_rank_units, case, 1024.0)
    for (norms, params), (scaled_norms, scaled_params) in zip(plain, scaled, strict=True):
        assert scaled_norms == pytest.approx(norms, rel=1e-12)
        assert norms[0] > 1.0, "clipping is to be on"
        for name in SHAPES:
            torch.testing.assert_close(scaled_params[name], params[name], rtol=1e-6, atol=1e-7)


def on_rank_silent(groups: ProcessGroups, case: PathCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of a parameter without gradient in a step, and the part that left its
    residual.
    """
    toy = Toy(groups, case)
    toy.step([gradients(0, groups.dp.rank)])
    before = toy.residual()
    silent, *others = every = toy.infos
    toy.infos = others
    toy.backward([gradients(1, groups.dp.rank)])
    toy.infos = every
    step = toy.finish()
    mean = toy.reduced(step)[silent.name]
    toy.apply(step)
    return mean, (before[silent.name] - toy.residual()[silent.name])


@cases(lambda case, world: world > 1 and case.inner == 1 and case.conserves)
def test_2_a_parameter_without_gradient_does_not_keep_the_last_one(
    ranks: Ranks, case: PathCase
) -> None:
    ((mean, pending),) = ranks.run(1, on_rank_silent, case)
    torch.testing.assert_close(mean, pending, rtol=1e-5, atol=1e-6)
    if case.lossless:
        assert not mean.any()


def on_rank_counts(groups: ProcessGroups, case: PathCase) -> dict[str, list]:
    toy = Toy(groups, case, cap=256)
    spy = SpyReducer(toy.engine.reducer)
    toy.engine.reducer = spy  # type: ignore[assignment]
    sent = 0
    for number in range(3):
        bad = gradients(number)
        if number == 1:
            bad["norm.weight"][0] = math.nan
        toy.step([bad])
        sent += toy.engine.stats().bytes_sent
    entries = sum(bucket.grad.nbytes for bucket in toy.engine.buckets)
    if case.wire is not None:
        entries = sum(
            mean_bytes(format_of(case.wire, matrix=each.matrix), each.numel, groups.dp.size)
            for each in toy.engine.buckets
        )
    order = list(range(len(toy.engine.buckets)))
    return {
        "committed": spy.committed,
        "aborted": spy.aborted,
        "order": order,
        "sent": [sent, entries],
    }


@every_case
def test_4_each_bucket_is_committed_or_aborted_once_a_step(
    ranks: Ranks, case: PathCase, world: int
) -> None:
    for found in ranks.run(world, on_rank_counts, case):
        assert found["committed"] == found["order"] * 2 and found["aborted"] == found["order"]
        sent, stored = found["sent"]
        if case.sharded or case.inner > 1:
            continue  # A separate test covers what this path sends.
        dense = 3 * 2 * (world - 1) * stored // world
        if case.name == "dense" or case.options.items() == RANDOM.items():
            assert sent == pytest.approx(dense, abs=3 * len(found["order"]))
        else:
            assert sent <= dense


def on_rank_request(groups: ProcessGroups, case: PathCase) -> list[int]:
    toy = Toy(groups, case)
    answers = []
    for wanting in (-1, groups.dp.size - 1):
        toy.backward([gradients(0)])
        step = toy.engine.finish(tag=1, request=2 if groups.dp.rank == wanting else 0)
        toy.apply(step)
        answers.append(step.request)
    return answers


@every_case
def test_4_one_rank_that_wants_to_leave_is_heard_by_all(
    ranks: Ranks, case: PathCase, world: int
) -> None:
    assert ranks.run(world, on_rank_request, case) == [[0, 2]] * world


# ---- 4: a bad step changes nothing anywhere -----------------------------------------------------


BAD_BEFORE = (3, 5, 7)
"""Number of good steps before each bad one, with and without a resample at interval 4."""
BAD = [
    (value, name)
    for name in ("first.weight", "norm.weight", TIED)
    for value in (math.nan, math.inf)
]


def on_rank_bad_steps(
    groups: ProcessGroups, case: PathCase, bad_rank: int, choices: Sequence[tuple[float, str]]
) -> dict[str, dict[str, list]]:
    """Return for each bad value in a parameter what bad steps change in a run."""
    other = Toy(groups, case)
    for number in range(9):
        other.step([gradients(number, groups.dp.rank)])
    wanted = other.state()
    return {
        f"{value} in {name}": _bad_steps(groups, case, bad_rank, value, name, wanted)
        for value, name in choices
    }


def _bad_steps(
    groups: ProcessGroups,
    case: PathCase,
    bad_rank: int,
    bad_value: float,
    name: str,
    wanted: dict[str, torch.Tensor],
) -> dict[str, list]:
    """Compare a run with bad steps with the state after the same steps without them."""
    toy = Toy(groups, case)
    found: dict[str, list] = {"ok": [], "changed": []}
    for number in range(9):
        if number in BAD_BEFORE:
            before = toy.state()
            poisoned = gradients(7, number, groups.dp.rank)
            if groups.dp.rank == bad_rank:
                stored = toy.exists(name).nonzero()
                # The last entry may share a block of a wire with the gap behind its slice.
                poisoned[name].view(-1)[stored[-1 if name == TIED else 1]] = bad_value
            found["ok"].append(toy.step([poisoned]).ok)
            found["changed"] += same(before, toy.state())
        found["ok"].append(toy.step([gradients(number, groups.dp.rank)]).ok)
    return found | {"after": same(toy.state(), wanted)}


@every_shared_case
@choices(*BAD)
def test_4_a_non_finite_gradient_on_one_rank_changes_nothing_on_any(
    ranks: Ranks, case: PathCase, world: int, choices: Sequence[tuple[float, str]]
) -> None:
    good = [[False, True] if number in BAD_BEFORE else [True] for number in range(9)]
    skipped = {"ok": sum(good, []), "changed": [], "after": []}
    expected = {f"{value} in {name}": skipped for value, name in choices}
    for found in ranks.run(world, on_rank_bad_steps, case, world - 1, choices):
        assert found == expected


def on_rank_hidden(groups: ProcessGroups, case: PathCase, value: float) -> tuple[bool, list[str]]:
    toy = Toy(groups, case)
    toy.engine.reducer = HidingReducer(toy.engine.reducer)  # type: ignore[assignment]
    toy.step([gradients(0, groups.dp.rank)])
    before = toy.state()
    bad = gradients(1)
    if groups.dp.rank == 0:
        bad["second.weight"].view(-1)[toy.entry("second.weight")] = value
    step = toy.step([bad])
    return step.ok, same(before, toy.state())


@every_shared_case
@pytest.mark.parametrize("value", [math.nan, 1e25])
def test_4_what_a_path_does_not_send_counts_too(
    ranks: Ranks, case: PathCase, world: int, value: float
) -> None:
    """A bad entry that is not sent is invisible after the reduce.

    A huge entry would wait in the residual, and its square would overflow at every later resample.
    """
    assert ranks.run(world, on_rank_hidden, case, value) == [(False, [])] * world


def on_rank_overflowing_norm(groups: ProcessGroups, case: PathCase) -> tuple[bool, list[str]]:
    toy = Toy(groups, case)
    toy.step([gradients(0, groups.dp.rank)])
    before = toy.state()
    # Finite entries whose sum cancels, so that only the squares in the norm overflow.
    huge = {name: torch.full(shape, 1e30) for name, shape in SHAPES.items()}
    for gradient in huge.values():
        gradient.view(-1)[1::2] *= -1
    step = toy.step([huge])
    return step.ok, same(before, toy.state())


@every_case
def test_4_a_norm_that_overflows_is_a_bad_step(ranks: Ranks, case: PathCase, world: int) -> None:
    assert ranks.run(world, on_rank_overflowing_norm, case) == [(False, [])] * world


def on_rank_out_of_step(groups: ProcessGroups, case: PathCase) -> str:
    toy = Toy(groups, case)
    toy.backward([gradients(0)])
    with pytest.raises(PeerError) as caught:
        toy.finish(tag=10 + (groups.dp.rank == 1))
    # Means that are under way would meet those of the next test, in another order on each rank.
    for work in toy.engine._work:
        work.drop()
    return str(caught.value)


@every_case_on_two_ranks
def test_4_a_rank_one_step_ahead_is_noticed(ranks: Ranks, case: PathCase) -> None:
    for text in ranks.run(2, on_rank_out_of_step, case):
        assert "out of step" in text and "between 10 and 11" in text


# ---- 5, 8: bucket classes, launch order, tied leaves --------------------------------------------


def on_rank_order(groups: ProcessGroups, case: PathCase) -> dict:
    toy = Toy(groups, case, cap=256)
    spy = SpyReducer(toy.engine.reducer)
    toy.engine.reducer = spy  # type: ignore[assignment]
    toy.backward([gradients(0, groups.dp.rank), gradients(1, groups.dp.rank)])
    in_backward = list(spy.sent)
    step = toy.finish()
    after = list(spy.sent)
    tied_sum = toy.reduced(step)[TIED]
    # Hooks that fire in the opposite order must not change the order of sending.
    toy.apply(step)
    spy.sent.clear()
    toy.engine.begin(toy.engine._context)
    toy.engine.expect_last_backward()
    for info in toy.infos:
        for leaf in info.leaves:
            leaf.grad = torch.ones_like(leaf)
            toy.engine.accumulate(info.name, leaf)
    toy.apply(toy.finish())
    return {
        "buckets": [(list(b.slices), b.tied, b.weight_decay) for b in toy.engine.buckets],
        "in_backward": in_backward,
        "after": after,
        "tied": tied_sum,
        "scrambled": list(spy.sent),
    }


@every_case
def test_5_8_buckets_are_sent_in_index_order_from_inside_backward(
    ranks: Ranks, case: PathCase, world: int
) -> None:
    for found in ranks.run(world, on_rank_order, case):
        order = list(range(len(found["buckets"])))
        assert found["in_backward"] == found["after"] == found["scrambled"] == order
        assert found["buckets"][-1] == ([TIED], True, True)
        for names, _, decays in found["buckets"]:
            # 1-D parameters and matrices never share a bucket.
            assert {len(SHAPES[name]) > 1 for name in names} == {decays}


# ---- 7: bucketing agrees or the run does not start ----------------------------------------------


def on_rank_other_buckets(groups: ProcessGroups, case: PathCase) -> str:
    with pytest.raises(ConfigError) as caught:
        Toy(groups, case, cap=256 if groups.dp.rank == 0 else 4096)
    return str(caught.value)


@every_case_on_two_ranks
def test_7_ranks_that_bucket_differently_are_refused(ranks: Ranks, case: PathCase) -> None:
    for text in ranks.run(2, on_rank_other_buckets, case):
        assert "rank 1" in text and "buckets" in text


def on_rank_cap(groups: ProcessGroups, case: PathCase, cap: int) -> dict[str, torch.Tensor]:
    # Adam would make whole updates of the differences of small gradients.
    rule = SGD(momentum=0.0) if case.wire in WIRE_ROUNDING else None
    toy = Toy(groups, case, cap=cap, rule=rule)
    for number in range(8):
        toy.step([gradients(number, groups.dp.rank)], clip_norm=1.0)
    return {info.name: info.param.detach().clone() for info in toy.infos}


WIRE_ROUNDING = {"bf16": 2**-8, "int8": 1 / 127, "int4": 1 / 7}
"""Largest distance of neighbouring values on a wire, relative to the largest value of a block."""


# Radius may select other entries of other roundings. Fragments consist of buckets.
@cases(
    lambda case, world: (
        world > 1
        and case.inner == 1
        and not (case.wire in WIRE_ROUNDING and "radius" in case.name)
        and "local_fragments" not in case.options
    )
)
def test_7_another_bucketing_changes_rounding_only(ranks: Ranks, case: PathCase) -> None:
    small, large = (ranks.run(2, on_rank_cap, case, cap)[0] for cap in (64, 10**6))
    atol = 1e-6
    if case.wire is not None:
        # Each of the eight updates has two rounded gradients of at most 5 over a norm of at least
        # 20, times the learning rate.
        atol += 8 * 2 * WIRE_ROUNDING.get(case.wire, 0.0) * 5 / 20 * 1e-2
        if case.local:
            # The outer SGD with Nesterov momentum applies the first of two rounds so often.
            momentum = case.options.get("outer_momentum", 0.9)
            atol *= case.options.get("outer_lr", 0.7) * (1 + momentum + momentum**2)
    for name in SHAPES:
        torch.testing.assert_close(small[name], large[name], rtol=1e-5, atol=atol)


# ---- 8, 9: overlap and DP 1 are the same computation --------------------------------------------


def on_rank_overlap(groups: ProcessGroups, case: PathCase, overlap: bool) -> dict:
    toy = Toy(groups, case, overlap=overlap, cap=256)
    for number in range(6):
        toy.step([gradients(number, m, groups.dp.rank) for m in range(3)], clip_norm=1.0)
    return toy.state()


@cases(four=True)
def test_9_overlap_changes_no_bit(ranks: Ranks, case: PathCase, world: int) -> None:
    overlapped = ranks.run(world, on_rank_overlap, case, True)
    at_the_end = ranks.run(world, on_rank_overlap, case, False)
    for first, second in zip(overlapped, at_the_end, strict=True):
        assert same(first, second) == []


def on_rank_equal_state(groups: ProcessGroups, case: PathCase, dtype: torch.dtype) -> dict:
    toy = Toy(groups, case, dtype=dtype)
    for number in range(8):
        toy.step([gradients(number, groups.dp.rank)], clip_norm=0.5)
    return {k: v for k, v in toy.state().items() if not k.startswith("reducer/")}


@cases(lambda case, world: world > 1 and not case.local, four=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_2_replicas_stay_bit_equal(
    ranks: Ranks, case: PathCase, dtype: torch.dtype, world: int
) -> None:
    first, *others = ranks.run(world, on_rank_equal_state, case, dtype)
    for other in others:
        assert same(first, other) == []


# ---- 10: state goes out and comes back ----------------------------------------------------------


def on_rank_resume(
    groups: ProcessGroups, case: PathCase, places: Sequence[int]
) -> dict[int, list[str]]:
    """Return for each number of steps the names that differ at the end after a resume there."""

    def train(toy: Toy, start: int, stop: int) -> Toy:
        for number in range(start, stop):
            toy.step([gradients(number, groups.dp.rank)], clip_norm=1.0)
        return toy

    # A run of its own: saving could change the run that is saved.
    through = train(Toy(groups, case), 0, 12).state()
    first, at, found = Toy(groups, case), 0, {}
    for left_at in places:
        train(first, at, left_at)
        at = left_at
        second = Toy(groups, case, saved=SavedToy(first))
        saved = {(kind, name): tensor for kind, name, tensor in first.optimizer.tensors()}
        for kind, name, tensor in second.optimizer.tensors():
            tensor.copy_(saved[kind, name])
        second.optimizer.applied = first.optimizer.applied
        second.optimizer.finish_load()
        second.engine.load_state_tensors(first.own(), first.shared())
        found[left_at] = same(through, train(second, left_at, 12).state())
    return found


@every_shared_case_on_four_too
@choices(*range(1, 12, 2))
def test_10_saved_and_resumed_equals_uninterrupted(
    ranks: Ranks, case: PathCase, world: int, choices: Sequence[int]
) -> None:
    found = ranks.run(world, on_rank_resume, case, choices)
    assert found == [{left_at: [] for left_at in choices}] * world


# ---- 11: the trajectory does not depend on the number of ranks ----------------------------------


def on_rank_trajectory(groups: ProcessGroups, case: PathCase) -> dict[str, torch.Tensor]:
    toy = Toy(groups, case, lr=1e-3)
    size, rank = groups.dp.size, groups.dp.rank
    for number in range(17):
        # Four shares of a global batch, dealt to the ranks; each is weighted as a mean over ranks.
        mine = [gradients(number, share, scale=size / 4) for share in range(rank, 4, size)]
        toy.step(mine, clip_norm=1.0)
    return {info.name: info.param.detach().clone() for info in toy.infos}


@cases(lambda case, world: world > 1 and case.linear, four=True)
def test_11_data_parallel_size_changes_rounding_only(
    ranks: Ranks, case: PathCase, world: int
) -> None:
    alone, several = (ranks.run(size, on_rank_trajectory, case)[0] for size in (1, world))
    for name in SHAPES:
        torch.testing.assert_close(several[name], alone[name], rtol=1e-4, atol=1e-4)
