"""The charts of a report, one function per quantity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from megatron.metrics.logger import PER_SECOND
from megatron.report.drawing import GREY, Chart, Series, smooth, smoothing_window
from megatron.report.runs import RunData

BLUE, ORANGE, GREEN, PURPLE, RED, TEAL = (
    "#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2",
)  # fmt: skip
LONG_RUN = 100
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL)
FEW = 100
"""Points that are marked one by one; the marks of more would cover the curve."""
Points = Sequence[tuple[int, float]]


def run_charts(run: RunData) -> list[Chart]:
    """Return all charts of one run; empty if no step is recorded."""
    if not run.iterations:
        return []
    steps = run.steps
    charts = [
        *_whole_and_end(loss_chart(run), run.iterations),
        *(_mean_chart(run, name) for name in run.means),
        Chart("Learning rate", _line(run, steps["lr"])),
        _gradient_norm_chart(run),
        Chart(f"{run.unit.capitalize()} per second", _with_mean(run, steps[PER_SECOND]), unit=""),
        _step_time_chart(run),
        Chart("Bytes sent per step, one rank", _with_mean(run, steps["bytes_sent"]), unit="B"),
        _memory_chart(run),
    ]
    if any(skipped > 0 for skipped in steps["skipped"]):
        charts.append(_skipped_chart(run))
    if len(set(run.finite("loss_scale"))) > 1:
        charts.append(Chart("Loss scale", _line(run, steps["loss_scale"]), log=True, unit=""))
    if any(density < 1 for density in steps["density"]):
        densities = _with_mean(run, steps["density"])
        charts.append(Chart("Density of the gradient exchange", densities))
    charts += [_path_chart(name, points) for name, points in run.path.items()]
    if any(wait > 0 for wait in steps["wait_seconds"]):
        pairs = zip(steps["wait_seconds"], steps["step_seconds"], strict=True)
        shares = [100 * wait / step if step > 0 else math.nan for wait, step in pairs]
        charts.append(Chart("Waiting for gradients (% of the step)", _with_mean(run, shares)))
    return charts


def loss_chart(run: RunData) -> Chart:
    """Draw the training loss with its running mean, validation points, and marks at NaN steps."""
    losses = run.steps["loss"]
    series = _with_mean(run, losses, label="training", color=BLUE)
    series += _points(run.evaluations["valid"], label="validation", color=ORANGE)
    bad = [i for i, loss in zip(run.iterations, losses, strict=True) if not math.isfinite(loss)]
    return Chart(
        "Loss", series, from_zero=False, marks=bad, mark_label="NaN or infinite", y_label=_nats(run)
    )


def comparison_charts(runs: Sequence[RunData], labels: Sequence[str]) -> list[Chart]:
    """Draw the losses of several runs by iteration, training time and bytes, and the differences.

    Of long runs, losses by time and bytes are without the steep beginning. Bytes are drawn where
    the runs differ in them.
    """
    curves = _overlaid(runs, labels, lambda run: run.steps["loss"])
    for number, run in enumerate(runs):
        name, color = f"{labels[number]}, validation", curves[number][-1].color
        valid = _points(run.evaluations["valid"], label=name, color=color, dashed=True)
        curves[number] += [replace(each, in_legend=False) for each in valid]
    dashed = [Series(label="dashed: validation", x=[], y=[], color=GREY, dashed=True)]
    dashed *= any(run.evaluations["valid"] for run in runs)
    longest = max((run.iterations for run in runs), key=len)
    empty = Chart("Loss", dashed, from_zero=False, y_label=_nats(runs[0]), last_values=False)
    charts = _whole_and_end(_flat(empty, curves), longest)
    first = longest[len(longest) // 5 - 1] if len(charts) > 1 else -1

    def loss_by(title: str, unit: str | None, totals: Sequence[Mapping[int, float]]) -> Chart:
        placed = [
            [each.after(first).placed(total) for each in found]
            for found, total in zip(curves, totals, strict=True)
        ]
        return _flat(replace(empty, title=f"Loss by {title}", x_label=title, x_unit=unit), placed)

    seconds = [_so_far(run, "step_seconds") for run in runs]
    unit, size = time_unit(max(max(total.values()) for total in seconds))
    seconds = [{i: total / size for i, total in each.items()} for each in seconds]
    charts.append(loss_by(f"training time ({unit})", None, seconds))
    if any(run.steps["bytes_sent"] != runs[0].steps["bytes_sent"] for run in runs):
        sent = [_so_far(run, "bytes_sent") for run in runs]
        charts.append(loss_by("bytes sent so far, one rank", "B", sent))
    times = _overlaid(runs, labels, _step_milliseconds, raw=False)
    charts.append(_flat(Chart("Step time (ms)", [], last_values=False), times))
    return [*charts, *_differences(runs, labels)]


def _differences(runs: Sequence[RunData], labels: Sequence[str]) -> list[Chart]:
    """Draw the absolute differences to the losses of the first run, where both have a step."""
    first = dict(zip(runs[0].iterations, runs[0].steps["loss"], strict=True))

    def distances(run: RunData) -> list[float]:
        steps = zip(run.iterations, run.steps["loss"], strict=True)
        return [abs(loss - first.get(i, math.nan)) for i, loss in steps]

    log = any(value > 0 for run in runs[1:] for value in distances(run) if math.isfinite(value))
    chart = Chart(f"|loss - loss of {labels[0]}|", [], log=log, last_values=False)
    return [_flat(chart, _overlaid(runs, labels, distances)[1:])]


def _flat(chart: Chart, curves: Sequence[Sequence[Series]]) -> Chart:
    """Return the chart with the curves of all runs behind its own, the faint ones first."""
    found = [each for of_run in curves for each in of_run]
    return replace(chart, series=[*sorted(found, key=lambda each: each.read), *chart.series])


def _so_far(run: RunData, column: str) -> dict[int, float]:
    """Return the sum of a column up to each iteration."""
    values = (value if math.isfinite(value) else 0.0 for value in run.steps[column])
    return {0: 0.0, **dict(zip(run.iterations, accumulate(values), strict=True))}


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit of an axis of so much time, and its seconds."""
    units = (("days", 86400), ("hours", 3600), ("minutes", 60))
    return next((unit for unit in units if seconds >= 2 * unit[1]), ("seconds", 1))


def _whole_and_end(chart: Chart, iterations: Sequence[int]) -> list[Chart]:
    """Return the chart, and for a long run a chart without the steep beginning."""
    if len(iterations) < LONG_RUN:
        return [chart]
    return [chart, chart.after(iterations[len(iterations) // 5 - 1])]


def _nats(run: RunData) -> str:
    return f"nats per {run.unit.removesuffix('s')}"


def _overlaid(
    runs: Sequence[RunData],
    labels: Sequence[str],
    values: Callable[[RunData], Sequence[float]],
    *,
    raw: bool = True,
) -> list[list[Series]]:
    """Return for each run its smoothed curve, after the faint one of all values with `raw`.

    Later curves are thinner, so that they do not hide those with which they agree.
    """
    found: list[list[Series]] = []
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        y, color = values(run), PALETTE[number % len(PALETTE)]
        width = 3.0 - 1.8 * number / max(1, len(runs) - 1)
        curve = Series(label=label, x=run.iterations, y=_smoothed(y), color=color, width=width)
        faint = replace(curve, y=y, width=0.7, opacity=0.3, read=False, in_legend=False)
        found.append([faint, curve] if raw and smoothing_window(len(y)) > 1 else [curve])
    return found


def _smoothed(values: Sequence[float]) -> list[float]:
    return smooth(values, smoothing_window(len(values)))


def _step_milliseconds(run: RunData) -> list[float]:
    return [1000 * seconds for seconds in run.steps["step_seconds"]]


def _with_mean(
    run: RunData, values: Sequence[float], *, label: str = "each step", color: str = TEAL
) -> list[Series]:
    raw = Series(label=label, x=run.iterations, y=values, color=color)
    window = smoothing_window(len(values))
    if len(set(values)) == 1:
        return [replace(raw, label=label.removeprefix("each step"))]
    if window == 1:
        return [raw]
    mean = replace(raw, label=f"mean of {window} steps", y=smooth(values, window))
    return [replace(raw, width=0.8, opacity=0.55, read=False), mean]


def _points(
    points: Points, *, label: str = "", color: str = TEAL, dashed: bool = False
) -> list[Series]:
    if not points:
        return []
    x, y = zip(*points, strict=True)
    few = len(points) <= FEW
    return [Series(label=label, x=x, y=y, color=color, markers=few, dashed=dashed)]


def _mean_chart(run: RunData, name: str) -> Chart:
    """Draw a mean of the task beside the loss, such as the accuracy, of training and validation."""
    points = run.means[name]
    series: list[Series] = []
    if values := dict(points["train"]):
        train = [values.get(i, math.nan) for i in run.iterations]
        series += _with_mean(run, train, label="training", color=BLUE)
    series += _points(points["valid"], label="validation", color=ORANGE)
    return Chart(_title(name), series, from_zero=False)


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _line(run: RunData, values: Sequence[float]) -> list[Series]:
    return [Series(x=run.iterations, y=values, color=TEAL)]


def _gradient_norm_chart(run: RunData) -> Chart:
    """Draw the gradient norm, logarithmic if some norms are much larger than most."""
    norms = sorted(norm for norm in run.finite("grad_norm") if norm > 0)
    wild = bool(norms) and norms[-1] > 30 * norms[len(norms) // 2]
    return Chart("Gradient norm", _with_mean(run, run.steps["grad_norm"]), log=wild)


def _path_chart(name: str, points: Points) -> Chart:
    title, unit = _title(name), None
    if name.startswith("bytes_"):
        axis = name.removeprefix("bytes_").upper()
        title, unit = f"Bytes sent per step along {axis}, one rank", "B"
    return Chart(title, _points(points), unit=unit)


def _step_time_chart(run: RunData) -> Chart:
    """Draw the time of a step and of its longest phases, one per available colour."""
    steps = _smoothed(_step_milliseconds(run))
    series = [Series(label="step", x=run.iterations, y=steps, color=PALETTE[0])]
    longest = sorted(run.phases, key=lambda name: -max(v for _, v in run.phases[name]))
    for name, color in zip(longest, PALETTE[1:], strict=False):
        scaled = [(i, 1000 * seconds) for i, seconds in run.phases[name]]
        series += _points(scaled, label=name, color=color)
    title = "Step time by phase (ms, slowest rank)" if run.phases else "Step time (ms)"
    return Chart(title, series)


def _memory_chart(run: RunData) -> Chart:
    largest = max(run.finite("peak_memory_bytes"), default=0)
    unit, size = memory_unit(largest)
    peaks = [peak / size for peak in run.steps["peak_memory_bytes"]]
    return Chart(f"Peak memory, one rank ({unit})", _line(run, peaks))


def memory_unit(largest: float) -> tuple[str, int]:
    """Return the unit of an axis of memory up to `largest` bytes, and its size in bytes."""
    return ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)


def _skipped_chart(run: RunData) -> Chart:
    skipped = [value if math.isfinite(value) else 0.0 for value in run.steps["skipped"]]
    totals = [Series(label="number", x=run.iterations, y=list(accumulate(skipped)), color=PURPLE)]
    where = [i for i, value in zip(run.iterations, skipped, strict=True) if value > 0]
    return Chart("Skipped steps so far", totals, unit="", marks=where, mark_label="skipped step")
