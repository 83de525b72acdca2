"""The pictures of a study's report: losses against each cost, and gaps with their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.report.charts import BLUE, ORANGE, PALETTE
from tools.studies.statistics import Measure, SeedGroup, frontier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 5.0
"""Ratio of the largest to the least cost beyond which the axis is logarithmic."""
EQUAL = 1.01
"""Ratio below which costs are not told apart on the axis."""
MARKERS = "os^Dv"


@dataclass(frozen=True)
class Cost:
    """A cost that losses are drawn against: its file, its title, and its value of a group.

    The value is 0 for a group without one, which is left out; `lacking` says why. `note` is what a
    reader must know of the values.
    """

    file: str
    title: str
    unit: str
    measure: Measure
    lacking: str
    note: str = ""


BYTES = Cost(
    "bytes", "Payload of a step", "B", lambda group: group.payload, lacking="they send nothing"
)
MEMORY = Cost(
    "memory",
    "Peak memory of a rank",
    "B",
    lambda group: group.peak_memory or 0.0,
    lacking="their rows have no memory",
)


def time_of(seconds: Mapping[str, float]) -> Cost:
    """Return the training time as a cost, from the `seconds` of each group."""
    return Cost(
        "time",
        "Training time: steps x median step",
        "s",
        lambda group: seconds.get(group.name, 0.0),
        lacking="their rows have no step time",
        note="Time is the number of steps, with those of the run that a run continues, times its "
        "median step. The runs may have shared the machine.",
    )


@dataclass(frozen=True)
class ParetoPicture:
    """Gap against a cost: a point for each group, and a Pareto front for each baseline.

    `left_out` are the names of groups that have a gap and no cost.
    """

    title: str
    groups: Sequence[SeedGroup]
    baselines: Mapping[str, str]
    cost: Cost
    left_out: Sequence[str] = ()

    def draw(self, figure: Figure) -> None:
        """Draw the points with their names, and the fronts as steps."""
        from matplotlib.ticker import EngFormatter, LogLocator

        axes = figure.add_subplot()
        axes.set_title(self.title)
        axes.set(xlabel=self.cost.title.lower(), ylabel="loss less baseline")
        costs = [self.cost.measure(group) for group in self.groups]
        if max(costs) > WIDE * min(costs):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.minorticks_off()
        elif max(costs) < EQUAL * min(costs):
            axes.set_xlim(min(costs) / 1.5, max(costs) * 1.5)
        axes.xaxis.set_major_formatter(EngFormatter(self.cost.unit, sep=" "))
        for front in self.fronts():
            x = [self.cost.measure(group) for group in front]
            axes.step(x, [group.gap or 0.0 for group in front], where="post", color=BLUE, lw=1)
        for number, group in enumerate(self.groups):
            color = PALETTE[number % len(PALETTE)]
            marker = MARKERS[number // len(PALETTE) % len(MARKERS)]
            place = (self.cost.measure(group), group.gap or 0.0)
            axes.plot(*place, marker, color=color, markersize=4, label=group.name)
        # Names beside the points would cover each other.
        figure.set_figwidth(figure.get_figwidth() * 1.4)
        figure.set_figheight(max(figure.get_figheight(), 0.6 + 0.16 * len(self.groups)))
        figure.legend(loc="outside right upper", fontsize=6, frameon=False)

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

    def draw(self, figure: Figure) -> None:
        """Draw the gaps; a hollow point has the error of one seed."""
        names = [f"{group.name} ({len(group.gaps)})" for group in self.groups]
        figure.set_figwidth(4 + 0.06 * max(map(len, names)))
        figure.set_figheight(1.2 + 0.2 * len(self.groups))
        axes = figure.add_subplot()
        axes.set_title(self.title)
        for place, group in enumerate(self.groups):
            axes.errorbar(
                group.gap or 0.0,
                place,
                xerr=group.error or 0.0,
                color=ORANGE,
                fmt="o",
                markerfacecolor=ORANGE if group.error_is_own else "white",
                markersize=4,
                capsize=2,
                linewidth=1.2,
            )
        axes.axvline(0, color="#6b7280", linewidth=0.8)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel("nats, standard error; in brackets: seeds")


def pictures_of(
    groups: Sequence[SeedGroup], baselines: Mapping[str, str], seconds: Mapping[str, float]
) -> dict[str, ParetoPicture | GapPicture]:
    """Return the pictures by the name of their file.

    `baselines` are those of all groups, and `seconds` the training times of those that have one.
    """
    found: dict[str, ParetoPicture | GapPicture] = {}
    for cost in (BYTES, time_of(seconds), MEMORY):
        rated = [group for group in groups if group.gap is not None]
        shown = [group for group in rated if cost.measure(group) > 0]
        left_out = [group.name for group in rated if cost.measure(group) <= 0]
        if len(shown) > 1:
            title = f"Loss by {cost.file}"
            picture = ParetoPicture(title, shown, baselines, cost, left_out)
            found[f"loss_by_{cost.file}"] = picture
    gaps = [g for g in groups if g.gap is not None and g.name != baselines[g.name]]
    if gaps:
        names = {baselines[group.name] for group in gaps}
        name = "the baseline" if len(names) > 1 else min(names)
        found["gaps"] = GapPicture(f"Loss less that of {name}", gaps)
    return found
