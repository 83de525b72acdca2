"""The page of the study of settings of Radius: the gap of each to dense at equal bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.report.charts import PALETTE
from tools.bench.convergence.groups import RunGroup
from tools.bench.convergence.plot import Panel
from tools.bench.convergence.report import (
    ReportedFinding,
    Study,
    gap_and_error,
    loss_cells,
    size_of,
    table,
)
from tools.bench.convergence.rows import Row
from tools.bench.rolling.study import BASE, BUDGET, INTERVALS, of_paper, of_rolling, study

COLUMNS = ("run", "seeds", "T", "payload", "clipped", "validation loss", "gap", "error")


def tell(rows: Sequence[Row], groups: Sequence[RunGroup]) -> ReportedFinding:
    """Return the table of the groups, with the names of runs that have no row yet."""
    lines = table(COLUMNS, map(_cells, groups))
    done = {row["name"] for row in rows}
    missing = [run.name for run in study() if run.name not in done]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    return ReportedFinding(lines=lines, values={"missing": missing})


def _cells(group: RunGroup) -> list[str]:
    cells = [group.title, ", ".join(map(str, group.seeds)), str(group.interval or "")]
    return [*cells, f"{group.payload:.3f}", f"{group.clipped:.0%}", *loss_cells(group)]


def _preface(plan: Mapping[str, Any]) -> str:
    return (
        f"{size_of(plan)} Every run but the dense ones is forked from the dense run of its seed at "
        "20 % of the steps. Runs of one seed see the same batches. Each sends "
        f"{float(BUDGET):g} of the bytes of a dense fp32 step, in 16-bit values or 32-bit ones "
        "(payload: what was sent, mean over the steps after the fork, where each run also sends "
        "the whole model once). bf16 values: `--grad-wire bf16`, on two ranks; the others run on "
        "one rank. clip per step: `--radius-clip per-step`. Clipped: share of the steps whose norm "
        f"for clipping was above 1. {gap_and_error(plan)}"
    )


ROLLING = Study(
    folder="rolling",
    runs=study(),
    preface=_preface,
    tell=tell,
    panels=(
        Panel(
            title="interval: training loss less dense",
            groups=tuple(of_rolling(interval).group for interval in INTERVALS),
        ),
        Panel(
            title="width and clipping: training loss less dense",
            groups=(
                of_rolling(BASE).group,
                of_rolling(BASE, wire="bf16").group,
                of_rolling(BASE, clip="per-step").group,
                of_paper().group,
                of_paper(clip="per-step").group,
            ),
        ),
    ),
    colors={"radius": PALETTE[0], "rolling": PALETTE[1]},
)
