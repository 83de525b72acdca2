"""The page of all tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.planner.replay import axonn, network, radius, samo, samo_images
from tools.planner.replay.axonn_scaling import scaling
from tools.planner.replay.rows import FAR, ReplayTable

SOURCES = ("network", "radius", "axonn", "samo")
INTRODUCTION = """\
# Simulated steps beside measured ones

    python tools/simulate.py --paper all --out tools/planner/replay

plays the runs of the papers, and of our own benchmarks on limited links, with the cost model of
`tools/plan.py` (`tools/planner`): passes are FLOPs at a share of peak, messages and collectives
alpha-beta links, schedules are played event by event.

A row is `fitted` if a constant was made from it, else `predicted`. A machine has at most two fitted
constants: the share of peak that passes reach, and the share of a node's network rate that its GPUs
reach. Summit has a pair for each of its two papers, which ran other software two years apart; the
last table takes AxoNN's for SAMO. What a paper does not tell of how it sent and where ranks lay is
assumed, below its table, and was chosen knowing its figures: `predicted` means no more than that
no constant was made from the row. Errors are percent of what was measured, of percentages points;
of a range, how far outside it. Nothing of the papers was run again here.
[A page](shapes.md) compares one share of peak for all passes with a law of the shapes of products.
"""


def tables(source: str) -> list[ReplayTable]:
    """Return the tables of one of `SOURCES`, or of all."""
    found: list[ReplayTable] = []
    if source in ("network", "all"):
        found += network.tables()
    if source in ("radius", "all"):
        found += radius.tables(radius.fitted())
    if source in ("axonn", "samo", "all"):
        machine = axonn.fitted()
        found += [axonn.ablation(machine), scaling(machine)] if source != "samo" else []
        if source != "axonn":
            own = samo.fitted()
            found += [*samo.tables(own, machine), samo_images.figure_5(own)]
    return found


def lines(found: Sequence[ReplayTable]) -> Iterator[str]:
    """Yield the tables as Markdown."""
    yield from INTRODUCTION.splitlines()
    yield ""
    yield "| table | fitted | predicted |"
    yield "|---|---:|---|"
    for each in found:
        yield f"| {each.name} | {len(each.constants)} | {each.summary} |"
    yield ""
    yield from what_is_off(found)
    for each in found:
        yield from each.lines()


def what_is_off(found: Sequence[ReplayTable]) -> Iterator[str]:
    """Yield a section of predictions that miss."""
    off = [(table, [row for row in table.rows if row.is_off]) for table in found]
    if not any(rows for _, rows in off):
        return
    yield "### What does not come out"
    yield ""
    yield (
        f"Predictions that are off by more than {FAR} % or points, or opposite to what the source "
        "claims; why is below its table."
    )
    yield ""
    for table, rows in off:
        for row in rows:
            claim = "" if row.holds else "; the claim does NOT hold"
            yield (
                f"- {table.name}: {row.what}: {row.told} {row.unit}, simulated "
                f"{row.simulated:.{row.digits}f} ({row.shown}){claim}"
            )
    yield ""


def write(found: Sequence[ReplayTable], folder: Path) -> None:
    """Write README.md and results.json to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines(found)).rstrip("\n") + "\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    data = {"tables": [each.data for each in found]}
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
