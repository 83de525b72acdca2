"""Loss curves of the AxoNN validation, and their distances."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.report.charts import BLUE, GREEN, ORANGE
from tools.bench.axonn_validation.page import OURS, PLAIN, STOCK
from tools.bench.common.figures import plain_axes, save

LEAST = 1e-8
"""Stands for no difference on a logarithmic axis."""
GREY = "#9ca3af"


def write_plot(path: Path, curves: Mapping[str, Any]) -> bool:
    """Draw losses and differences from plain PyTorch's; return False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 3.9), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    plain = curves[PLAIN]["losses"]
    steps = range(1, len(plain) + 1)
    left.plot(steps, plain, color=BLUE, linewidth=2.4, label=PLAIN)
    left.plot(steps, curves[OURS]["losses"], "--", color=ORANGE, linewidth=1.2, label=OURS)
    left.set_title("training loss", loc="left", fontsize=11)
    for name, curve in reversed(list(curves.items())):
        if name != PLAIN:
            color = {OURS: ORANGE, STOCK: GREEN}.get(name, GREY)
            pairs = zip(curve["losses"], plain, strict=True)
            differences = [max(LEAST, abs(a - b)) for a, b in pairs]
            right.plot(steps, differences, color=color, linewidth=1, label=name)
    right.set_yscale("log")
    right.set_title(f"difference from {PLAIN}, without sign", loc="left", fontsize=11)
    for axes in (left, right):
        axes.set_xlabel("step")
        plain_axes(axes)
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)
    return True
