"""Figures 1, 2 and 5 of "Low-Memory Neural Network Training", drawn from our counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.low_memory.strategies import Strategy
from megatron.report.charts import PALETTE
from tools.bench.common.figures import plain_axes, save
from tools.planner.paper_accounting import (
    KINDS,
    MB,
    TABLE_3,
    TABLE_4_BASELINE_MB,
    PaperBytes,
    account_of,
    dynamic_conv_network,
    wide_resnet_account,
)

LETTERS = {
    "A": Strategy("none"),
    "B": Strategy("no-norm"),
    "C": Strategy("residual-star", 1),
    "D": Strategy("residual-star", 2),
}


def draw(file: Path) -> bool:
    """Write the picture; return False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 6.4), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 4)
    _pies([figure.add_subplot(grid[0, column]) for column in range(2)])
    _course(figure.add_subplot(grid[0, 2:]))
    _techniques(figure.add_subplot(grid[1, :2]))
    _operations(figure.add_subplot(grid[1, 2:]))
    save(figure, file)
    return True


def _pies(axes: list[Any]) -> None:
    wide = account_of(TABLE_3[0]).bytes
    states = [each / MB for each in dynamic_conv_network().states(bits=32)]
    pies = {
        f"Fig. 1a: WRN-28-2, {wide.total / MB:.1f} MB": [getattr(wide, kind) for kind in KINDS],
        f"Fig. 1b: DC-Transformer, {TABLE_4_BASELINE_MB:,} MB": [
            *states,
            TABLE_4_BASELINE_MB - sum(states),
        ],
    }
    for each, (title, sizes) in zip(axes, pies.items(), strict=True):
        each.pie(sizes, colors=PALETTE[: len(KINDS)], startangle=90)
        each.set_title(title, fontsize=9)
        shares = [
            f"{kind} {size / sum(sizes):.1%}" for kind, size in zip(KINDS, sizes, strict=True)
        ]
        each.legend(shares, loc="upper center", bbox_to_anchor=(0.5, 0), fontsize=8, frameon=False)


def _course(axes: Any) -> None:
    """Draw activations at every operation of a step, with and without checkpointing."""
    for color, (letter, strategy) in zip(PALETTE, LETTERS.items(), strict=False):
        moments = wide_resnet_account(strategy=strategy).activations.moments
        axes.plot([m.total / MB for m in moments], color=color, label=f"{letter}: {strategy}")
    axes.set_title("activations in the course of a step", fontsize=9)
    axes.set_xlabel("operation: forward, then backward")
    axes.set_ylabel("MB")
    axes.legend(fontsize=8, frameon=False)
    plain_axes(axes)


def _techniques(axes: Any) -> None:
    """Draw figure 2 to scale: the three kinds under one technique more at a time."""
    star = Strategy("residual-star", 2)
    steps: dict[str, PaperBytes] = {
        "standard": wide_resnet_account().bytes,
        "16 bit": wide_resnet_account(bits=16).bytes,
        "+ checkpointing": wide_resnet_account(bits=16, strategy=star).bytes,
        "+ microbatches of 10": wide_resnet_account(bits=16, strategy=star, microbatch=10).bytes,
        "+ 30 % nonzeros": account_of(TABLE_3[3]).bytes,
    }
    rows = range(len(steps))[::-1]
    left = [0.0] * len(steps)
    for color, kind in zip(PALETTE, KINDS, strict=False):
        sizes = [getattr(each, kind) / MB for each in steps.values()]
        axes.barh(list(rows), sizes, left=left, color=color, label=kind)
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    for row, each in zip(rows, steps.values(), strict=True):
        axes.text(each.total / MB + 4, row, f"{each.total / MB:.1f}", va="center", fontsize=8)
    axes.set_yticks(list(rows), list(steps), fontsize=8)
    axes.set_xlabel("MB")
    axes.set_title("Fig. 2 to scale: WRN-28-2, one technique more a row", fontsize=9)
    plain_axes(axes)


def _operations(axes: Any) -> None:
    courses = {name: wide_resnet_account(strategy=s).activations for name, s in LETTERS.items()}
    x = [course.peak.total / MB for course in courses.values()]
    y = [course.flops_ratio for course in courses.values()]
    axes.plot(x, y, "o-", color=PALETTE[0])
    for name, at, ratio in zip(courses, x, y, strict=True):
        axes.annotate(name, (at, ratio), textcoords="offset points", xytext=(6, 5), fontsize=9)
    axes.set_xlabel("activations at the peak, MB (fp32, 100 images)")
    axes.set_ylabel("FLOPs, 1 = no checkpointing")
    axes.set_xlim(left=0)
    axes.set_title("Fig. 5: operations against memory", fontsize=9)
    plain_axes(axes)
