"""The page of the Radius study: gaps, and whether the rolling schedule halves them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.report.charts import PALETTE
from tools.bench.convergence.groups import RunGroup, title_of
from tools.bench.convergence.plot import Panel
from tools.bench.convergence.radius import study
from tools.bench.convergence.report import (
    ReportedFinding,
    Study,
    gap_and_error,
    loss_cells,
    size_of,
    table,
)
from tools.bench.convergence.rows import Row
from tools.bench.convergence.study import REFERENCE_STEPS
from tools.studies.statistics import standard_error

COLUMNS = ("run", "seeds", "T", "payload", "largest", "clipped", "validation loss", "gap", "error")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal that a group's gap is at most half of plain Radius's.

    `margin` is the mean over seeds of half of plain Radius's gap minus this group's gap, `error`
    its standard error. The goal is met if the margin exceeds twice the error.
    """

    name: str
    against: str
    ratio: float
    margin: float
    error: float
    seeds: int

    @property
    def met(self) -> bool:
        """Whether the margin exceeds twice its standard error."""
        return self.margin > 2 * self.error


def goals_of(groups: Sequence[RunGroup]) -> list[Goal]:
    """Compare each rolling group with plain Radius of its density, start and beta2.

    The comparison is over the seeds of both, two at least.
    """
    found = []
    for group in groups:
        if not group.variant.startswith("rolling_"):
            continue
        plain_name = group.name.replace(group.variant, group.variant.split("-")[0]).replace(
            "rolling_", "radius_"
        )
        plain = next((other for other in groups if other.name == plain_name), None)
        if plain is None or plain.seeds != group.seeds or len(group.gaps) < 2:
            continue
        margins = [theirs / 2 - ours for theirs, ours in zip(plain.gaps, group.gaps, strict=True)]
        found.append(
            Goal(
                name=group.name,
                against=plain.name,
                ratio=statistics.fmean(group.gaps) / statistics.fmean(plain.gaps),
                margin=statistics.fmean(margins),
                error=standard_error(margins),
                seeds=len(margins),
            )
        )
    return found


def tell(rows: Sequence[Row], groups: Sequence[RunGroup]) -> ReportedFinding:
    """Return the table and the goal."""
    goals = goals_of(groups)
    lines = table(COLUMNS, map(_cells, groups))
    if goals:
        lines += ["", "| | gap / gap of plain Radius | half of that gap less this one | |"]
        lines += ["|---|---:|---:|---|"]
    for goal in goals:
        verdict = "at most half, beyond twice the error" if goal.met else "not shown"
        lines.append(
            f"| {title_of(goal.name)} | {goal.ratio:.2f} | {goal.margin:+.4f} "
            f"± {goal.error:.4f} | {verdict} |"
        )
    values = {"goals": [{**asdict(goal), "met": goal.met} for goal in goals]}
    return ReportedFinding(lines=lines, values=values)


def _preface(plan: Mapping[str, Any]) -> str:
    return (
        f"{size_of(plan)} Every run but the dense ones, and demo 32, which takes steps of plain "
        "SGD from the beginning, is forked from the dense run of its seed and beta2, at 20 % of "
        "the steps unless said. Runs of one seed see the same batches. T is in steps; an interval "
        f"in a name is that of a run of {REFERENCE_STEPS:,}. Payload: bytes sent over those of a "
        "dense fp32 step, mean and largest of the steps after the fork. Clipped: share of the "
        f"steps whose gradient norm was above 1. {gap_and_error(plan)}"
    )


def _cells(group: RunGroup) -> list[str]:
    cells = [group.title, ", ".join(map(str, group.seeds)), str(group.interval or "")]
    cells += [f"{group.payload:.3f}", f"{group.largest_payload:.3f}", f"{group.clipped:.0%}"]
    return [*cells, *loss_cells(group)]


def _panel(density: str) -> Panel:
    return Panel(
        title=f"density {density}: training loss less dense",
        groups=(f"radius_{density}", f"rolling_{density}-update", f"rolling_{density}-seeded"),
    )


RADIUS = Study(
    folder="convergence",
    runs=study(),
    preface=_preface,
    tell=tell,
    panels=(_panel("0.1"), _panel("0.4")),
    colors={"radius": PALETTE[0], "rolling": PALETTE[1]},
)
