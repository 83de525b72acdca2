"""The benchmark of pruned layers as markdown, JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron.report.charts import PALETTE
from tools.bench.common.figures import plain_axes, save
from tools.bench.common.page_files import write_page
from tools.bench.sparse_linear.kernels import DENSE

PASSES = ("forward", "backward")
NOTE = (
    "Milliseconds (times dense): medians over rounds in which all kernels take turns, of each "
    "ratio too. Backward is both gradients; sparse kernels find the weights' only where a weight "
    "exists. Indices of W and W^T are made beforehand, which a training step that changes W "
    "would have to pay for as well."
)


@dataclass(frozen=True, kw_only=True)
class SparseLinearRow:
    """One kernel at one size.

    `seconds` is the median. `ratio` is the median of its seconds divided by those of the dense
    kernel in the same round.
    """

    dtype: str
    size: int
    one_pass: str
    kernel: str
    seconds: float
    least_seconds: float
    ratio: float


@dataclass(frozen=True)
class Absence:
    """A kernel that is not available, with the reason."""

    dtype: str
    one_pass: str
    kernel: str
    size: int
    reason: str


@dataclass
class Report:
    """The measurements, with facts about their machine."""

    facts: dict[str, Any]
    rows: list[SparseLinearRow] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)

    @property
    def dtypes(self) -> list[str]:
        """Dtypes in the order of measurement."""
        return list(dict.fromkeys(row.dtype for row in self.rows))

    def of(self, dtype: str, one_pass: str) -> list[SparseLinearRow]:
        """Return the rows of a panel."""
        return [row for row in self.rows if (row.dtype, row.one_pass) == (dtype, one_pass)]

    def as_markdown(self, dtype: str) -> str:
        """Return a heading and a table for each pass, and the missing kernels."""
        lines = [f"### {dtype}", ""]
        for one_pass in PASSES:
            rows = self.of(dtype, one_pass)
            names = list(dict.fromkeys(row.kernel for row in rows))
            lines += [f"| {one_pass}, ms | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
            for size in dict.fromkeys(row.size for row in rows):
                cells = {row.kernel: _cell(row) for row in rows if row.size == size}
                mine = " | ".join(cells.get(name, "") for name in names)
                lines.append(f"| {size} x {size} | {mine} |")
            lines.append("")
        return "\n".join(lines + self._missing(dtype)) + "\n"

    def _missing(self, dtype: str) -> list[str]:
        found: dict[tuple[str, str, str], list[int]] = {}
        for absence in self.absences:
            if absence.dtype == dtype:
                key = (absence.kernel, absence.one_pass, absence.reason)
                found.setdefault(key, []).append(absence.size)
        return [
            f"- {kernel}, {one_pass}, is not there at {', '.join(map(str, sizes))}: {reason}"
            for (kernel, one_pass, reason), sizes in found.items()
        ]


def write(folder: Path, report: Report) -> None:
    """Write README.md, results.json and figure.png to `folder`."""
    values = {
        "facts": report.facts,
        "rows": [asdict(row) for row in report.rows],
        "absences": [asdict(absence) for absence in report.absences],
    }
    facts = "; ".join(f"{name} {value}" for name, value in report.facts.items())
    parts = [facts + "\n", NOTE + "\n", *map(report.as_markdown, report.dtypes)]
    draw = partial(_plot, report=report)
    write_page(folder, text="\n".join(parts), values=values, draw=draw)


def _cell(row: SparseLinearRow) -> str:
    ms = f"{1e3 * row.seconds:.3g}"
    return ms if row.kernel == DENSE else f"{ms} ({row.ratio:.2f})"


def _plot(file: Path, report: Report) -> bool:
    """Draw milliseconds over size, both logarithmic; a row per dtype, a column per pass.

    Returns False if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 3.6 * len(report.dtypes)), dpi=130, layout="constrained")
    panels = figure.subplots(len(report.dtypes), len(PASSES), squeeze=False, sharey="row")
    for dtype, axes in zip(report.dtypes, panels, strict=True):
        for one_pass, axis in zip(PASSES, axes, strict=True):
            _panel(axis, report.of(dtype, one_pass))
            axis.set_title(f"{dtype}, {one_pass}", loc="left", fontsize=11)
        axes[0].set_ylabel("ms")
        axes[0].legend(frameon=False, fontsize=9)
    save(figure, file)
    return True


def _panel(axis: Any, rows: Sequence[SparseLinearRow]) -> None:
    sizes = list(dict.fromkeys(row.size for row in rows))
    names = list(dict.fromkeys(row.kernel for row in rows))
    for name, color in zip(names, PALETTE, strict=False):
        mine = [row for row in rows if row.kernel == name]
        ms = [1e3 * row.seconds for row in mine]
        axis.plot([row.size for row in mine], ms, "o-", color=color, markersize=4, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [f"{size}\u00b2" for size in sizes])
    axis.set_xlabel("weights")
    plain_axes(axis)
