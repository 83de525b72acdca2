"""The report of a run in its folder: report.html, and loss.png where matplotlib is installed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.metrics.log_line import timestamp
from megatron.report.charts import BLUE, ORANGE, PALETTE
from megatron.report.drawing import smooth, smoothing_window
from megatron.report.page import run_page
from megatron.report.runs import RunData, read_run


def write_picture(path: Path, runs: Sequence[RunData], labels: Sequence[str]) -> bool:
    """Draw the losses of one run, or of several over each other; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    alone = len(runs) == 1
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        color = BLUE if alone else PALETTE[i % len(PALETTE)]
        _draw(axes, run, label="training" if alone else label, color=color, alone=alone)
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"loss (nats per {runs[0].unit.removesuffix('s')})")
    axes.set_title(_without_formulas(labels[0]) if alone else "Loss", loc="left", fontweight="bold")
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
    return True


def _draw(axes: Any, run: RunData, *, label: str, color: str, alone: bool) -> None:
    values = run.steps["loss"]
    window = smoothing_window(len(values))
    if window > 1 and alone:
        axes.plot(run.iterations, values, color=color, alpha=0.3, linewidth=0.8)
        label = f"{label} (mean of {window} steps)"
    axes.plot(
        run.iterations,
        smooth(values, window),
        color=color,
        linewidth=1.8,
        label=_without_formulas(label),
    )
    if run.evaluations["valid"]:
        xs, ys = zip(*run.evaluations["valid"], strict=True)
        style = {"color": ORANGE, "marker": "o", "markersize": 4, "label": "validation"}
        axes.plot(xs, ys, **(style if alone else {"color": color, "linestyle": "--"}))


def _without_formulas(text: str) -> str:
    # matplotlib reads text between dollars as a formula.
    return text.replace("$", r"\$")


REPORT = "report.html"
PICTURE = "loss.png"


def write_report(
    run_dir: str | Path,
    *,
    output: str | Path | None = None,
    log: Callable[[str], None] | None = None,
) -> Path:
    """Write report.html and loss.png from what the folder holds, into it or into `output`.

    Returns the former's path.

    Without matplotlib there is no loss.png, and `log` is told so. Raises `ConfigError` where the
    folder holds no metrics, OSError where it cannot be written.
    """
    run = read_run(run_dir)
    folder = run.folder if output is None else Path(output)
    path = folder / REPORT
    replace_text(path, run_page(run, written=timestamp(time.time())))
    if not write_picture(folder / PICTURE, [run], [run.name]) and log is not None:
        log(f"{PICTURE} is left out: matplotlib is not installed (pip install 'sparsetron[log]')")
    return path


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole, so that a reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    os.replace(temporary, path)
