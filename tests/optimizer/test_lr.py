"""Schedules against values worked out by hand from Megatron's formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.optimizer.lr import LearningRate, WeightDecay


def rate(style: str, **changes: Any) -> LearningRate:
    settings: dict[str, Any] = {
        "max_lr": 1.0,
        "min_lr": 0.1,
        "warmup_init": 0.0,
        "warmup_samples": 100,
        "decay_samples": 1100,
        "style": style,
    }
    return LearningRate(**(settings | changes))


@pytest.mark.parametrize("style", ["linear", "cosine", "constant", "inverse-square-root"])
def test_warmup_is_linear_and_starts_at_its_first_value(style: str) -> None:
    schedule = rate(style, warmup_init=0.2)
    assert schedule.at(0) == 0.2
    assert schedule.at(50) == pytest.approx(0.6)
    assert schedule.at(100) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("style", "middle"),
    [
        ("linear", 0.55),
        ("cosine", 0.55),
        ("constant", 1.0),
        ("inverse-square-root", math.sqrt(100 / 600)),
    ],
)
def test_half_way_down(style: str, middle: float) -> None:
    assert rate(style).at(600) == pytest.approx(middle)


def test_quarter_of_the_cosine() -> None:
    expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert rate("cosine").at(350) == pytest.approx(expected)


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root"])
def test_after_the_decay_the_rate_is_the_least(style: str) -> None:
    assert rate(style).at(1101) == 0.1
    assert rate(style).at(10**9) == 0.1


@pytest.mark.parametrize(
    ("style", "half"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * 0.5**0.5 - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_is_flat_then_falls(style: str, half: float) -> None:
    schedule = rate("WSD", wsd_decay_samples=200, wsd_style=style)
    assert schedule.at(101) == schedule.at(900) == 1.0
    assert schedule.at(1000) == pytest.approx(0.1 + 0.9 * half)
    assert schedule.at(1100) == pytest.approx(0.1)


def test_multi_step_takes_the_factor_of_the_last_step_that_has_begun() -> None:
    """The schedule of the WRN runs of Sohoni et al. (2019, table 5), by epochs of 50,000."""
    epoch = 50_000
    steps = ((60 * epoch, 0.2), (120 * epoch, 0.4), (160 * epoch, 0.08))
    schedule = rate("multi-step", max_lr=0.1, min_lr=0.0, warmup_samples=0, steps=steps)
    # Samples before the first and before the last update of each span.
    for first, last, expected in (
        (0, 60, 0.1),
        (60, 120, 0.02),
        (120, 160, 0.04),
        (160, 200, 0.008),
    ):
        assert schedule.at(first * epoch) == pytest.approx(expected)
        assert schedule.at(last * epoch - 100) == pytest.approx(expected)


def test_multi_step_warms_up_and_keeps_above_the_least() -> None:
    schedule = rate("multi-step", steps=((200, 0.5), (300, 0.01)))
    assert schedule.at(50) == 0.5
    assert [schedule.at(n) for n in (101, 199, 200, 299, 300, 10**6)] == [1, 1, 0.5, 0.5, 0.1, 0.1]


def test_no_warmup_starts_at_the_top_and_never_divides_by_zero() -> None:
    for style in ("linear", "cosine", "inverse-square-root"):
        assert rate(style, warmup_samples=0).at(0) == pytest.approx(1.0)
    assert rate("cosine", warmup_samples=100, decay_samples=100).at(100) == pytest.approx(1.0)


def test_weight_decay_rises_over_the_run() -> None:
    def decay(style: str) -> WeightDecay:
        return WeightDecay(start=0.0, end=0.1, total_samples=1000, style=style)

    assert decay("constant").at(0) == 0.1
    assert [decay("linear").at(n) for n in (0, 500, 1000, 2000)] == pytest.approx(
        [0.0, 0.05, 0.1, 0.1]
    )
    assert [decay("cosine").at(n) for n in (0, 500, 1000)] == pytest.approx([0.0, 0.05, 0.1])
