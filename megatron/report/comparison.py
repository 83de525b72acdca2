"""Comparison of two runs: where their losses differ, and by how much."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.metrics.log_line import byte_size, memory_size, three_digits, timestamp
from megatron.report.charts import comparison_charts
from megatron.report.drawing import can_draw, write_png
from megatron.report.facts import (
    bytes_sent,
    differing_settings,
    logged_loss,
    median_step,
    peak_memory,
    training_time,
)
from megatron.report.page import comparison_page, link_to
from megatron.report.runs import RunData
from megatron.report.writing import REPORT, write_page

COMPARISON = "comparison"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences between the recorded losses of two runs.

    `first_difference` is the first common step whose losses differ by more than the tolerance
    (None: no such step). `max_difference` is over the common steps, infinite if only one loss is a
    number, at step `max_at`.
    """

    common: int
    only_in_first: int
    only_in_second: int
    first_difference: int | None
    max_difference: float
    max_at: int | None

    @property
    def equal(self) -> bool:
        """True if both runs have the same steps, at least one, and no loss differs."""
        same_steps = self.common > 0 and self.only_in_first == self.only_in_second == 0
        return same_steps and self.first_difference is None

    def describe(self) -> str:
        """Return one line for people."""
        missing = ""
        if self.only_in_first or self.only_in_second:
            missing = f"; steps only in the first: {self.only_in_first}, "
            missing += f"only in the second: {self.only_in_second}"
        if self.first_difference is None:
            within = "" if self.max_difference == 0 else f" (at most {self.max_difference:.2g})"
            return f"{self.common} common steps, no loss differs{within}{missing}"
        return (
            f"{self.common} common steps, first differing step {self.first_difference}, "
            f"max difference {self.max_difference:.2g} at step {self.max_at}{missing}"
        )


def compare(first: RunData, second: RunData, *, tolerance: float = 0.0) -> Comparison:
    """Compare losses step by step; NaN equals NaN. With tolerance 0 every last bit counts."""
    mine = dict(zip(first.iterations, first.steps["loss"], strict=True))
    theirs = dict(zip(second.iterations, second.steps["loss"], strict=True))
    common = [step for step in first.iterations if step in theirs]
    differences = [(step, _difference(mine[step], theirs[step])) for step in common]
    largest = max(differences, key=lambda pair: pair[1], default=(None, 0.0))
    return Comparison(
        common=len(common),
        only_in_first=len(mine) - len(common),
        only_in_second=len(theirs) - len(common),
        first_difference=next((step for step, d in differences if d > tolerance), None),
        max_difference=largest[1],
        max_at=largest[0] if largest[1] > 0 else None,
    )


def write_comparison(runs: Sequence[RunData], folder: str | Path) -> Path:
    """Write comparison.html with the charts of `runs` into `folder`, which must exist.

    With matplotlib, comparison.png has the losses alone.
    """
    folder = Path(folder)
    labels = _labels(runs)
    charts = comparison_charts(runs, labels)
    path = folder / f"{COMPARISON}.html"
    rows = _rows(runs, labels)
    title = " / ".join(labels)
    settings = [("setting", *labels), *differing_settings(runs)]
    links = {
        label: link_to(run.folder / REPORT, folder)
        for run, label in zip(runs, labels, strict=True)
        if (run.folder / REPORT).is_file()
    }
    page = comparison_page(title, charts, rows, settings, links, written=timestamp(time.time()))
    write_page(path, page)
    if can_draw():
        write_png(charts[0], folder / f"{COMPARISON}.png")
    return path


def _difference(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    difference = abs(a - b)
    return math.inf if math.isnan(difference) else difference


def _labels(runs: Sequence[RunData]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _rows(runs: Sequence[RunData], labels: Sequence[str]) -> list[tuple[str, ...]]:
    rows = [
        ("run", "steps", "training loss", "validation loss", "time", "median step")
        + ("sent", "peak memory", "restarts", "against the first")
    ]
    for run, label in zip(runs, labels, strict=True):
        valid = run.evaluations["valid"]
        seconds, peak = median_step(run), peak_memory(run)
        rows.append(
            (
                label,
                f"{len(run.iterations):,}",
                f"{logged_loss(run)[0]:.4f}",
                f"{valid[-1][1]:.4f}" if valid else "-",
                training_time(run),
                f"{1000 * seconds:.1f} ms{_ratio(run, runs[0], median_step)}" if seconds else "-",
                byte_size(bytes_sent(run)) + _ratio(run, runs[0], bytes_sent),
                f"{memory_size(peak)}{_ratio(run, runs[0], peak_memory)}" if peak else "-",
                str(run.restarts),
                "" if run is runs[0] else compare(runs[0], run).describe(),
            )
        )
    return rows


def _ratio(run: RunData, first: RunData, value: Callable[[RunData], float]) -> str:
    """Return a value of a run over that of the first one, to be put behind the value."""
    if run is first or not value(first):
        return ""
    return f" (x{three_digits(value(run) / value(first))})"
