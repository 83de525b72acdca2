"""The plot of a study: losses minus the dense run's along the run, and the gaps at the end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.report.charts import PALETTE
from megatron.report.drawing import smooth
from tools.bench.common.figures import plain_axes, save
from tools.bench.convergence.rows import Row, setting
from tools.bench.convergence.study import DENSE

if TYPE_CHECKING:
    from tools.bench.convergence.groups import RunGroup

SMOOTHED = 5
"""Number of points of a curve that are averaged into one."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A diagram of the training loss of some groups along the run."""

    title: str
    groups: tuple[str, ...]


def write_plot(
    path: Path,
    rows: Sequence[Row],
    groups: Sequence[RunGroup],
    *,
    panels: Sequence[Panel],
    colors: Mapping[str, str],
) -> bool:
    """Draw a study: its panels side by side, and the gaps at the end below them.

    The first word of a variant determines the colour of its gap. Returns False without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shown = [group for group in groups if group.gap is not None]
    figure = Figure(figsize=(11, 5 + 0.24 * len(shown)), dpi=130, layout="constrained")
    grid = figure.add_gridspec(2, len(panels), height_ratios=[4, 0.5 + 0.24 * len(shown)])
    for column, panel in enumerate(panels):
        _curves(figure.add_subplot(grid[0, column]), panel, rows)
    _gaps(figure.add_subplot(grid[1, :]), shown, colors)
    save(figure, path)
    return True


def difference(row: Row, dense: Row) -> list[tuple[int, float]]:
    """Return the row's loss curve minus the dense one's, where both have a point."""
    reference = {step: loss for step, loss in dense["curve"]}
    return [(step, loss - reference[step]) for step, loss in row["curve"] if step in reference]


def mean_difference(group: str, rows: Sequence[Row]) -> list[tuple[int, float]]:
    """Return `difference` averaged over the seeds of a group."""
    dense = {setting(row): row for row in rows if row["variant"] == DENSE}
    found: dict[int, list[float]] = {}
    for row in rows:
        reference = dense.get(setting(row))
        if row["group"] == group and reference is not None:
            for step, value in difference(row, reference):
                found.setdefault(step, []).append(value)
    return [(step, statistics.fmean(found[step])) for step in sorted(found)]


def _curves(axes: Any, panel: Panel, rows: Sequence[Row]) -> None:
    assert len(panel.groups) <= len(PALETTE), "each curve has a colour of its own"
    for name, color in zip(panel.groups, PALETTE, strict=False):
        points = mean_difference(name, rows)
        if points:
            steps, values = zip(*points, strict=True)
            label = name.replace("_", " ").replace("-", ", ")
            axes.plot(steps, smooth(values, SMOOTHED), color=color, linewidth=1.6, label=label)
    axes.axhline(0, color="#6b7280", linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_title(panel.title, loc="left", fontsize=11)
    plain_axes(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)


def _gaps(axes: Any, groups: Sequence[RunGroup], colors: Mapping[str, str]) -> None:
    for place, group in enumerate(groups):
        axes.errorbar(
            group.gap,
            place,
            xerr=group.error or 0.0,
            color=colors.get(group.variant.split("_")[0], PALETTE[3]),
            fmt="o",
            markerfacecolor=None if group.error_is_own else "white",
            markersize=5,
            capsize=2,
            linewidth=1.2,
        )
    axes.axvline(0, color="#6b7280", linewidth=0.8)
    axes.set_yticks(range(len(groups)), [f"{g.title} ({len(g.gaps)})" for g in groups], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("validation loss less dense (nats a token), standard error; hollow: one seed")
    plain_axes(axes)
