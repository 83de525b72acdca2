"""Smoothing, thinning, axes and their labels."""

from __future__ import annotations

import math

import pytest

from megatron.report.drawing import (
    Series,
    chart,
    counted,
    linear_axis,
    log_axis,
    plain,
    smooth,
    smoothing_window,
    span_axis,
    thin,
    traffic,
)


def test_smoothing_keeps_a_straight_line_and_steps_over_nan() -> None:
    line = [float(i) for i in range(100)]
    assert smooth(line, 9)[:95] == pytest.approx(line[:95])
    assert smooth([1.0, math.nan, 3.0], 3) == [1.0, 2.0, 3.0]
    assert math.isnan(smooth([math.nan], 3)[0])
    assert smoothing_window(30) == 1 and smoothing_window(2000) % 2 == 1


def test_thinning_keeps_spikes_ends_and_order() -> None:
    ys = [1.0] * 100_000
    ys[54_321], ys[777] = 99.0, -99.0
    xs, kept = thin(range(100_000), ys)
    assert len(xs) <= 1001 and xs == sorted(xs)
    assert kept[xs.index(54_321)] == 99.0 and kept[xs.index(777)] == -99.0
    gap = [1.0] * 5000 + [math.nan] * 5000
    assert any(math.isnan(y) for y in thin(range(10_000), gap)[1])
    assert thin([1.0, 2.0], [3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])


@pytest.mark.parametrize(
    ("low", "high"), [(2.9, 10.8), (0, 6e-4), (-3, 5), (7, 7), (0, 0), (1e-300, 1e300), (-2, -2)]
)
def test_linear_axis_holds_its_data_between_round_ticks(low: float, high: float) -> None:
    for from_zero in (False, True):
        axis = linear_axis([low, math.nan, high], ticks=5, from_zero=from_zero)
        assert axis.low <= low and high <= axis.high and axis.low < axis.high
        assert 2 <= len(axis.ticks) <= 9
        assert axis.position(axis.low) == 0 and axis.position(axis.high) == 1
        assert not from_zero or axis.low <= 0 <= axis.high


def test_counts_have_no_fractional_ticks() -> None:
    assert linear_axis([0, 1], ticks=5, from_zero=True, whole=True).ticks == (0, 1)


def test_other_axes() -> None:
    axis = log_axis([0.0, 3.0, 4000.0, math.nan])
    assert axis.low <= 3 and axis.high >= 4000 and {10.0, 100.0, 1000.0} <= set(axis.ticks)
    assert len(log_axis([1e-12, 1e12]).ticks) <= 8
    assert log_axis([]).low > 0
    assert span_axis(1, 2000, ticks=6).ticks == (500, 1000, 1500, 2000)
    assert span_axis(5, 5, ticks=6).ticks


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (plain(0.0), "0"),
        (plain(0.30000000000000004), "0.3"),
        (plain(1.5e-4), "1.5e-4"),
        (plain(2e7), "2e7"),
        (plain(-4.0), "-4"),
        (counted(1500), "1.5k"),
        (counted(20_000_000), "20M"),
        (traffic(2_500_000), "2.5 MB"),
        (traffic(0), "0 B"),
    ],
)
def test_labels(text: str, wanted: str) -> None:
    assert text == wanted


def test_line_is_broken_at_nan_and_a_lone_point_is_seen() -> None:
    ys = [1.0, 2.0, math.nan, 3.0, math.nan, 4.0, 5.0]
    svg = chart("t", [Series(label="", x=range(7), y=ys, color="#000000")])
    path = svg.split('<path d="')[1].split('"')[0]
    assert path.count("M") == 3 and svg.count("<circle") == 1
