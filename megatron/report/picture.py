"""loss.png, for places that show no SVG; needs matplotlib and is left out without it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.report.charts import BLUE, ORANGE, PALETTE
from megatron.report.runs import RunData
from megatron.report.series import smooth, smoothing_window


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
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(_plain(labels[0]) if alone else "Loss", loc="left", fontweight="bold")
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
    return True


def _draw(axes: Any, run: RunData, *, label: str, color: str, alone: bool) -> None:
    values = run.steps["lm_loss"]
    window = smoothing_window(len(values))
    if window > 1 and alone:
        axes.plot(run.iterations, values, color=color, alpha=0.3, linewidth=0.8)
        label = f"{label} (mean of {window} steps)"
    axes.plot(
        run.iterations, smooth(values, window), color=color, linewidth=1.8, label=_plain(label)
    )
    if run.evaluations["valid"]:
        xs, ys = zip(*run.evaluations["valid"], strict=True)
        style = {"color": ORANGE, "marker": "o", "markersize": 4, "label": "validation"}
        axes.plot(xs, ys, **(style if alone else {"color": color, "linestyle": "--"}))


def _plain(text: str) -> str:
    # matplotlib reads text between dollars as a formula.
    return text.replace("$", r"\$")
