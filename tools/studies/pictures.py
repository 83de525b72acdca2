"""The pictures of a study's report: losses against each cost, gaps with their errors, curves."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.report.charts import PALETTE, memory_unit, time_unit
from megatron.report.drawing import (
    GREY,
    HEIGHT,
    INK,
    PAPER,
    Chart,
    Series,
    add_legend,
    set_unit,
    tell,
    value_text,
    wrapped,
)
from tools.studies.rows import StudyRow
from tools.studies.statistics import Measure, SeedGroup, frontier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 5.0
"""Ratio of the largest to the least cost beyond which the axis is logarithmic."""
EQUAL = 1.01
"""Ratio below which costs are not told apart on the axis."""
MARKERS = "os^Dv"
LONG = 20
"""Points from which a loss curve is drawn without its steep beginning."""
ROW = 0.28
"""Inches of a group in the picture of the gaps: its name and, below it, its gap."""


@dataclass(frozen=True)
class Cost:
    """A cost that losses are drawn against: its file, its title, and its value of a group.

    The value is 0 for a group without one, which is left out; `lacking` says why. `unit` is as for
    `Chart`. `note` is what a reader must know of the values.
    """

    file: str
    title: str
    unit: str | None
    measure: Measure
    lacking: str
    note: str = ""


BYTES = Cost(
    "bytes", "payload of a step", "B", lambda group: group.payload, lacking="they send nothing"
)


def memory_of(groups: Iterable[SeedGroup]) -> Cost:
    """Return the peak memory of a rank as a cost, in the unit of the largest of `groups`."""
    unit, size = memory_unit(max((group.peak_memory or 0.0 for group in groups), default=0.0))
    return Cost(
        "memory",
        f"peak memory of a rank ({unit})",
        None,
        lambda group: (group.peak_memory or 0.0) / size,
        lacking="their rows have no memory",
    )


def time_of(seconds: Mapping[str, float]) -> Cost:
    """Return the training time as a cost, from the `seconds` of each group."""
    unit, size = time_unit(max(seconds.values(), default=0.0))
    return Cost(
        "time",
        f"training time: steps x median step ({unit})",
        None,
        lambda group: seconds.get(group.name, 0.0) / size,
        lacking="their rows have no step time",
        note="Time is the number of steps, with those of the run that a run continues, times its "
        "median step. The runs may have shared the machine.",
    )


@dataclass(frozen=True)
class ParetoPicture:
    """Gap against a cost: a point for each group, and a Pareto front for each baseline.

    `left_out` are the names of groups that have a gap and no cost. `colors` are the colours of all
    groups of the study by name, in its order.
    """

    title: str
    groups: Sequence[SeedGroup]
    baselines: Mapping[str, str]
    cost: Cost
    colors: Mapping[str, str]
    left_out: Sequence[str] = ()

    def draw(self, figure: Figure) -> None:
        """Draw the points with their names in the legend, and the fronts as steps."""
        from matplotlib.ticker import LogLocator

        axes = figure.add_subplot()
        axes.set_title(wrapped(self.title))
        axes.set(xlabel=self.cost.title, ylabel="loss less baseline")
        costs = [self.cost.measure(group) for group in self.groups]
        if max(costs) > WIDE * min(costs):
            axes.set_xscale("log")
            subs = (1, 2, 5) if max(costs) < WIDE**3 * min(costs) else (1,)
            axes.xaxis.set_major_locator(LogLocator(subs=subs))
            axes.minorticks_off()
        else:
            axes.locator_params(axis="x", nbins=5)
            if max(costs) < EQUAL * min(costs):
                axes.set_xlim(min(costs) / 1.5, max(costs) * 1.5)
        set_unit(axes.xaxis, self.cost.unit)
        names = [*self.colors]
        for group in self.groups:
            marker = MARKERS[names.index(group.name) // len(PALETTE) % len(MARKERS)]
            x, y = self._place(group)
            style = {"color": self.colors[group.name], "label": group.name, "markersize": 5}
            axes.plot(x, y, marker, linestyle="", **style)
            text = f"{group.name}: {y:+.4f} at {value_text(x, self.cost.unit)}"
            tell(axes, [(x, y)], [text])
        right = axes.get_xlim()[1]
        axes.set_xlim(right=right)
        for number, front in enumerate(self.fronts()):
            x, y = zip(*map(self._place, front), strict=True)
            style = {"color": INK, "linewidth": 1, "label": "_" if number else "Pareto front"}
            axes.step([*x, right], [*y, y[-1]], where="post", zorder=1, **style)
        add_legend(figure, axes)

    def _place(self, group: SeedGroup) -> tuple[float, float]:
        return self.cost.measure(group), group.gap or 0.0

    def fronts(self) -> list[list[SeedGroup]]:
        """Return the front of each baseline: gaps to different losses have no common one."""
        return [
            frontier(
                [group for group in self.groups if self.baselines[group.name] == baseline],
                self.cost.measure,
            )
            for baseline in dict.fromkeys(self.baselines[group.name] for group in self.groups)
        ]


@dataclass(frozen=True)
class GapPicture:
    """Gaps to the baseline with their standard errors, a line for each group."""

    title: str
    groups: Sequence[SeedGroup]
    colors: Mapping[str, str]

    def draw(self, figure: Figure) -> None:
        """Draw the gaps, each below its name; a hollow point has the error of one seed."""
        figure.set_figheight(max(HEIGHT, 0.8 + ROW * len(self.groups)))
        axes = figure.add_subplot()
        axes.set_title(wrapped(self.title))
        left = axes.get_yaxis_transform()
        for place, group in enumerate(self.groups):
            color, gap, error = self.colors[group.name], group.gap or 0.0, group.error or 0.0
            full = color if group.error_is_own else PAPER
            style = {"color": color, "markerfacecolor": full, "markersize": 5, "capsize": 2}
            axes.errorbar(gap, place, xerr=error, fmt="o", linewidth=1.4, **style)
            name = wrapped(f"{group.name} ({len(group.gaps)})")
            box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}
            axes.text(0.01, place - 0.45, name, va="center", transform=left, bbox=box)
            tell(axes, [(gap, place)], [f"{group.name}: {gap:+.4f}, error {error:.4f}"])
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_yticks([])
        axes.set_ylim(len(self.groups) - 0.5, -1)
        axes.set_xlabel("nats, standard error; in brackets: seeds")


def pictures_of(
    groups: Sequence[SeedGroup], baselines: Mapping[str, str], seconds: Mapping[str, float]
) -> dict[str, ParetoPicture | GapPicture]:
    """Return the pictures by the name of their file.

    `baselines` are those of all groups, and `seconds` the training times of those that have one.
    """
    found: dict[str, ParetoPicture | GapPicture] = {}
    colors = _colors(groups)
    for cost in (BYTES, time_of(seconds), memory_of(groups)):
        rated = [group for group in groups if group.gap is not None]
        shown = [group for group in rated if cost.measure(group) > 0]
        left_out = [group.name for group in rated if cost.measure(group) <= 0]
        if len(shown) > 1:
            title = f"Loss by {cost.file}"
            picture = ParetoPicture(title, shown, baselines, cost, colors, left_out)
            found[f"loss_by_{cost.file}"] = picture
    gaps = [g for g in groups if g.gap is not None and g.name != baselines[g.name]]
    if gaps:
        names = {baselines[group.name] for group in gaps}
        name = "the baseline" if len(names) > 1 else min(names)
        found["gaps"] = GapPicture(f"Loss less that of {name}", gaps, colors)
    return found


def curves_of(groups: Sequence[SeedGroup], rows: Iterable[StudyRow]) -> list[Chart]:
    """Return the chart of the training losses, a mean over seeds for each group; or none.

    A run that ended before others of its group is left out.
    """
    members: dict[str, list[dict[int, float]]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(dict(row.curve))
    series: list[Series] = []
    for number, (name, color) in enumerate(_colors(groups).items()):
        curves = members.get(name, [])
        longest = max((max(curve, default=0) for curve in curves), default=0)
        curves = [curve for curve in curves if max(curve, default=0) == longest]
        steps = [step for step in curves[0] if all(step in each for each in curves)]
        y = [statistics.fmean(each[step] for each in curves) for step in steps]
        dashed = number // len(PALETTE) % 2 == 1
        series.append(Series(label=name, x=steps, y=y, color=color, width=1.4, dashed=dashed))
    shortest = min((each.x for each in series if each.x), key=len, default=())
    if not shortest:
        return []
    label = "nats, mean over seeds"
    chart = Chart("Training loss", series, from_zero=False, last_values=False, y_label=label)
    return [chart if len(shortest) < LONG else chart.after(shortest[len(shortest) // 5])]


def _colors(groups: Sequence[SeedGroup]) -> dict[str, str]:
    """Return the colour of each group, equal in all pictures."""
    return {group.name: PALETTE[n % len(PALETTE)] for n, group in enumerate(groups)}
