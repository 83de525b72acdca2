"""Tests of when and how much to rewire: Table 5 of the low-memory report and its network."""

from __future__ import annotations

from fractions import Fraction

import pytest

from samo.schedule import (
    CONSTANT,
    FRACTION,
    RewiringSchedule,
    is_prunable,
    target_of,
    until_of,
    why_none,
    why_too_many,
)

WIDE_RESNET = [(16, 32), *[(32, 32)] * 7, (32, 64), *[(64, 64)] * 7, (64, 128), *[(128, 128)] * 7]
"""Channels in and out of the 3 x 3 convolutions of a WRN-28-2 after the first."""


@pytest.mark.parametrize(
    ("updates", "periods"),
    [
        (100_000, {12_500: 100, 40_000: 200, 70_000: 400, 95_000: 800}),
        (50_000, {6_250: 100, 20_000: 200, 35_000: 400, 47_500: 800}),
    ],
)
def test_widening_is_the_schedule_of_the_papers(updates: int, periods: dict[int, int]) -> None:
    schedule = RewiringSchedule(interval=100, until=until_of(updates))
    expected, begin = [], 0
    for end, interval in periods.items():
        expected += [t for t in range(begin + 1, end + 1) if t % interval == 0]
        begin = end
    assert [t for t in range(updates + 1) if schedule.due(t)] == expected
    assert schedule.last == expected[-1]


@pytest.mark.parametrize(
    ("frequency", "intervals"),
    [
        (0.125, (800, 1600, 3200, 6400)),
        (0.25, (400, 800, 1600, 3200)),
        (0.5, (200, 400, 800, 1600)),
        (2, (50, 100, 200, 400)),
        (3, (33, 67, 133, 267)),
        (1000, (1, 1, 1, 1)),
    ],
)
def test_frequency_divides_every_interval(
    frequency: float, intervals: tuple[int, int, int, int]
) -> None:
    """Tables 8 and 9 name frequencies; an interval is rounded, and at least 1."""
    schedule = RewiringSchedule(interval=100, until=95_000, frequency=frequency)
    expected, begin = [], 0
    for end, interval in zip((12_500, 40_000, 70_000, 95_000), intervals, strict=True):
        expected += [t for t in range(begin + 1, end + 1) if t % interval == 0]
        begin = end
    assert [t for t in range(100_001) if schedule.due(t)] == expected


def test_periods_are_data() -> None:
    schedule = RewiringSchedule(interval=2, until=40, periods=((1, 1), (2, 5)))
    assert [t for t in range(60) if schedule.due(t)] == [*range(2, 21, 2), 30, 40]


def test_a_constant_interval_counts_each_multiple() -> None:
    schedule = RewiringSchedule(interval=7, until=30, periods=CONSTANT)
    assert [t for t in range(100) if schedule.due(t)] == [7, 14, 21, 28]
    assert schedule.last == 28
    assert schedule.any_due(8, 14) and not schedule.any_due(8, 13) and not schedule.any_due(29, 99)
    assert RewiringSchedule(interval=7, until=6).last == 0


def test_target_is_the_number_that_the_fraction_comes_from() -> None:
    assert target_of(Fraction(str(FRACTION)), [9 * a * b for a, b in WIDE_RESNET]) == 20_000
    assert target_of(Fraction(1, 100), [3, 4]) == 1


def test_a_target_that_cannot_be_reached_is_refused() -> None:
    default = Fraction(str(FRACTION))
    assert why_too_many(default, [400_000, 600_000], 13_781) == ""
    refusal = why_too_many(default, [400_000, 600_000], 10_002)
    assert "dsr_fraction 0.0137787: a rewiring cannot move 13779 of 1000000 entries" in refusal
    assert "10002 are stored" in refusal and refusal.endswith("--dsr-fraction 0.005 would do")
    assert why_too_many(Fraction("0.005"), [400_000, 600_000], 10_002) == ""
    crowded = why_too_many(default, [400_000, 600_000], 990_000)
    assert crowded.endswith("--dsr-fraction 0.005 would do")
    assert why_too_many(default, [400_000, 600_000], 986_000) == ""


@pytest.mark.parametrize(
    ("name", "dense", "pruned"),
    [
        ("layers.0.attention.query_key_value.weight", (), True),
        ("layers.0.attention.query_key_value.weight", ("*.attention.*",), False),
        ("layers.0.mlp.dense_h_to_4h.weight", ("*.attention.*",), True),
        ("layers.0.mlp.dense_h_to_4h.weight", ("layers.[1-9].*", "layers.0.mlp.*"), False),
        ("layers.0.mlp.dense_h_to_4h.weight", ("LAYERS.*", "mlp"), True),
        ("conv1.weight", ("conv?.weight",), False),
    ],
)
def test_patterns_leave_tensors_whole(name: str, dense: tuple[str, ...], pruned: bool) -> None:
    assert is_prunable(name, (4, 3, 2, 2), keep_embeddings=False, dense=dense) is pruned
    assert not is_prunable(name, (4,), keep_embeddings=False, dense=dense)


@pytest.mark.parametrize(
    ("name", "is_table"),
    [
        ("embedding.word_embeddings.weight", True),
        ("embedding.position_embeddings.weight", True),
        ("decoder.embed_tokens.weight", True),
        ("layers.0.mlp.dense_h_to_4h.weight", False),
        ("output_layer.weight", False),
    ],
)
def test_embeddings_of_all_models_can_stay_whole(name: str, is_table: bool) -> None:
    assert is_prunable(name, (8, 4), keep_embeddings=False)
    assert is_prunable(name, (8, 4), keep_embeddings=True) is not is_table


def test_a_run_without_a_rewiring_is_told_what_would_help() -> None:
    assert why_none(RewiringSchedule(interval=200, until=1000), 1, 1100) == ""
    short = why_none(RewiringSchedule(interval=200, until=95), 1, 100)
    assert "dsr_interval 200: the network is rewired after no update from 1 to 95" in short
    assert short.endswith("--dsr-interval 12 would do")
    assert RewiringSchedule(interval=12, until=95).any_due(1, 100)
    assert not RewiringSchedule(interval=25, until=95).any_due(1, 100)
    # With three updates in all, any interval has doubled before it is over.
    assert why_none(RewiringSchedule(interval=5, until=3), 1, 3).endswith("train for longer")
    over = why_none(RewiringSchedule(interval=10, until=95), 100, 200)
    assert over.startswith("dsr_until 95 is before update 100")
