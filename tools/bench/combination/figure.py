"""The picture of the combination study: accuracy by memory, and memory by setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.low_memory.planned_memory import MemoryColumn
from megatron.report.charts import PALETTE
from tools.bench.combination.memory import MemoryBytes
from tools.bench.combination.settings import (
    MICROBATCHES,
    MODELS,
    NONZEROS,
    MemorySetting,
    figures,
    printed,
)
from tools.bench.common.figures import plain_axes, save
from tools.planner.paper_accounting import MB, TABLE_3

TICKS = (1, 2, 5, 10, 20, 50)
"""MB at which the logarithmic axes have ticks."""
Point = tuple[MemorySetting, float, float | None, MemoryBytes]
"""A trained setting, its accuracy in per cent, the standard error, and its memory."""


def draw(
    file: Path,
    points: Sequence[Point],
    paper: Callable[[MemorySetting], MemoryBytes],
    planned: Callable[[MemorySetting], MemoryColumn],
) -> bool:
    """Write the picture; return False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(13, 4.6), dpi=110, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _accuracy(left, points)
    _sparse_memory(middle, paper, planned)
    _smaller(right, paper)
    save(figure, file)
    return True


def _accuracy(axes: Any, points: Sequence[Point]) -> None:
    """Draw the trained settings: color by network, marker by bits, filled for whole batches."""
    labels = list(dict.fromkeys(_label(setting) for setting, *_ in points))
    for setting, mean, error, memory in points:
        assert memory.total is not None, "the report has rules for every WRN"
        color = PALETTE[labels.index(_label(setting)) % len(PALETTE)]
        axes.errorbar(
            memory.total / MB,
            mean,
            yerr=error,
            fmt="o" if setting.bits == 32 else "s",
            color=color,
            markerfacecolor=color if setting.microbatch >= 50 else "white",
            capsize=2,
        )
    for number, label in enumerate(labels):
        axes.plot([], [], "o", color=PALETTE[number % len(PALETTE)], label=label)
    axes.plot([], [], "s", color="#6b7280", label="square: 16 bit, circle: 32 bit")
    axes.plot([], [], "o", color="#6b7280", markerfacecolor="white", label="open: 5 images, not 50")
    axes.set_xscale("log")
    axes.set_xticks(TICKS[:-1], [str(tick) for tick in TICKS[:-1]])
    axes.minorticks_off()
    axes.set_xlabel("memory by the report's accounting, MB")
    axes.set_ylabel("test accuracy, %, mean of seeds and standard error")
    axes.set_title("trained: WRN-16-1 and smaller, a few steps", fontsize=9)
    axes.legend(fontsize=7, frameon=False)
    plain_axes(axes)


def _label(setting: MemorySetting) -> str:
    if setting.size == MODELS[setting.model].size:
        return f"WRN-16-1, {setting.nonzeros} % nonzeros"
    layers, width = setting.size
    return f"WRN-{layers}-{width:g}, dense"


def _sparse_memory(
    axes: Any,
    paper: Callable[[MemorySetting], MemoryBytes],
    planned: Callable[[MemorySetting], MemoryColumn],
) -> None:
    """Draw the memory of figure 7 by nonzeros, and what table 3 prints."""
    for color, microbatch in zip(PALETTE, MICROBATCHES, strict=False):
        group = [each for each in figures()["Fig. 7"] if each.microbatch == microbatch]
        totals = [(paper(each).total or 0) / MB for each in group]
        axes.plot(NONZEROS, totals, "o-", color=color, markersize=4, label=f"{microbatch} images")
        ours = [planned(each).total / MB for each in group]
        axes.plot(NONZEROS, ours, "--", color=color, linewidth=1)
    low = [row for row in TABLE_3 if row.bits == 16]
    shares = [printed(row, "wrn").nonzeros for row in low]
    axes.plot(shares, [row.printed_mb for row in low], "kx", label="printed in table 3")
    axes.plot([], [], "k--", linewidth=1, label="planned for our flags")
    axes.set_yscale("log")
    axes.set_yticks(TICKS, [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("% nonzeros")
    axes.set_ylabel("MB")
    axes.set_title("Fig. 7: WRN-28-2, 16 bit, RESIDUAL-2*", fontsize=9)
    axes.legend(fontsize=7, frameon=False)
    plain_axes(axes)


def _smaller(axes: Any, paper: Callable[[MemorySetting], MemoryBytes]) -> None:
    """Draw the bytes of the networks of figure 8, microbatches of 10, by parameters that exist."""
    group = [each for each in figures()["Fig. 8"] if each.microbatch == 10]
    layers, width = MODELS["wrn"].size
    kinds = {
        "sparse": [each for each in group if each.size == (layers, width)],
        "shallow": [each for each in group if each.size[0] < layers],
        "narrow": [each for each in group if each.size[1] < width],
    }
    for color, (name, networks) in zip(PALETTE, kinds.items(), strict=False):
        states = [paper(each).states / MB for each in networks]
        totals = [(paper(each).total or 0) / MB for each in networks]
        axes.plot(states, totals, "o-", color=color, markersize=4, label=name)
    axes.set_xlabel("model and optimizer, MB")
    axes.set_ylabel("all, MB")
    axes.set_title("Fig. 8: WRNs of 16 bit, 10 images, RESIDUAL-2*", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    plain_axes(axes)
