"""The charts of a report, and the form of each quantity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from megatron.metrics.logger import PER_SECOND
from megatron.report.drawing import (
    Series,
    TickFormat,
    chart,
    counted,
    plain,
    smooth,
    smoothing_window,
    traffic,
)
from megatron.report.runs import RunData

BLUE, ORANGE, GREEN, PURPLE, RED, TEAL = (
    "#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2",
)  # fmt: skip
LONG_RUN = 100
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL)


def run_charts(run: RunData) -> list[str]:
    """All charts of one run as SVG; empty where no step is recorded."""
    if not run.iterations:
        return []
    charts = [loss_chart(run)]
    if len(run.iterations) >= LONG_RUN:
        charts.append(loss_chart(run, after=run.iterations[len(run.iterations) // 5 - 1]))
    charts += [_mean_chart(run, name) for name in run.means]
    charts += [
        _plain(run, "Learning rate", "lr"),
        _smoothed(run, "Gradient norm", "grad_norm", log=_is_wild(run, "grad_norm")),
        _smoothed(run, f"{run.unit.capitalize()} per second", PER_SECOND, tick_format=counted),
        _step_time_chart(run),
        _smoothed(run, "Bytes sent per step, one rank", "bytes_sent", tick_format=traffic),
        _memory_chart(run),
    ]
    if any(skipped > 0 for skipped in run.steps["skipped"]):
        charts.append(_skipped_chart(run))
    scales = {scale for scale in run.steps["loss_scale"] if math.isfinite(scale)}
    if len(scales) > 1:
        charts.append(_plain(run, "Loss scale", "loss_scale", log=True, tick_format=counted))
    if any(density < 1 for density in run.steps["density"]):
        charts.append(_smoothed(run, "Density of the gradient exchange", "density"))
    charts += [_path_chart(name, points) for name, points in run.path.items()]
    if any(wait > 0 for wait in run.steps["wait_seconds"]):
        charts.append(_waiting_chart(run))
    return charts


def loss_chart(run: RunData, *, after: int | None = None) -> str:
    """Training loss with its running mean, the validation points, and marks at NaN steps.

    `after` leaves out the steps up to that one, so that the slow end of a run can be seen.
    """
    series = _with_mean(run, run.steps["loss"], color=BLUE, label="training")
    series += _validation(run, label="validation", color=ORANGE)
    losses = zip(run.iterations, run.steps["loss"], strict=True)
    bad = [i for i, loss in losses if not math.isfinite(loss)]
    title = "Loss"
    if after is not None:
        title = f"Loss after iteration {after:,}"
        series = [s.after(after) for s in series]
        bad = [i for i in bad if i > after]
    return chart(title, series, marks=bad, mark_label="NaN or infinite")


def comparison_charts(runs: Sequence[RunData], labels: Sequence[str]) -> list[str]:
    """The losses of several runs in one chart, then without the beginning; validation is dashed."""
    series: list[Series] = []
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        color = PALETTE[i % len(PALETTE)]
        values = run.steps["loss"]
        smoothed = smooth(values, smoothing_window(len(values)))
        series.append(Series(label=label, x=run.iterations, y=smoothed, color=color, width=2))
        name = "validation" if run is runs[-1] else ""
        series += _validation(run, label=name, color=color, dashed=True)
    charts = [chart("Loss", series)]
    longest = max((run.iterations for run in runs), key=len)
    if len(longest) >= LONG_RUN:
        after = longest[len(longest) // 5 - 1]
        shortened = [s.after(after) for s in series]
        charts.append(chart(f"Loss after iteration {after:,}", shortened))
    charts.append(_speed_chart(runs, labels))
    if any(run.steps["bytes_sent"] != runs[0].steps["bytes_sent"] for run in runs):
        charts.append(_sent_chart(runs, labels))
    return charts


def _speed_chart(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    """The time of a step of each run."""
    series = []
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        values = [1000 * seconds for seconds in run.steps["step_seconds"]]
        smoothed = smooth(values, smoothing_window(len(values)))
        color = PALETTE[i % len(PALETTE)]
        series.append(Series(label=label, x=run.iterations, y=smoothed, color=color, width=2))
    return chart("Step time (ms)", series, from_zero=True)


def _sent_chart(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    """Return the chart of the bytes that each run has sent up to each step."""
    series = []
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        totals = list(accumulate(run.steps["bytes_sent"]))
        color = PALETTE[i % len(PALETTE)]
        series.append(Series(label=label, x=run.iterations, y=totals, color=color, width=2))
    title = "Bytes sent so far, one rank"
    return chart(title, series, from_zero=True, tick_format=traffic)


def difference_chart(first: RunData, other: RunData, label: str) -> str:
    """The absolute difference of two runs' losses where both have a step."""
    losses = dict(zip(other.iterations, other.steps["loss"], strict=True))
    pairs = [
        (i, abs(loss - losses[i]))
        for i, loss in zip(first.iterations, first.steps["loss"], strict=True)
        if i in losses
    ]
    xs, ys = [i for i, _ in pairs], [d for _, d in pairs]
    log = any(d > 0 for d in ys if math.isfinite(d))
    return chart(
        label, [Series(label="", x=xs, y=ys, color=PURPLE, width=1)], log=log, from_zero=not log
    )


def _with_mean(run: RunData, values: Sequence[float], *, color: str, label: str) -> list[Series]:
    window = smoothing_window(len(values))
    if window == 1:
        return [Series(label=label, x=run.iterations, y=values, color=color, width=2)]
    raw = Series(label=label, x=run.iterations, y=values, color=color, width=1, opacity=0.3)
    mean = Series(
        label=f"mean of {window} steps",
        x=run.iterations,
        y=smooth(values, window),
        color=color,
        width=2,
    )
    return [raw, mean]


def _mean_chart(run: RunData, name: str) -> str:
    """A mean of the task beside the loss, such as the accuracy, in training and validation."""
    points = run.means[name]
    series: list[Series] = []
    if values := dict(points["train"]):
        train = [values.get(i, math.nan) for i in run.iterations]
        series += _with_mean(run, train, color=BLUE, label="training")
    series += _points(points["valid"], label="validation", color=ORANGE)
    return chart(name.replace("_", " ").capitalize(), series)


def _validation(run: RunData, *, label: str, color: str, dashed: bool = False) -> list[Series]:
    return _points(run.evaluations["valid"], label=label, color=color, dashed=dashed)


def _points(
    points: Sequence[tuple[int, float]], *, label: str, color: str, dashed: bool = False
) -> list[Series]:
    if not points:
        return []
    xs, ys = zip(*points, strict=True)
    few = len(points) <= 100
    return [Series(label=label, x=xs, y=ys, color=color, width=2, markers=few, dashed=dashed)]


def _smoothed(
    run: RunData, title: str, key: str, *, log: bool = False, tick_format: TickFormat = plain
) -> str:
    series = _with_mean(run, run.steps[key], color=TEAL, label="each step")
    return chart(title, series, log=log, from_zero=True, tick_format=tick_format)


def _plain(
    run: RunData, title: str, key: str, *, log: bool = False, tick_format: TickFormat = plain
) -> str:
    series = [Series(label="", x=run.iterations, y=run.steps[key], color=TEAL, width=2)]
    return chart(title, series, log=log, from_zero=True, tick_format=tick_format)


def _path_chart(name: str, points: Sequence[tuple[int, float]]) -> str:
    xs, ys = [i for i, _ in points], [value for _, value in points]
    few = len(points) <= 100
    series = [Series(label="", x=xs, y=ys, color=TEAL, width=2, markers=few)]
    if name.startswith("bytes_"):
        axis = name.removeprefix("bytes_").upper()
        title = f"Bytes sent per step along {axis}, one rank"
        return chart(title, series, from_zero=True, tick_format=traffic)
    return chart(name.replace("_", " ").capitalize(), series, from_zero=True)


def _step_time_chart(run: RunData) -> str:
    """Milliseconds of a step, and of as many of its phases as there are colours, the longest."""
    values = [1000 * seconds for seconds in run.steps["step_seconds"]]
    smoothed = smooth(values, smoothing_window(len(values)))
    series = [Series(label="step", x=run.iterations, y=smoothed, color=PALETTE[0], width=2)]
    longest = sorted(run.phases, key=lambda name: -max(v for _, v in run.phases[name]))
    for name, color in zip(longest, PALETTE[1:], strict=False):
        xs, ys = zip(*run.phases[name], strict=True)
        few = len(xs) <= 100
        scaled = [1000 * seconds for seconds in ys]
        series.append(Series(label=name, x=xs, y=scaled, color=color, width=2, markers=few))
    title = "Step time by phase (ms, slowest rank)" if run.phases else "Step time (ms)"
    return chart(title, series, from_zero=True)


def _waiting_chart(run: RunData) -> str:
    pairs = zip(run.steps["wait_seconds"], run.steps["step_seconds"], strict=True)
    shares = [100 * wait / step if step > 0 else math.nan for wait, step in pairs]
    series = _with_mean(run, shares, color=TEAL, label="each step")
    return chart("Waiting for gradients (% of the step)", series, from_zero=True)


def _memory_chart(run: RunData) -> str:
    peaks = run.steps["peak_memory_bytes"]
    unit, size = ("GiB", 2**30) if run.last("peak_memory_bytes") >= 2**30 else ("MiB", 2**20)
    scaled = [peak / size for peak in peaks]
    series = [Series(label="", x=run.iterations, y=scaled, color=TEAL, width=2)]
    return chart(f"Peak memory, one rank ({unit})", series, from_zero=True)


def _skipped_chart(run: RunData) -> str:
    total, totals = 0.0, []
    for skipped in run.steps["skipped"]:
        total += skipped if math.isfinite(skipped) else 0.0
        totals.append(total)
    where = [i for i, s in zip(run.iterations, run.steps["skipped"], strict=True) if s > 0]
    return chart(
        "Skipped steps so far",
        [Series(label="number", x=run.iterations, y=totals, color=PURPLE, width=2)],
        from_zero=True,
        whole=True,
        tick_format=counted,
        marks=where,
        mark_label="skipped step",
    )


def _is_wild(run: RunData, key: str) -> bool:
    positive = sorted(value for value in run.steps[key] if math.isfinite(value) and value > 0)
    return bool(positive) and positive[-1] > 30 * positive[len(positive) // 2]
