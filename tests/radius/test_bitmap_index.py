"""Tests of the bitmap index against a list of booleans, with all kernels that a CPU has."""

from __future__ import annotations

from importlib import import_module
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data_parallel.reducer import IndexRange, ReducedGrad
from megatron.optimizer.update_rules import SGD, AdamW, Hyper
from megatron.sparse.reference import BLOCK, CHUNK
from megatron.sparse.selection import GivenSelection, draw_seeded, select_largest
from radius.bitmap_index import BitmapIndex, BitmapIndexBase, FlushedBitmapIndex
from radius.native_library import native_library

CPU = torch.device("cpu")
KERNELS = ["reference", "native"]
LENGTH = 5 * BLOCK + 333
HYPER = Hyper(t=3, lr=0.1, weight_decay=0.1)


@pytest.fixture(params=KERNELS, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the kernels of all indices that a test makes."""
    if request.param == "native" and native_library() is None:
        pytest.skip("needs the kernels of radius/native.c, and AVX2")
    module = import_module(f"radius.{request.param}")
    monkeypatch.setattr("radius.bitmap_index._kernels_for", lambda device: module)


def choose_randomly(index: BitmapIndex, model: torch.Tensor, start: int, length: int) -> None:
    """Select in a range by magnitude, and mark the expected selection in the model."""
    values = torch.randint(-9, 10, (length,)).float()
    selection = select_largest(values, length * 2 // 5)
    index.choose(start, selection)
    model[start : start + length] = False
    model[start + selection.positions().long()] = True


def filled() -> tuple[BitmapIndex, torch.Tensor]:
    """Return an index of three slices with gaps between them, and its model."""
    index, model = BitmapIndex(LENGTH, CPU), torch.zeros(LENGTH, dtype=torch.bool)
    for start, length in ((0, 1000), (1024, 3001), (4096, LENGTH - 4096)):
        choose_randomly(index, model, start, length)
    return index, model


def assert_marks(index: BitmapIndexBase, model: torch.Tensor) -> None:
    flat = torch.randn(LENGTH)
    expected = flat[model]
    assert index.numel == expected.numel()
    out = torch.empty(index.numel)
    index.gather(flat, out)
    assert torch.equal(out, expected)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(st.integers(0, LENGTH - 1), st.integers(0, LENGTH), st.booleans()), max_size=6
    )
)
def test_a_choice_replaces_what_was_chosen_in_its_range(
    choices: list[tuple[int, int, bool]],
) -> None:
    index, model = BitmapIndex(LENGTH, CPU), torch.zeros(LENGTH, dtype=torch.bool)
    for start, length, by_magnitude in choices:
        length = min(length, LENGTH - start)
        if by_magnitude and length:
            choose_randomly(index, model, start, length)
        else:
            draw = draw_seeded(length, length // 3, seed=start, step=1, name="w")
            index.choose(start, draw)
            model[start : start + length] = False
            model[start + draw.positions().long()] = True
        assert index.count(start, length) == int(model[start : start + length].sum())
        half = LENGTH // 2
        assert index.count(half, LENGTH - half) == int(model[half:].sum())
    assert_marks(index, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draw_and_magnitude_over_several_chunks(dtype: torch.dtype) -> None:
    length = 2 * CHUNK + 5000
    index = BitmapIndex(length, CPU)
    values = torch.randn(CHUNK + 100).to(dtype)
    largest = select_largest(values, CHUNK // 3)
    rest = length - 50 - values.numel()
    draw = draw_seeded(rest, rest // 2, seed=1, step=1, name="w")
    index.choose(50, largest)
    index.choose(50 + values.numel(), draw)
    found = torch.empty(index.numel, dtype=torch.int64)
    index.gather(torch.arange(length), found)
    parts = [largest.positions() + 50, draw.positions() + 50 + values.numel()]
    assert torch.equal(found, torch.cat(parts).long())


def test_a_count_that_only_the_device_knows_is_asked_for() -> None:
    values = torch.randn(1000)
    found = select_largest(values, 400, sum_bins=lambda counts: None)
    index = BitmapIndex(LENGTH, CPU)
    index.choose(64, found)
    assert found.count is None and index.numel == index.count(64, 1000) == 400


@pytest.mark.parametrize(("start", "length"), [(0, LENGTH), (1, 30), (1000, 2100), (3000, 2453)])
def test_entries_chosen_again_are_counted(start: int, length: int) -> None:
    """Entries of the same words outside the range are chosen before and after."""
    index, model = filled()
    chosen = torch.rand(length) < 0.5
    both = model[start : start + length] & chosen
    before, again = index.choose_again(start, GivenSelection(chosen))
    assert before == int(model[start : start + length].sum())
    assert int(again) == int(both.sum()) > 0
    model[start : start + length] = chosen
    assert_marks(index, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_reads_and_clear_leaves_zeros(dtype: torch.dtype) -> None:
    index, model = filled()
    flat = torch.randn(LENGTH).to(dtype)
    left, out = flat.clone(), flat.new_empty(index.numel)
    index.gather(left, out)
    assert torch.equal(out, flat[model]) and torch.equal(left, flat)
    left[model.nonzero()[::3]] = torch.nan
    index.clear(left)
    assert torch.equal(left, flat.masked_fill(model, 0.0))


RANGES = [
    [(0, 1)],
    [(5, 37), (64, 64), (70, 71), (1024, 2048), (3000, 3001)],
    [(31, 33), (BLOCK - 1, 3 * BLOCK + 1), (3 * BLOCK + 2, 3 * BLOCK + 3)],
    [(0, LENGTH)],
    [(17, 17)],
    [],
]


@pytest.mark.parametrize("ranges", RANGES, ids=str)
def test_flushed_ranges_are_sent_whole(ranges: list[tuple[int, int]]) -> None:
    index, model = filled()
    before = model.clone()
    flushed = index.flushed(ranges)
    for start, stop in ranges:
        model[start:stop] = True
    assert_marks(flushed, model)
    assert_marks(index, before)
    places = torch.arange(LENGTH)
    sent = torch.empty(flushed.numel, dtype=torch.int64)
    flushed.gather(places, sent)
    assert [(run.start, run.stop) for run in flushed.runs] == [r for r in ranges if r[0] < r[1]]
    for run in flushed.runs:
        assert isinstance(run, IndexRange)
        assert torch.equal(sent[run.values], places[run.start : run.stop])


@pytest.mark.parametrize("where", [(1024, 2048), (3000, 1500), (0, LENGTH)])
def test_a_later_choice_leaves_flushed_ranges_alone(where: tuple[int, int]) -> None:
    index, model = filled()
    flushed = index.flushed([(1024, 3072)])
    marked = model.clone()
    marked[1024:3072] = True
    shared = flushed.bits.words is index.bits.words
    start, length = where
    choose_randomly(index, model, start, min(length, LENGTH - start))
    assert_marks(flushed, marked)
    assert_marks(index, model)
    # A selection within the flushed range, as in every rolling step, copies nothing.
    inside = 1024 <= start and start + length <= 3072
    assert shared and (flushed.bits.words is index.bits.words) == inside


def test_rolling_parts_are_counted_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated selection of the same parts never asks the device."""
    parts = [(n * LENGTH // 7, (n + 1) * LENGTH // 7) for n in range(7)]
    index, model = BitmapIndex(LENGTH, CPU), torch.zeros(LENGTH, dtype=torch.bool)
    monkeypatch.setattr(BitmapIndex, "_count_on_device", lambda *_: pytest.fail("asked"))
    for _ in range(2):
        for start, stop in parts:
            flushed = index.flushed([(start, stop)])
            assert flushed.numel == int(model.sum() - model[start:stop].sum()) + stop - start
            choose_randomly(index, model, start, stop - start)
    assert_marks(index, model)


def test_packed_is_what_numpy_packs_and_comes_back() -> None:
    index, model = filled()
    again = BitmapIndex(LENGTH, CPU)
    for start, length in ((0, 1000), (1024, 3001), (4096, LENGTH - 4096)):
        packed = index.packed(start, length)
        assert np.array_equal(packed.numpy(), np.packbits(model[start : start + length].numpy()))
        again.load(start, length, packed)
    assert_marks(again, model)


def test_the_rest_goes_out_and_comes_back() -> None:
    index, model = filled()
    flat = torch.randn(LENGTH)
    for start, length in ((1024, 3001), (0, LENGTH)):
        part = slice(start, start + length)
        rest = torch.empty(length - index.count(start, length))
        index.gather_rest(flat, rest, start, length)
        assert torch.equal(rest, flat[part][~model[part]])
        other = torch.zeros(LENGTH)
        index.place_rest(rest, other, start, length)
        expected = torch.zeros(LENGTH)
        expected[part] = flat[part] * ~model[part]
        assert torch.equal(other, expected)


@pytest.mark.parametrize("rest", ["zero", "frozen"])
@pytest.mark.parametrize("rule", [AdamW(beta1=0.9, beta2=0.99, eps=1e-8), SGD(momentum=0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_sees_values_among_zeros_or_nothing_else(
    rest: Literal["zero", "frozen"], rule: AdamW | SGD, dtype: torch.dtype
) -> None:
    index, model = filled()
    values = torch.randn(index.numel).to(dtype)
    steps_accumulated = torch.randint(1, 5, (index.numel,)).float() if rest == "frozen" else None
    states = [torch.rand(LENGTH) for _ in range(1 + len(rule.moments))]
    dense = torch.zeros(LENGTH)
    dense[model] = values.float() * 0.5
    counts = torch.ones(LENGTH)
    if steps_accumulated is not None:
        counts[model] = steps_accumulated
    expected = [state.clone() for state in states]
    rule.apply(
        expected[0], dense, expected[1:], HYPER, counts if steps_accumulated is not None else None
    )
    found = [state.clone() for state in states]
    reduced = ReducedGrad(
        values=values, index=index, unselected=rest, steps_accumulated=steps_accumulated
    )
    index.apply(rule, reduced, found[0], found[1:], HYPER, factor=0.5)
    decayed = [states[0] * HYPER.shrink, *states[1:]]
    for mine, wanted, before in zip(found, expected, decayed, strict=True):
        if rest == "frozen":
            assert torch.equal(mine[~model], before[~model])
            wanted = torch.where(model, wanted, before)
        torch.testing.assert_close(mine, wanted)
        assert not torch.equal(mine, before)


@pytest.mark.parametrize("rule", [AdamW(beta1=0.9, beta2=0.99, eps=1e-8), SGD(momentum=0.9)])
@pytest.mark.parametrize("flush", [None, (CHUNK // 2 - 5000, CHUNK + 777)])
def test_frozen_entries_of_a_long_bucket_are_updated_piece_by_piece(
    rule: AdamW | SGD, flush: tuple[int, int] | None
) -> None:
    """One piece has no selected entry, and one piece only gradients of a single step."""
    length = 2 * CHUNK + 4096
    model = torch.rand(length) < 0.4
    model[CHUNK : CHUNK * 3 // 2] = False
    base = BitmapIndex(length, CPU)
    base.choose(0, GivenSelection(model))
    index: BitmapIndex | FlushedBitmapIndex = base
    if flush is not None:
        index = base.flushed([flush])
        model = model.clone()
        model[slice(*flush)] = True
    steps_accumulated = torch.randint(1, 5, (index.numel,)).float()
    steps_accumulated[: int(model[: CHUNK // 2].sum())] = 1.0
    values = torch.randn(index.numel)
    states = [torch.rand(length) for _ in range(1 + len(rule.moments))]
    alone = [state[model] for state in states]
    rule.apply(alone[0], values * 0.5, alone[1:], HYPER, steps_accumulated)
    found = [state.clone() for state in states]
    reduced = ReducedGrad(
        values=values, index=index, unselected="frozen", steps_accumulated=steps_accumulated
    )
    index.apply(rule, reduced, found[0], found[1:], HYPER, factor=0.5)
    decayed = [states[0] * HYPER.shrink, *states[1:]]
    for mine, wanted, before in zip(found, alone, decayed, strict=True):
        # In one go and in pieces: equal but for the rounding of scalar tails.
        torch.testing.assert_close(mine[model], wanted, rtol=1e-6, atol=1e-7)
        assert torch.equal(mine[~model], before[~model])
        assert not torch.equal(mine[model], before[model])


def test_memory_is_a_fifth_of_a_byte_for_each_entry_at_most() -> None:
    length = 40 * CHUNK
    index = BitmapIndex(length, CPU)
    index.choose(0, draw_seeded(length, length // 2, seed=1, step=1, name="w"))
    flushed = index.flushed([(n * CHUNK, n * CHUNK + CHUNK // 50) for n in range(40)])
    bits = flushed.bits
    assert bits.patch is not None and bits.patches is not None
    own = (bits.counts, bits.offsets, bits.patch, bits.patches)
    assert index.nbytes <= 0.15 * length
    assert index.nbytes + sum(tensor.nbytes for tensor in own) <= 0.2 * length
