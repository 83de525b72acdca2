"""Tests of the residual norm, the share of the index kept, and the log messages."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.data_parallel.exchange import Exchange
from tests.contract.harness import SHAPES, Toy, gradients
from tests.radius.toys import (
    STEPS,
    alone,
    masks_of,
    moved,
    radius,
    reducer_of,
)


def test_the_norm_of_the_residual_is_that_of_what_waits() -> None:
    """At a resample the norm is that of before the resample."""
    toy = Toy(alone(), radius())
    for t in range(1, STEPS + 1):
        waited, masks = toy.residual(), masks_of(toy)
        toy.step([gradients(t)])
        extra = toy.engine.stats(full=True).extra
        if t < 4:
            assert "residual_norm" not in extra
            continue
        waits = toy.residual()
        if t % 4 == 0 and masks:
            assert not any(r.any() for r in waits.values())
            waits = waited
        wanted = math.sqrt(sum(float(r.square().sum()) for r in waits.values()))
        assert extra["residual_norm"] == pytest.approx(wanted, rel=1e-5)
        assert (wanted == 0) == (t == 4)
        assert "residual_norm" not in toy.engine.stats().extra


def test_a_resample_that_is_dropped_sends_nothing() -> None:
    toy = Toy(alone(), radius())
    for t in range(1, 8):
        toy.step([gradients(t)])
    bad = gradients(8)
    bad["norm.weight"][0] = math.nan
    assert not toy.step([bad]).ok
    wanted = math.sqrt(sum(float(r.square().sum()) for r in toy.residual().values()))
    assert toy.engine.stats(full=True).extra["residual_norm"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("schedule", ["paper", "rolling"])
def test_the_share_of_the_index_kept_is_told_once_in_an_interval(schedule: str) -> None:
    toy = Toy(alone(), radius(schedule=schedule))
    for t in range(1, STEPS + 1):
        before = masks_of(toy)
        toy.step([gradients(t)])
        after = masks_of(toy)
        extra = toy.engine.stats().extra
        assert ("index_kept" in extra) == (t > 4 and t % 4 == 0)
        if "index_kept" in extra:
            old, both = (torch.cat([x.view(-1) for x in m.values()]) for m in (before, after))
            if schedule == "rolling":
                first = torch.cat(
                    [torch.arange(m.numel()) < m.numel() // 4 for m in before.values()]
                )
                old, both = old & first, both & first
            assert extra["index_kept"] == pytest.approx(int((old & both).sum()) / int(old.sum()))
            assert 0 < extra["index_kept"] < 1


def test_it_says_what_it_keeps_and_when_it_is_on_each_once() -> None:
    toy = Toy(alone(), radius())
    notes = []
    for t in range(1, 10):
        toy.step([gradients(t)])
        notes += [(t, note) for note in toy.engine.stats().notes]
    (first, memory), (second, switch) = notes
    assert first == 1 and "of index" in memory and "the paper" in memory
    assert second == 4 and "after update 4" in switch and "0.4" in switch
    resumed = Toy(alone(), radius())
    moved(toy, resumed, toy.own())
    resumed.step([gradients(10)])
    assert len(resumed.engine.stats().notes) == 1, "on already"


def test_vocabulary_padding_is_never_chosen() -> None:
    """Rows that exist in memory only lie at the end of a slice."""
    toy = Toy(alone(), radius())
    (part,) = reducer_of(toy)._own[-1].parts
    assert part.length == math.prod(SHAPES["embedding.weight"])
    exchange = Exchange(toy.groups.dp)
    padded = type(reducer_of(toy))(exchange, {"embedding.weight": 100}, reducer_of(toy).settings)
    padded.attach(toy.engine.buckets)
    (part,) = padded._own[-1].parts
    assert (part.length, part.wanted) == (100, 40)
