"""Charts: smoothing, axes and their labels, and what a picture shows of a curve."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.report.drawing import Chart, Series, as_svg, smooth, smoothing_window, write_png


def _svg(y: list[float], **options: Any) -> str:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    curve = Series(x=range(1, len(y) + 1), y=y, color="#2563eb")
    return as_svg(Chart("A chart", [curve], **options))


def _labels(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def _curve(svg: str) -> str:
    """Return the path of the blue line."""
    found = re.search(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: #2563eb', svg)
    assert found is not None
    return found[1]


def test_smoothing_keeps_a_straight_line_and_steps_over_nan() -> None:
    line = [float(i) for i in range(100)]
    assert smooth(line, 9)[:95] == pytest.approx(line[:95])
    assert smooth([1.0, math.nan, 3.0], 3) == [1.0, 2.0, 3.0]
    assert math.isnan(smooth([math.nan], 3)[0])
    assert smoothing_window(30) == 1 and smoothing_window(2000) % 2 == 1


@pytest.mark.parametrize("count", [1, 3, 8, 9, 10, 100])
def test_a_mean_is_over_its_own_window_beside_a_huge_value_too(count: int) -> None:
    values = [1e17 if i == 30 else math.nan if i == 60 else float(i) for i in range(count)]
    for window in (1, 3, 9):
        for i, mean in enumerate(smooth(values, window)):
            half = min(window // 2, i)
            inside = [v for v in values[i - half : i + half + 1] if math.isfinite(v)]
            wanted = math.fsum(inside) / len(inside) if inside else math.nan
            assert mean == pytest.approx(wanted, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    ("y", "options", "ticks"),
    [
        ([0.0, 0.3], {}, ["0", "0.1", "0.2", "0.3"]),
        ([1e-5, 3e-5], {}, ["0", "1e-05", "2e-05", "3e-05"]),
        ([7.0, 7.0], {"from_zero": False}, ["6", "6.5", "7", "7.5", "8"]),
        ([-3.0, math.nan, 5.0], {}, ["-4", "-2", "0", "2", "4", "6"]),
        ([0.0, 0.0], {"unit": "B"}, ["0 B", "1 B"]),
        ([1500.0, 20_000.0], {"unit": ""}, ["0", "5k", "10k", "15k", "20k"]),
        ([2.5e6, 1e6], {"unit": "B"}, ["0 B", "500 kB", "1 MB", "1.5 MB", "2 MB", "2.5 MB"]),
        ([0.3, 0.0, math.inf, 0.32], {"log": True}, ["0.2", "0.5"]),
        ([1e-6, 1e6], {"log": True}, ["1e-06", "0.0001", "0.01", "1", "100", "10000", "1000000"]),
        ([math.nan, math.nan], {}, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_the_vertical_axis_spans_the_values_between_round_ticks(
    y: list[float], options: dict[str, Any], ticks: list[str]
) -> None:
    labels = _labels(_svg(y, **options))
    assert labels[labels.index("iteration") + 1 : labels.index("A chart")] == ticks


@pytest.mark.parametrize("y", [[1e300, -1e300], [1e-300, 1e300], [-2.0, -2.0], []])
@pytest.mark.parametrize("log", [False, True])
def test_extreme_values_are_drawn(y: list[float], log: bool) -> None:
    svg = _svg(y, log=log)
    assert "A chart" in _labels(svg) and "nan" not in svg


def test_line_is_broken_at_nan_and_a_lone_point_is_seen() -> None:
    svg = _svg([1.0, 2.0, math.nan, 3.0, math.nan, 4.0, 5.0])
    assert _curve(svg).count("M") == 3
    dots = re.findall(r'<use [^>]*style="fill: #2563eb', svg)
    assert len(dots) == 1


def test_a_long_curve_is_thinned_and_keeps_its_spikes() -> None:
    y = [1.0 + 0.001 * (i % 7) for i in range(100_000)]
    y[54_321], y[777] = 99.0, -99.0
    path = _curve(_svg(y))
    heights = [float(height) for height in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)]
    assert 4 <= len(heights) < 3000
    # The limits of the axis are 100 and -100; SVG counts downwards.
    assert max(heights) - min(heights) > 0.98 * 0.5 * 201.6
    low, high = heights.index(max(heights)), heights.index(min(heights))
    assert low < high


def test_marked_points_tell_their_values_and_marks_are_named() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    curve = Series(x=[5, 10], y=[2.5, 1.25], color="#2563eb", markers=True, label="a$b$ <i>")
    chart = Chart("T", [curve], marks=[7], mark_label="NaN")
    svg = as_svg(chart)
    assert re.findall("<title>(.*?)</title>", svg) == ["5: 2.5", "10: 1.25"]
    assert {"a$b$ &lt;i&gt; 1.25", "NaN"} <= set(_labels(svg))
    assert "NaN" not in _labels(as_svg(chart.after(8)))


def test_pictures_are_the_same_each_time_and_name_nothing_twice(tmp_path: Path) -> None:
    svg = _svg([3.0, 2.0])
    assert svg == _svg([3.0, 2.0])
    names = re.findall(r'\bid="([^"]*)"', svg)
    assert len(names) == len(set(names)) and all(f"#{name}" in svg for name in names)
    chart = Chart("T", [Series(x=[1], y=[1.0], color="#2563eb")])
    for name in ("a.png", "b.png"):
        write_png(chart, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_names_that_the_font_cannot_draw_and_long_ones_are_no_trouble() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    names = ["\u8a13\u7df4", "x\x01\udcff", "n" * 120]
    curves = [Series(x=[1, 2], y=[1, 2], color="#2563eb", label=name) for name in names]
    labels = _labels(as_svg(Chart(" / ".join(names), curves)))
    assert f"{names[0]} 2" in labels
    assert max(map(len, labels)) <= 52
