"""The contracts of local steps: replicas take steps alone and share an anchor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.data_parallel.outer_step import LocalReducer
from megatron.data_parallel.rounds import Rounds
from megatron.data_parallel.wire_feedback import WireFeedback
from megatron.optimizer.update_rules import SGD
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tests.contract.grid import GridToy, on_grid
from tests.contract.grid import gradients as grid_gradients
from tests.contract.harness import (
    FRAGMENTS,
    PATHS,
    SHAPES,
    WORLDS,
    PathCase,
    Toy,
    case_id,
    copies,
    gradients,
    same,
)
from tests.ranks import Ranks

DENSE = PathCase("dense")
CASES = [case for case in PATHS if case.local]
ALONE = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
every_case = pytest.mark.parametrize("case", CASES, ids=case_id)
every_world = pytest.mark.parametrize("world", WORLDS)


def weights_of(toy: Toy) -> dict[str, torch.Tensor]:
    return {info.name: info.param.detach().clone() for info in toy.infos}


def anchors_of(toy: Toy) -> dict[str, torch.Tensor]:
    assert toy.engine.local_steps is not None
    return {str(a.bucket.index): a.weights.clone() for a in toy.engine.local_steps.anchors}


# ---- the outer step ------------------------------------------------------------------------------

ROUNDS, STEPS, LR, MOMENTUM = 3, 4, 0.7, 0.9


def on_rank_rounds(groups: ProcessGroups) -> tuple[list[dict], list[dict], list[list[str]]]:
    """Take local steps, and the same steps in dense training on one rank alone.

    Returns for each round the changes that training alone finds, the weights after the outer step,
    and the moments that differ between the two runs.
    """
    options = {"local_steps": STEPS, "outer_lr": LR, "outer_momentum": MOMENTUM}
    toy, alone = Toy(groups, PathCase("diloco", options, local=True)), Toy(ALONE, DENSE)
    changes, shared, differ = [], [], []
    for number in range(ROUNDS):
        anchor = weights_of(alone)
        for step in range(STEPS):
            mine = [gradients(number, step, groups.dp.rank)]
            assert toy.step(mine, clip_norm=1.0).ok
            alone.step(mine, clip_norm=1.0)
            if step < STEPS - 1:
                assert same(weights_of(toy), weights_of(alone)) == []
        changes.append({name: anchor[name] - w for name, w in weights_of(alone).items()})
        shared.append(weights_of(toy))
        moments = [
            {f"{kind}/{name}": t for kind, name, t in one.optimizer.tensors() if kind != "param"}
            for one in (toy, alone)
        ]
        differ.append(same(*moments))
        for info in alone.infos:
            info.param.detach().copy_(shared[-1][info.name])
    return changes, shared, differ


@every_world
def test_the_mean_change_of_replicas_is_the_gradient_of_nesterov_sgd(
    ranks: Ranks, world: int
) -> None:
    found = ranks.run(world, on_rank_rounds)
    initial = weights_of(Toy(ALONE, DENSE))
    anchors = {name: torch.nn.Parameter(weight.double()) for name, weight in initial.items()}
    outer = torch.optim.SGD(anchors.values(), lr=LR, momentum=MOMENTUM, nesterov=True)
    for number in range(ROUNDS):
        for name, anchor in anchors.items():
            changed = [changes[number][name].double() for changes, _, _ in found]
            anchor.grad = torch.stack(changed).mean(0)
        outer.step()
        for _, shared, differ in found:
            assert differ[number] == [], "moments stay with their replica"
            assert same(shared[number], found[0][1][number]) == []
            for name, anchor in anchors.items():
                torch.testing.assert_close(
                    shared[number][name].double(), anchor.detach(), rtol=1e-5, atol=1e-6
                )


# ---- limits --------------------------------------------------------------------------------------


def on_rank_limit(groups: ProcessGroups, steps: int, momentum: float | None) -> list[dict]:
    rule = None if momentum is None else SGD(momentum=momentum)
    mean = {"local_steps": steps, "outer_lr": 1.0, "outer_momentum": 0.0}
    cases = DENSE, PathCase("diloco", mean, local=True)
    toys = [Toy(groups, case, rule=rule) for case in cases]
    for number in range(2 * steps):
        for toy in toys:
            toy.step(
                [gradients(number, groups.dp.rank)], clip_norm=1.0 if groups.dp.size == 1 else 0.0
            )
    return [weights_of(toy) for toy in toys]


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_9_one_replica_with_an_anchor_that_is_the_mean_is_dense_bit_by_bit(steps: int) -> None:
    dense, local = on_rank_limit(ALONE, steps, None)
    assert same(dense, local) == []


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("world", [2, 4])
def test_9_the_mean_after_each_sgd_step_is_dense_up_to_rounding(
    ranks: Ranks, world: int, momentum: float
) -> None:
    for dense, local in ranks.run(world, on_rank_limit, 1, momentum):
        for name in SHAPES:
            torch.testing.assert_close(local[name], dense[name], rtol=1e-5, atol=1e-5)


# ---- 2: what replicas share ----------------------------------------------------------------------


def on_rank_shared(groups: ProcessGroups, case: PathCase, dtype: torch.dtype) -> dict:
    toy = Toy(groups, case, dtype=dtype)
    for number in range(11):
        toy.step([gradients(number, groups.dp.rank)], clip_norm=0.5)
    with toy.optimizer.shared_weights():
        shared = weights_of(toy)
    return {"anchors": anchors_of(toy) | toy.shared(), "weights": shared, "own": weights_of(toy)}


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_2_anchor_and_outer_momentum_are_equal_on_every_replica(
    ranks: Ranks, case: PathCase, dtype: torch.dtype, world: int
) -> None:
    first, *others = ranks.run(world, on_rank_shared, case, dtype)
    for other in others:
        assert same(first["anchors"], other["anchors"]) == []
        assert same(first["weights"], other["weights"]) == []
        assert same(first["own"], other["own"]), "step 11 lies inside a round"


# ---- 4: a bad step is the replica's --------------------------------------------------------------


BAD = [(value, name) for name in ("first.weight", "norm.weight") for value in (math.nan, math.inf)]


def on_rank_bad(groups: ProcessGroups, case: PathCase) -> dict[str, dict[str, Any]]:
    """Return for each bad value in a parameter what two bad steps of the last replica change.

    Rounds are longer than the test, so that every change is the replica's own.
    """
    options = case.options | {"local_steps": 50, "local_fragments": 1}
    case = PathCase(case.name, options, local=True, wire=case.wire)
    skipped = (2, 3) if groups.dp.rank == groups.dp.size - 1 else ()
    # Training without the bad steps.
    other = Toy(ALONE, DENSE)
    for number in range(6):
        if number not in skipped:
            other.step([gradients(number, groups.dp.rank)])
    found = {}
    for value, name in BAD:
        toy = Toy(groups, case)
        steps: dict[str, Any] = {"ok": [], "skipped": [], "changed": []}
        for number in range(6):
            mine = gradients(number, groups.dp.rank)
            if number in skipped:
                mine[name].view(-1)[toy.entry(name)] = value
            before = toy.state()
            step = toy.step([mine])
            steps["ok"].append(step.ok)
            steps["skipped"].append(step.replicas_skipped)
            if not step.ok:
                steps["changed"] += same(before, toy.state())
        steps["applied"] = toy.optimizer.applied - other.optimizer.applied
        found[f"{value} in {name}"] = steps | {"after": same(weights_of(toy), weights_of(other))}
    return found


@every_case
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_4_a_non_finite_gradient_is_skipped_by_its_replica_alone(
    ranks: Ranks, case: PathCase, world: int
) -> None:
    for rank, found in enumerate(ranks.run(world, on_rank_bad, case)):
        good = [True, True, False, False, True, True] if rank == world - 1 else [True] * 6
        steps = {
            "ok": good,
            "skipped": [0, 0, 1, 1, 0, 0],
            "changed": [],
            "applied": 0,
            "after": [],
        }
        assert found == {f"{value} in {name}": steps for value, name in BAD}


# ---- what a run is told, and does not pay for ----------------------------------------------------


def test_one_rank_over_an_encoded_wire_keeps_nothing() -> None:
    toy = Toy(ALONE, PathCase("diloco", {"local_steps": 2}, local=True, wire="int8"))
    for number in range(4):
        assert toy.step([gradients(number, 0)]).ok
    assert isinstance(toy.engine.reducer, LocalReducer)
    kept = [anchor.feedback for anchor in toy.engine.reducer.anchors if anchor.bucket.matrix]
    assert kept and all(isinstance(each, WireFeedback) for each in kept)
    assert not any(each.is_pending for each in kept if each is not None)
    assert not [name for name, _ in toy.engine.reducer.state_tensors() if "momentum" not in name]


@pytest.mark.parametrize(("fragments", "words"), [(9, "turns of --local-fragments 9"), (3, "")])
def test_turns_without_a_bucket_are_told_once(fragments: int, words: str) -> None:
    options = FRAGMENTS | {"local_fragments": fragments}
    toy = Toy(ALONE, PathCase("diloco", options, local=True), cap=1 << 20)
    told = " ".join(toy.engine.stats().notes)
    assert words in told and bool(told) == bool(words)
    assert not toy.engine.stats().notes


def on_rank_density(groups: ProcessGroups, case: PathCase) -> list[tuple[float, int, int]]:
    """Return for each step the density, and the entries that a stage averages and has.

    The second stage does not count its copy of the tied embedding.
    """
    toy = GridToy(on_grid(groups, "PP2"), case)
    local, found = toy.engine.local_steps, []
    assert local is not None
    owned = [each for each in local.anchors if toy.engine.model_shard.owns(each.bucket)]
    entries = sum(each.bucket.numel for each in owned)
    for number in range(9):
        toy.step([grid_gradients(number, 0)])
        averaged = sum(each.bucket.numel for each in owned if not each.is_left)
        found.append((toy.engine.stats().density, averaged, entries))
    return found


def test_the_density_is_that_of_all_stages(ranks: Ranks) -> None:
    stages = ranks.run(2, on_rank_density, PathCase("diloco", FRAGMENTS, local=True))
    for steps in zip(*stages, strict=True):
        (first, *averaged), (second, *also_averaged) = [(d, *counts) for d, *counts in steps]
        sent, entries = (a + b for a, b in zip(averaged, also_averaged, strict=True))
        assert first == second == pytest.approx(sent / entries)
    assert sum(density for density, _, _ in stages[0]) == pytest.approx(1.0)


# ---- 10: state goes out and comes back -----------------------------------------------------------


PLACES = range(1, 12, 2)
"""Numbers of steps after which a run is left."""


def on_rank_resume(groups: ProcessGroups, case: PathCase) -> dict[int, list[str]]:
    """Return for each place the names that differ at the end after a resume there."""

    def trained(toy: Toy, start: int, stop: int) -> Toy:
        for number in range(start, stop):
            toy.step([gradients(number, groups.dp.rank)], clip_norm=1.0)
        return toy

    # A run of its own: saving could change the run that is saved.
    through = trained(Toy(groups, case), 0, 12).state()
    first, at, found = Toy(groups, case), 0, {}
    for left_at in PLACES:
        second = _resumed(groups, case, trained(first, at, left_at))
        at = left_at
        found[left_at] = same(through, trained(second, left_at, 12).state())
    return found


def _resumed(groups: ProcessGroups, case: PathCase, first: Toy) -> Toy:
    """Return a toy that goes on from the state of another."""
    second = Toy(groups, case)
    with first.optimizer.shared_weights():
        anchor = [tensor.clone() for _, _, tensor in first.optimizer.tensors()]
    for (_, _, tensor), value in zip(second.optimizer.tensors(), anchor, strict=True):
        tensor.copy_(value)
    second.optimizer.finish_load()
    second.engine.load_state_tensors(first.own(), copies(first.engine.shared_tensors()))
    # Inside a round each replica has weights of its own.
    assert first.engine.local_steps is not None and second.engine.local_steps is not None
    for mine, theirs in zip(
        second.engine.local_steps.anchors, first.engine.local_steps.anchors, strict=True
    ):
        mine.is_left = theirs.is_left
    for (_, _, tensor), (_, _, value) in zip(
        second.optimizer.tensors(), first.optimizer.tensors(), strict=True
    ):
        tensor.copy_(value)
    second.optimizer.copy_to_params()
    second.optimizer.applied, second.steps = first.optimizer.applied, first.steps
    return second


@every_case
@every_world
def test_10_saved_and_resumed_equals_uninterrupted(
    ranks: Ranks, case: PathCase, world: int
) -> None:
    found = ranks.run(world, on_rank_resume, case)
    assert found == [{left_at: [] for left_at in PLACES}] * world


# ---- turns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "fragments"), [(1, 1), (4, 1), (4, 2), (5, 3), (6, 6)])
@pytest.mark.parametrize("total", [1, 7, 12, 13])
def test_each_fragment_is_averaged_every_round_and_after_the_last_step(
    steps: int, fragments: int, total: int
) -> None:
    rounds = Rounds(steps, fragments, total)
    for fragment in range(fragments):
        ends = [at for at in range(1, total + 1) if rounds.ends(fragment, at)]
        assert ends[-1] == total
        assert {after - at for at, after in zip(ends[:-1], ends[1:-1], strict=False)} <= {steps}
        assert ends[0] <= steps and (len(ends) < 2 or ends[-1] - ends[-2] <= steps)
    regular = [rounds.ended(at) for at in range(1, steps + 1) if at < total]
    assert all(len(ended) <= 1 for ended in regular), "turns do not coincide"
    counted = {ended: count for ended, count in rounds.counts().items() if count}
    expected: dict[tuple[int, ...], int] = {}
    for at in range(1, total + 1):
        expected[rounds.ended(at)] = expected.get(rounds.ended(at), 0) + 1
    assert counted == expected


@pytest.mark.parametrize("buckets", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("fragments", [1, 2, 3, 4])
def test_the_last_bucket_of_every_stage_has_the_last_turn(buckets: int, fragments: int) -> None:
    rounds = Rounds(4, fragments, 100)
    found = [rounds.fragment_of(bucket, buckets) for bucket in range(buckets)]
    assert found[-1] == fragments - 1 and found == sorted(found)
    assert len(set(found)) == min(buckets, fragments)
