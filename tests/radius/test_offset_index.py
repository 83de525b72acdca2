"""The index of offsets against booleans over the whole bucket, across chunks and slices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
import torch

from megatron.data_parallel.reducer import ReducedGrad
from megatron.optimizer.update_rules import SGD, AdamW, Hyper, UpdateRule
from megatron.sparse.selection import CHUNK
from radius.offset_index import OffsetIndex

LENGTHS = [64, 1024, CHUNK, CHUNK + 64, 2 * CHUNK + 4096]
ADAMW = AdamW(beta1=0.9, beta2=0.99, eps=1e-8)
HYPER = Hyper(t=3, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Chosen:
    """A selection that is written down."""

    mask: torch.Tensor

    @property
    def n(self) -> int:
        return self.mask.numel()

    @property
    def count(self) -> int:
        return int(self.mask.sum())

    def positions(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        found = self.mask[start:stop]
        assert found.numel() <= CHUNK, "asked for chunk by chunk"
        return found.nonzero().view(-1).int()


def filled(length: int, seed: int = 0, block: int = 1) -> tuple[OffsetIndex, torch.Tensor]:
    """An index in which about 0.4 of two slices are chosen, in blocks, with a gap between the
    slices; and as booleans."""
    index, chosen = OffsetIndex(length), torch.zeros(length, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    for start, stop in ((0, length // 3), (length // 3 + 7, length)):
        blocks = torch.rand(-(-(stop - start) // block), generator=generator) < 0.4
        mask = blocks.repeat_interleave(block)[: stop - start]
        index.choose(start, Chosen(mask))
        chosen[start:stop] = mask
    return index, chosen


def mask_of(index: OffsetIndex) -> torch.Tensor:
    positions = torch.empty(index.numel, dtype=torch.int64)
    index.gather(torch.arange(index.length), positions)
    assert bool((positions[1:] > positions[:-1]).all()), "ascending"
    found = torch.zeros(index.length, dtype=torch.bool)
    found[positions] = True
    return found


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1, 64])
def test_gather_and_clear_are_those_of_booleans(
    length: int, dtype: torch.dtype, block: int
) -> None:
    index, chosen = filled(length, block=block)
    assert all(piece.in_runs == (block > 1) for piece in index.pieces)
    flat = torch.randn(length).to(dtype)
    out = torch.empty(index.numel, dtype=dtype)
    index.gather(flat, out)
    assert torch.equal(out, flat[chosen])
    wanted = flat.masked_fill(chosen, 0.0)
    flat[chosen.nonzero()[::3]] = torch.nan
    index.clear(flat)
    assert torch.equal(flat, wanted)


def test_an_index_in_which_nothing_is_chosen_sends_nothing() -> None:
    index = OffsetIndex(128)
    flat = torch.randn(128)
    index.gather(flat, torch.empty(0))
    assert index.numel == index.nbytes == 0 and not index.runs
    weight = torch.ones(128)
    reduced = ReducedGrad(values=torch.empty(0), index=index, unselected="frozen")
    index.apply(SGD(momentum=0.9), reduced, weight, [torch.zeros(128)], HYPER, factor=1.0)
    assert torch.equal(weight, torch.full((128,), HYPER.shrink))


@pytest.mark.parametrize("length", LENGTHS)
def test_choosing_again_replaces_that_range_alone(length: int) -> None:
    index, chosen = filled(length)
    start, stop = length // 4, length - 5
    mask = torch.rand(stop - start) < 0.2
    index.choose(start, Chosen(mask))
    chosen[start:stop] = mask
    assert torch.equal(mask_of(index), chosen)
    assert index.numel == int(chosen.sum()) and index.nbytes == 4 * index.numel


@pytest.mark.parametrize("length", LENGTHS)
def test_packed_counted_and_loaded_by_range(length: int) -> None:
    index, chosen = filled(length)
    for start, stop in ((0, length), (8, length - 3), (length // 2 + 1, length)):
        packed = index.packed(start, stop - start)
        assert np.array_equal(packed.numpy(), np.packbits(chosen[start:stop].numpy()))
        other, _ = filled(length, seed=1)
        other.load(start, stop - start, packed)
        assert torch.equal(mask_of(other)[start:stop], chosen[start:stop])
        assert other.count(start, stop - start) == int(chosen[start:stop].sum())


@pytest.mark.parametrize("length", LENGTHS)
def test_the_rest_goes_out_and_comes_back(length: int) -> None:
    index, chosen = filled(length)
    flat = torch.randn(length)
    start, stop = 3, length - 9
    rest = torch.empty(stop - start - index.count(start, stop - start))
    index.gather_rest(flat, rest, start, stop - start)
    assert torch.equal(rest, flat[start:stop][~chosen[start:stop]])
    target = torch.full((length,), 7.0)
    index.place_rest(rest, target, start, stop - start)
    inside = torch.zeros_like(chosen)
    inside[start:stop] = True
    assert torch.equal(target, torch.where(inside & ~chosen, flat, 7.0))
    index.clear_part(flat, start, stop - start)
    assert not flat[inside & chosen].any() and flat[~inside].all()


RANGES = [
    lambda n: [],
    lambda n: [(0, n)],
    lambda n: [(5, 5), (9, 30), (30, n // 2), (n - 20, n)],
    lambda n: [(n // 5, n // 5 + 1), (n // 3, n - 1)],
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("ranges_of", RANGES)
def test_flushed_ranges_are_sent_whole_beside_what_is_chosen(length: int, ranges_of) -> None:  # noqa: ANN001
    index, chosen = filled(length)
    ranges = ranges_of(length)
    flushed = index.flushed(ranges)
    for start, stop in ranges:
        chosen[start:stop] = True
    # What is chosen later does not change it.
    index.choose(0, Chosen(torch.ones(length, dtype=torch.bool)[: length // 2]))
    flat = torch.randn(length)
    values = torch.empty(flushed.numel)
    flushed.gather(flat, values)
    assert torch.equal(values, flat[chosen])
    assert [(run.start, run.stop) for run in flushed.runs] == [r for r in ranges if r[0] < r[1]]
    for run in flushed.runs:
        assert torch.equal(values[run.values], flat[run.start : run.stop])
    flushed.clear(flat)
    assert not flat[chosen].any() and flat[~chosen].all()


@pytest.mark.parametrize("length", [64, CHUNK + 64])
def test_any_part_is_expanded_beside_many_flushed_ranges(length: int) -> None:
    index, chosen = filled(length)
    ranges = [(first, first + length // 16) for first in range(3, length - 7, length // 8)]
    flushed = index.flushed(ranges)
    for start, stop in ranges:
        chosen[start:stop] = True
    flat = torch.randn(length)
    values = torch.empty(flushed.numel)
    flushed.gather(flat, values)
    dense = torch.where(chosen, flat, 0.0)
    edges = sorted({0, 1, length, *(min(e + d, length) for r in ranges for e in r for d in (0, 5))})
    for start, stop in combinations(edges, 2):
        found = flushed.expand(values, start, stop, scale=2.0)
        assert torch.equal(found, 2.0 * dense[start:stop]), (start, stop)


def states(length: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(length, generator=generator) + 0.1 for _ in range(1 + count)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize("rule", [ADAMW, SGD(momentum=0.9)], ids=["adamw", "sgd"])
def test_zero_elsewhere_is_the_rule_on_zeros_with_the_values_among_them(
    length: int, dtype: torch.dtype, factor: float, rule: UpdateRule
) -> None:
    index, chosen = filled(length)
    values = torch.randn(index.numel).to(dtype)
    grad = torch.zeros(length)
    grad[chosen] = values.float() * factor
    (weight, *moments), (wanted, *wanted_moments) = (
        states(length, len(rule.moments)) for _ in range(2)
    )
    reduced = ReducedGrad(values=values, index=index, unselected="zero")
    index.apply(rule, reduced, weight, moments, HYPER, factor=factor)
    for start in range(0, length, CHUNK):
        cut = slice(start, start + CHUNK)
        rule.apply(wanted[cut], grad[cut], [m[cut] for m in wanted_moments], HYPER)
    for found, expected in zip([weight, *moments], [wanted, *wanted_moments], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("rule", [ADAMW, SGD(momentum=0.9)], ids=["adamw", "sgd"])
def test_frozen_elsewhere_is_the_rule_on_the_sent_entries_alone(
    length: int, dtype: torch.dtype, counted: bool, rule: UpdateRule
) -> None:
    base, chosen = filled(length)
    index = base.flushed([(length // 3, length // 2)])
    chosen[length // 3 : length // 2] = True
    values = torch.randn(index.numel).to(dtype)
    steps_accumulated = torch.randint(1, 9, (index.numel,)).float() if counted else None
    (weight, *moments), (old, *old_moments) = (states(length, len(rule.moments)) for _ in range(2))
    # In one go and gathered: equal but for the rounding of scalar tails.
    alone, *alone_moments = (state[chosen] for state in (old, *old_moments))
    rule.apply(alone, values.float() * 0.37, alone_moments, HYPER, steps_accumulated)
    reduced = ReducedGrad(
        values=values, index=index, unselected="frozen", steps_accumulated=steps_accumulated
    )
    index.apply(rule, reduced, weight, moments, HYPER, factor=0.37)
    decayed = [old * HYPER.shrink, *old_moments]
    pairs = zip([weight, *moments], [alone, *alone_moments], decayed, strict=True)
    for found, expected, before in pairs:
        torch.testing.assert_close(found[chosen], expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(found[~chosen], before[~chosen])


@pytest.mark.parametrize(("start", "length"), [(0, 3000), (1, 30), (995, 2005)])
def test_entries_chosen_again_are_counted(start: int, length: int) -> None:
    index, before = filled(3000)
    mask = torch.rand(length) < 0.5
    both = before[start : start + length] & mask
    count, again = index.choose_again(start, Chosen(mask))
    assert count == int(before[start : start + length].sum())
    assert again == int(both.sum()) > 0
    before[start : start + length] = mask
    assert torch.equal(mask_of(index), before)
