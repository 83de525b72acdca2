"""A plot of the stages' passes in measured steps: 1F1B and message-driven."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.report.charts import BLUE, ORANGE
from tools.bench.common.figures import save
from tools.bench.message_driven.uneven_stage import DRIVEN, PROFILES, REFERENCE

COLUMNS = (REFERENCE, DRIVEN)
COLORS = {"forward": BLUE, "backward": ORANGE}
LEAST_WIDTH = 0.011
"""Minimum share of a panel that a pass must take up for a number to fit in."""


def panels_of(steps: Sequence[Mapping[str, Any]], microbatches: int) -> dict[str, Any]:
    """Return the passes of the step of median length by profile and contender, in ms from 0.

    Both contenders of a profile are shown in the round of the median of their ratio, in which
    passes take the same times.
    """
    panels: dict[str, Any] = {}
    for profile in PROFILES:
        by_round: dict[int, dict[str, Any]] = {}
        for step in steps:
            if (step["profile"], step["microbatches"]) == (profile, microbatches):
                by_round.setdefault(step["round"], {})[step["contender"]] = step
        ordered = sorted(
            by_round.values(), key=lambda both: both[DRIVEN]["seconds"] / both[REFERENCE]["seconds"]
        )
        shown = ordered[len(ordered) // 2]
        panels[profile] = {name: _from_zero(shown[name]["passes"]) for name in COLUMNS}
    return panels


def _from_zero(ranks: Sequence[Sequence[Any]]) -> list[list[Any]]:
    first = min(start for passes in ranks for _, _, start, _ in passes)
    return [
        [
            [kind, microbatch, round(1e3 * (start - first), 2), round(1e3 * (stop - first), 2)]
            for kind, microbatch, start, stop in passes
        ]
        for passes in ranks
    ]


def write_plot(path: Path, panels: Mapping[str, Any]) -> bool:
    """Draw a row for each profile, a column for each contender.

    Returns False without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(15, 2.3 * len(panels) + 0.8), dpi=130, layout="constrained")
    grid = figure.subplots(len(panels), len(COLUMNS), squeeze=False, sharex="row", sharey="row")
    for axes_of_row, (profile, contenders) in zip(grid, panels.items(), strict=True):
        last = max(stop for ranks in contenders.values() for each in ranks for *_, stop in each)
        for axes, name in zip(axes_of_row, COLUMNS, strict=True):
            _draw(axes, contenders[name], f"{profile}: {name}", last)
    for axes in grid[-1]:
        axes.set_xlabel("ms")
    _legend(figure)
    save(figure, path)
    return True


def _draw(axes: Any, ranks: Sequence[Sequence[Any]], title: str, last: float) -> None:
    for rank, passes in enumerate(ranks):
        for kind, microbatch, start, stop in passes:
            axes.broken_barh(
                [(start, stop - start)],
                (rank - 0.42, 0.84),
                facecolors=COLORS[kind],
                edgecolors="white",
                linewidth=0.6,
            )
            if stop - start >= LEAST_WIDTH * last:
                axes.text(
                    (start + stop) / 2,
                    rank,
                    microbatch,
                    color="white",
                    fontsize=7,
                    ha="center",
                    va="center",
                )
    end = max(stop for passes in ranks for *_, stop in passes)
    axes.axvline(end, color="#6b7280", linewidth=0.8, linestyle="--")
    axes.set_title(f"{title}, {end:.0f} ms", loc="left", fontsize=11)
    axes.set_xlim(0, 1.02 * last)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [f"stage {rank}" for rank in range(len(ranks))])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(
        handles=handles,
        loc="outside upper right",
        ncols=len(handles),
        frameon=False,
    )
