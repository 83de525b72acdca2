"""Blends draw by Megatron's rule, and every draw exists."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest

from megatron.data.blended_dataset import (
    BlendedDataset,
    blend_order,
    count_draws,
    number_draws,
    part_sizes,
)
from megatron.data.build import MockDataset
from tests.calls import count_calls

# Computed by build_blending_indices of Megatron's helpers.cpp.
GOLDEN_START = [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
GOLDEN_HASH = "a019dc2d0e2fa21b"


def _greedy(weights: list[float], draws: int) -> tuple[list[int], list[int]]:
    """The rule as written: the largest w_i * max(s, 1) - count_i, the lowest i of equals."""
    counts = [0] * len(weights)
    order, numbers = [], []
    for draw in range(draws):
        errors = [
            weight * max(draw, 1) - count for weight, count in zip(weights, counts, strict=True)
        ]
        best = errors.index(max(errors))
        order.append(best)
        numbers.append(counts[best])
        counts[best] += 1
    return order, numbers


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 16, 17, 40])
@pytest.mark.parametrize("even", [True, False])
def test_order_is_the_greedy_rule(parts: int, even: bool) -> None:
    rng = np.random.default_rng(parts)
    shares = rng.integers(1, 3, parts).astype(float) if even else rng.random(parts) ** 4
    weights = (shares / shares.sum()).tolist()
    order, numbers = _greedy(weights, 1500)
    drawn = blend_order(weights, 1500)
    assert drawn.dtype == np.int16 and drawn.tolist() == order
    assert number_draws(drawn, parts).dtype == np.int64
    assert number_draws(drawn, parts).tolist() == numbers


def test_draws_are_counted_without_a_copy_of_the_index() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 5, 3_000_000).astype(np.int16)
    tracemalloc.start()
    counts = count_draws(drawn, 7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts.tolist() == [int((drawn == part).sum()) for part in range(7)]
    assert peak < drawn.nbytes


def test_order_is_the_one_that_megatron_computes() -> None:
    drawn = blend_order([0.5, 0.3, 0.2], 1000)
    assert drawn[:20].tolist() == GOLDEN_START
    assert hashlib.sha256(drawn.astype("<i8").tobytes()).hexdigest()[:16] == GOLDEN_HASH


def test_shares_stay_within_one_sample_of_their_due() -> None:
    weights = [0.31, 0.27, 0.2, 0.12, 0.1]
    drawn = blend_order(weights, 20_000)
    for part, weight in enumerate(weights):
        counts = np.cumsum(drawn == part)
        assert np.abs(counts - weight * np.arange(1, 20_001)).max() < 2


def test_part_sizes_round_up_twice() -> None:
    assert part_sizes([0.7, 0.3], 1001) == ([705, 303], 1002)
    assert part_sizes([1.0], 10) == ([11], 10)


def test_a_part_too_short_for_its_draws_is_refused_at_once() -> None:
    drawn = blend_order([0.5, 0.5], 100)
    parts = [MockDataset(n, sequence_length=4, vocab_size=9, seed=0) for n in (50, 49)]
    with pytest.raises(AssertionError, match="50 samples wanted of a part with 49"):
        BlendedDataset(parts, dataset_index=drawn, sample_index=number_draws(drawn, 2))


def test_items_come_from_their_parts() -> None:
    parts = [MockDataset(80, sequence_length=4, vocab_size=99, seed=seed) for seed in (1, 2)]
    drawn = blend_order([0.75, 0.25], 100)
    numbers = number_draws(drawn, 2)
    blend = BlendedDataset(parts, dataset_index=drawn, sample_index=numbers)
    assert len(blend) == 100
    for index in (0, 17, 99):
        assert (blend[index] == parts[drawn[index]][int(numbers[index])]).all()
    with pytest.raises(IndexError):
        blend[100]


def test_draws_of_a_few_parts_call_no_functions() -> None:
    """The order of 1e7 draws takes seconds as long as no draw calls a function."""
    with count_calls() as calls:
        blend_order([0.31, 0.27, 0.2, 0.12, 0.1], 20_000)
    assert calls() < 100
