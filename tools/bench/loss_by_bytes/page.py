"""The page of the study of loss by bytes: the gap of each path, and which path beats it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.report.charts import PALETTE
from tools.bench.convergence.groups import RunGroup, gaps_of, standard_error, title_of
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
from tools.bench.convergence.study import DENSE
from tools.bench.loss_by_bytes.study import SEEDS, SHORTER, of_seed, study

COLUMNS = (
    "run",
    "ranks",
    "seeds",
    "payload",
    "/ dense-bf16",
    "validation loss",
    "gap",
    "error",
    "beaten by",
)
AS_BF16 = 2.0
"""Bytes of a dense fp32 step over those of a dense bf16 step."""


def tell(rows: Sequence[Row], groups: Sequence[RunGroup]) -> ReportedFinding:
    """Return the table of the groups by payload, with the names of runs that have no row yet."""
    groups = [group for group in groups if not group.name.startswith(SHORTER)]
    gaps = gaps_of(rows)
    gaps[DENSE] = dict.fromkeys((row["seed"] for row in rows if row["variant"] == DENSE), 0.0)
    beaten = {group.name: beaten_by(group, groups, gaps) for group in groups}
    shown = sorted(groups, key=lambda group: -group.payload)
    lines = table(COLUMNS, [[*_cells(group), _titles(beaten[group.name])] for group in shown])
    done = {row["name"] for row in rows}
    missing = [run.name for run in study() if run.name not in done]
    if missing:
        lines += ["", f"Not run yet: {len(missing)} runs, the next of them {missing[0]}."]
    return ReportedFinding(lines=lines, values={"beaten": beaten, "missing": missing})


def beaten_by(
    group: RunGroup, groups: Sequence[RunGroup], gaps: Mapping[str, Mapping[int, float]]
) -> list[str] | None:
    """Return the groups of at most the same payload whose loss is lower beyond doubt.

    That is by more than two standard errors of the mean difference over the seeds of both, which
    must be two at least. None if the group has one seed.
    """
    if len(gaps[group.name]) < 2:
        return None
    found: list[str] = []
    for other in groups:
        seeds = sorted(gaps[group.name].keys() & gaps[other.name].keys())
        if other.name == group.name or other.payload > group.payload or len(seeds) < 2:
            continue
        margins = [gaps[group.name][seed] - gaps[other.name][seed] for seed in seeds]
        if statistics.fmean(margins) > 2 * standard_error(margins):
            found.append(other.name)
    return found


def _titles(names: Sequence[str] | None) -> str:
    if names is None:
        return "not known"
    return "; ".join(map(title_of, names)) or "none"


def _cells(group: RunGroup) -> list[str]:
    cells = [group.title, str(group.ranks), ", ".join(map(str, group.seeds))]
    payload = [f"{group.payload:.3f}", f"{AS_BF16 * group.payload:.3f}"]
    return [*cells, *payload, *loss_cells(group)]


def _preface(plan: Mapping[str, Any]) -> str:
    return (
        f"{size_of(plan)} Every run but the dense ones is forked from the dense run of its seed at "
        "20 % of the steps. Runs of one seed see the same batches. Payload: bytes sent over those "
        "of a dense fp32 step on as many ranks, mean over the steps after the fork; those of top-k "
        "and lowrank+sparse grow with the ranks. dense, rolling and diloco with a format in the "
        "name: `--grad-wire`. rolling: T = 20, and its first step sends the whole model. lowrank: "
        "rank and density. roundrobin and diloco: interval in steps. Beaten by: the runs that send "
        "at most as many bytes and whose loss is lower by more than two standard errors of the "
        f"mean difference over the seeds of both. {gap_and_error(plan)}"
    )


LOSS_BY_BYTES = Study(
    folder="loss_by_bytes",
    runs=study(),
    preface=_preface,
    tell=tell,
    panels=(
        Panel(
            title="over a wire: training loss less dense",
            groups=tuple(
                run.group
                for run in of_seed(SEEDS[0])
                if run.variant.startswith(("dense_int", "rolling"))
            ),
        ),
        Panel(
            title="other paths: training loss less dense",
            groups=tuple(
                run.group
                for run in of_seed(SEEDS[0])
                if run.variant != DENSE and not run.variant.startswith(("dense", "rolling", "topk"))
            ),
        ),
    ),
    colors={"dense": PALETTE[2], "rolling": PALETTE[1], "lowrank": PALETTE[0]},
)
