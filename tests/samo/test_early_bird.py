"""Tests of when an early-bird ticket is drawn, its messages, and its state in a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.gradient_path import PathParts
from megatron.data_parallel.layout import DenseLayout
from megatron.data_parallel.reducer import StepContext
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.update_rules import AdamW
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from samo import pruning
from samo.early_bird import EarlyBird
from samo.mask import PackedMasks, flat_mask
from samo.pruning import distance, magnitude, prunable
from samo.schedule import DRAWS, first_ticket, why_no_resample
from tests.samo.grid_toy import state_of

P = Fraction("0.75")
INTERVAL = 3
LAST = 60
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (8, 4),
    "first": (6, 10),
    "bias": (6,),
    "second": (4, 3, 2),
}
ROWS = {"embedding": 5}
"""Rows of the embedding without its three padding rows."""


def make_infos(dtype: torch.dtype = torch.float32) -> list[ParamInfo]:
    generator = torch.Generator().manual_seed(3)
    return [
        ParamInfo(
            name=name,
            leaves=(nn.Parameter(torch.randn(shape, generator=generator).to(dtype)),),
            logical_shape=(ROWS.get(name, shape[0]), *shape[1:]),
            weight_decay=len(shape) > 1,
        )
        for name, shape in SHAPES.items()
    ]


INFOS = make_infos()


def early_bird(**options: Any) -> EarlyBird:
    given = {"scope": "tensor", "interval": INTERVAL, "limit": 0.2, "last": LAST} | options
    return EarlyBird(prunable(INFOS, keep_embeddings=False), P, **given)


def weights_at(t: int) -> dict[str, torch.Tensor]:
    """Return flat weights that move less and less, with padding of the largest magnitude."""
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(number)
        first, second = (torch.randn(shape, generator=generator) for _ in range(2))
        value = first + second * 30 / t**1.5
        value[ROWS.get(name, shape[0]) :] = 100.0
        found[name] = value.flatten()
    return found


def logical(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for info in prunable(INFOS, keep_embeddings=False):
        whole = weights[info.name].view(info.param.shape)
        found[info.name] = whole[: info.logical_shape[0]]
    return found


def shuffled(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[ParamInfo, torch.Tensor]]:
    infos = list(INFOS)
    random.Random(1).shuffle(infos)
    for info in infos:
        yield info, weights[info.name]


def untouchable() -> Iterator[tuple[ParamInfo, torch.Tensor]]:
    raise AssertionError("weights were looked at though nothing is due")
    yield  # makes the function a generator


def expected_ticket(limit: float, scope: pruning.Scope) -> tuple[int, list[float | None]]:
    """Return the update of the ticket, and the largest distance at each draw up to it."""
    masks, found = [], []
    for t in range(INTERVAL, LAST + 1, INTERVAL):
        masks.append(magnitude(logical(weights_at(t)), P, scope=scope))
        distances = [distance(masks[-1], old) for old in masks[-DRAWS:-1]]
        found.append(max(distances, default=None))
        if len(distances) == DRAWS - 1 and max(distances) < limit:
            return t, found
    return 0, found


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("limit", [0.05, 0.2, 0.5])
def test_the_ticket_is_drawn_when_the_last_masks_are_alike(
    limit: float, scope: pruning.Scope
) -> None:
    ticket, distances = expected_ticket(limit, scope)
    assert first_ticket(INTERVAL) < ticket < LAST, "a case that tells nothing"
    bird, drawn = early_bird(limit=limit, scope=scope), None
    told: list[float | None] = []
    for t in range(1, ticket + 1):
        due = t % INTERVAL == 0
        weights = shuffled(weights_at(t)) if due else untouchable()
        assert not bird.layout_is_final and drawn is None
        drawn = bird.after_update(t, DenseLayout(), weights)
        told += [bird.stats().get("mask_distance")] * due
    assert drawn is not None and bird.layout_is_final and told == distances
    assert not drawn.reset_moments
    masks = magnitude(logical(weights_at(ticket)), P, scope=scope)
    wanted = {i.name: flat_mask(i, masks[i.name]) for i in INFOS if i.name in masks}
    for info in INFOS:
        found = drawn.layout.mask(info.name)
        assert (found is None) == (info.name == "bias")
        assert found is None or torch.equal(found, wanted[info.name])
    for t in range(ticket + 1, ticket + 2 * INTERVAL):
        assert bird.after_update(t, drawn.layout, untouchable()) is None
    assert bird.stats() == {} and bird.layout_is_final


def test_a_distance_at_the_limit_is_not_below_it() -> None:
    still = weights_at(1)
    for limit, ticket in ((1e-9, first_ticket(INTERVAL)), (0.0, None)):
        bird = early_bird(limit=limit)
        tickets = [
            t for t in range(1, LAST) if bird.after_update(t, DenseLayout(), shuffled(still))
        ]
        assert tickets == [ticket] * (ticket is not None)


def notes_of(bird: EarlyBird, last: int) -> list[str]:
    found: list[str] = []
    for t in range(1, last + 1):
        bird.after_update(t, DenseLayout(), shuffled(weights_at(t)))
        found += bird.notes()
    assert bird.notes() == ()
    return found


def test_each_draw_is_told() -> None:
    ticket, distances = expected_ticket(0.2, "tensor")
    notes = notes_of(early_bird(), ticket)
    assert len(notes) == len(distances) == ticket // INTERVAL
    assert notes[0] == "early bird: draw 1 after update 3: the first mask"
    assert notes[1] == (
        f"early bird: draw 2 after update 6: largest distance {distances[1]:.4f} to the last 1 mask"
    )
    assert notes[5] == (
        f"early bird: draw 6 after update 18: largest distance {distances[5]:.4f} to the last 4 "
        "masks"
    )
    assert notes[-1].startswith(
        f"early bird: draw {len(notes)} after update {ticket}: largest distance "
        f"{distances[-1]:.4f} to the last 4 masks, below 0.2: the ticket is drawn; "
    )


def test_updates_that_leave_time_for_no_ticket_are_told() -> None:
    bird = early_bird()
    assert bird.inactive_reason(1, 5 * INTERVAL) == ""
    assert "4 masks will be drawn, a ticket takes 5 more" in bird.inactive_reason(
        1, 5 * INTERVAL - 1
    )
    assert "4 masks will be drawn" in bird.inactive_reason(2 * INTERVAL, 5 * INTERVAL)
    notes_of(bird, 3 * INTERVAL)
    assert bird.inactive_reason(3 * INTERVAL + 1, 5 * INTERVAL) == ""
    assert "1 masks will be drawn, a ticket takes 2 more" in bird.inactive_reason(
        3 * INTERVAL + 1, 4 * INTERVAL
    )


def test_a_ticket_too_late_for_what_waits_for_it_is_told() -> None:
    begins = partial(why_no_resample, start=0, interval=8)
    bird = early_bird(why_no_more=begins)
    assert bird.inactive_reason(1, 16) == ""
    assert "drawn after step 15, and from then to step 15 there" in bird.inactive_reason(1, 15)
    notes_of(bird, 3 * INTERVAL)
    assert bird.inactive_reason(3 * INTERVAL + 1, 16) == ""
    assert "no multiple of radius_interval 8" in bird.inactive_reason(3 * INTERVAL + 1, 15)


@pytest.mark.parametrize("last", [20, 21, 23])
def test_a_run_without_a_ticket_is_told_at_its_last_draw(last: int) -> None:
    notes = notes_of(early_bird(last=last, limit=1e-9), last)
    draws = last // INTERVAL
    assert len(notes) == draws + 1
    assert notes[-2].startswith(f"early bird: draw {draws} ")
    assert notes[-1].startswith(
        f"early bird: no draw is left of this run of {last} updates: it ends dense, without a "
        "ticket; "
    )


@pytest.mark.parametrize("stop", [1, 3, 4, 12, 15, 20, "before", "at", "after"])
def test_a_saved_queue_goes_on(stop: int | str) -> None:
    ticket, _ = expected_ticket(0.2, "tensor")
    after = {"before": ticket - 1, "at": ticket, "after": ticket + 4}
    stop = after[stop] if isinstance(stop, str) else stop
    first, second, whole = early_bird(), early_bird(), early_bird()

    def run(bird: EarlyBird, start: int, end: int) -> list[tuple[int, str]]:
        found = []
        for t in range(start, end + 1):
            change = bird.after_update(t, DenseLayout(), shuffled(weights_at(t)))
            found.append((t, change.layout.fingerprint() if change else ""))
        return found

    before = run(first, 1, stop)
    state = state_of(first)
    assert all(name.startswith("early-bird/") for name in state)
    numbers = {name.split("/")[1] for name in state} - {"counts"}
    kept = 0 if stop >= ticket else min(stop // INTERVAL, DRAWS - 1)
    newest = stop // INTERVAL
    assert numbers == {str(n) for n in range(newest - kept + 1, newest + 1)}
    second.load_state_tensors(state | {"index/first": torch.zeros(1)})
    assert second.layout_is_final == first.layout_is_final == (stop >= ticket)
    assert before + run(second, stop + 1, LAST) == run(whole, 1, LAST)
    assert first.notes() + second.notes() == whole.notes()


@pytest.mark.parametrize("draws", [0, 1, DRAWS - 1, DRAWS + 2])
def test_a_stage_with_nothing_to_prune_keeps_as_many_masks_as_others(draws: int) -> None:
    """Distances are collective: a stage must compare as many masks after a resume as others do."""
    kept = min(draws, DRAWS - 1)
    options: dict[str, Any] = {"scope": "tensor", "interval": INTERVAL, "limit": 0.2, "last": LAST}
    first, second = EarlyBird([], P, **options), EarlyBird([], P, **options)
    first._draws, first._masks = draws, [PackedMasks.of(())] * kept
    second.load_state_tensors(state_of(first))
    assert second._draws == draws and len(second._masks) == kept


def steps_of(
    parts: PathParts, dtype: torch.dtype, *, until: int
) -> Iterator[tuple[int, list[ParamInfo], BucketOptimizer]]:
    """Train the parameters on random gradients; yield the state after each update."""
    infos = make_infos(dtype)
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    engine = GradientEngine(infos, parts, groups, cap=100, grad_dtype=torch.float32)
    optimizer = BucketOptimizer(engine, AdamW(beta1=0.9, beta2=0.99, eps=1e-8))
    generator = torch.Generator().manual_seed(5)
    for t in range(1, until + 1):
        engine.begin(StepContext(t=t))
        engine.expect_last_backward()
        wanted = [torch.randn(info.param.shape, generator=generator) for info in infos]
        loss = sum((i.param.float() * g).sum() for i, g in zip(infos, wanted, strict=True))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        step = engine.finish(tag=t, clip_norm=0.0)
        optimizer.step(step, lr=1e-3, weight_decay=0.1)
        engine.commit(step)
        optimizer.update_masks()
        yield t, infos, optimizer
    engine.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_is_dense_and_then_compressed(dtype: torch.dtype) -> None:
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)

    def parts(bird: EarlyBird | None) -> PathParts:
        return PathParts(
            layout=DenseLayout(), reducer=AllReduceReducer(Exchange(groups.dp)), mask_updater=bird
        )

    bird, ticket = early_bird(limit=0.1), first_ticket(INTERVAL)
    sparse = steps_of(parts(bird), dtype, until=ticket + 3)
    masks: dict[str, torch.Tensor] = {}
    for t, one, dense in steps_of(parts(None), dtype, until=ticket):
        _, two, optimizer = next(sparse)
        assert bird.layout_is_final == (t == ticket)
        alike = all(torch.equal(a.param, b.param) for a, b in zip(one, two, strict=True))
        assert alike == (t < ticket)
        if t == ticket:
            whole = {info.name: weight for info, weight in dense.weights()}
            kept = magnitude(logical(whole), P)
            masks = {i.name: flat_mask(i, kept[i.name]) for i in INFOS if i.name in kept}
            for info, weight in optimizer.weights():
                mask = masks.get(info.name, torch.ones(info.param.numel(), dtype=torch.bool))
                assert torch.equal(weight, whole[info.name][mask])
    more = 0
    for _, infos, optimizer in sparse:
        more += 1
        for info in infos:
            if info.name in masks:
                assert not info.param.detach().view(-1)[~masks[info.name]].any()
        stored = {info.name: weight.numel() for info, weight in optimizer.weights()}
        assert stored == {"embedding": 5, "first": 15, "bias": 6, "second": 6}
    assert more == 3
