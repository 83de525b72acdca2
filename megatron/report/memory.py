"""The memory of a training step in a report, from the ledger that tools/profile_memory.py writes.

A ledger may be torn, or come from another version: whatever is not as expected is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.report.charts import PALETTE
from megatron.report.drawing import AreaChart, Picture, PieChart

MB = 1e6
WAYS = ("planned", "tracked", "measured")
KINDS = ("model", "optimizer", "forward", "backward", "other")
PAPER = "paper"
PAPER_KINDS = ("model", "optimizer", "activations", "statistics")
ROWS = {
    "model": "model",
    "optimizer": "optimizer",
    "stored": "stored by a microbatch",
    "forward": "forward, at the peak",
    "backward": "backward, at the peak",
    "other": "other, at the peak",
    "activations": "activations",
    "statistics": "statistics",
    "total": "peak",
}
"""Names of the rows of a ledger by their keys, those of `--accounting paper` among them."""
MOST_SAMPLES = 400
"""Operators that the timeline shows; of more, each run of neighbours gives its largest."""


def memory_table(ledger: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the heading and the rows of a ledger's totals in MB of 10^6 bytes; empty without any.

    Below the totals, the operator of the peak and the reason for each column that is missing.
    """
    columns = _columns(ledger)
    rows = [
        (name, *(_megabytes(column.get(key)) for column in columns.values()))
        for key, name in ROWS.items()
        if any(key in column for column in columns.values())
    ]
    return [("MB", *columns), *rows, *_remarks(ledger)] if rows else []


def memory_charts(ledger: Mapping[str, Any]) -> list[Picture]:
    """Return a pie of the bytes at the peak by kind, and the timeline if the ledger has one."""
    charts: list[Picture] = []
    for way, column in _columns(ledger).items():
        kinds = PAPER_KINDS if way == PAPER else KINDS
        shares = {kind: column[kind] for kind in kinds if column.get(kind, 0) > 0}
        # Of the planned and the tracked peak the second; a measured one is not known by kind.
        if shares and (way == PAPER or "forward" in column):
            charts = [PieChart(f"Memory at the peak, {way}", shares, PALETTE)]
    samples = ledger.get("samples")
    if isinstance(samples, list) and (steps := [each for each in samples if _is_sample(each)]):
        size = math.ceil(len(steps) / MOST_SAMPLES)
        x = range(0, len(steps), size)
        largest = [max(steps[first : first + size], key=_total) for first in x]
        layers = {kind: [step[kind] for step in largest] for kind in KINDS}
        phases = [str(step.get("phase")) for step in largest]
        charts.append(AreaChart("Memory over a step, tracked", x, layers, PALETTE, phases))
    return charts


def _columns(ledger: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the bytes of each column; the accounting of the report has one column, the ledger."""
    found = {PAPER: ledger} if ledger.get("accounting") == PAPER else ledger
    return {
        way: {key: column[key] for key in ROWS if _is_size(column.get(key))}
        for way in (*WAYS, PAPER)
        if isinstance(column := found.get(way), dict)
    }


def _remarks(ledger: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    peak = ledger.get("peak_at")
    if isinstance(peak, dict):
        module = peak.get("module") or "head"
        yield "peak at", f"{peak.get('operator')} of {peak.get('phase')}, in {module}"
    elif peak is not None:
        yield "peak at", str(peak)
    missing = ledger.get("missing")
    for way, reason in missing.items() if isinstance(missing, dict) else ():
        yield f"{way} is missing", str(reason)


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _is_sample(step: object) -> bool:
    return isinstance(step, dict) and all(_is_size(step.get(kind)) for kind in KINDS)


def _total(step: Mapping[str, Any]) -> float:
    return sum(step[kind] for kind in KINDS)


def _megabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / MB:,.3f}"
