"""The gradient-path benchmark as markdown, JSON and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from megatron.errors import ConfigError, missing_extra
from tools.bench.common.alpha_beta import AlphaBetaLink
from tools.bench.common.netlab import Network
from tools.bench.common.page_files import RESULTS, read_results, write_page
from tools.bench.gradient_path.rows import SPREAD, GradientPathRow, GradientPathTable
from tools.bench.gradient_path.targets import targets

COLUMNS = (
    "step, ms",
    "least",
    "/ dense",
    "predicted, ms",
    "step / predicted",
    "blocked, ms",
    "MB sent",
    "MB counted",
    "resample, ms",
    f"with 1/{SPREAD} of it",
)

SAVED = "1 - t / t_dense"
"""A column of image networks, as in the SAMO paper; dense numbers are as wide as the row's."""
TITLE_WIDTH = 40
"""Characters of a line above a panel."""


def as_markdown(table: GradientPathTable) -> str:
    """Return a heading, the measured link, and the rows."""
    alpha, bandwidth = 1e3 * table.link.alpha, 1e-6 / table.link.beta
    stored = ", ".join(f"{name} {share:.4f}" for name, share in table.stored.items())
    lines = [
        f"### {table.title}",
        "",
        f"{len(next(iter(table.turns.values())))} rounds; alpha {alpha:.2f} ms, 1 / beta "
        f"{bandwidth:.1f} MB/s, from all-reduces of two sizes.",
        *([f"f, stored entries over all: {stored}."] if stored else []),
        "",
    ]
    beside = table.has("dense-bf16") and not table.model
    columns = [*COLUMNS[:3], *(["/ dense-bf16"] if beside else []), *COLUMNS[3:]]
    columns += [SAVED] if table.model else []
    lines += [f"| method | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for row in table.rows:
        dense = table.ratio(row.method, "dense") if table.has("dense") else None
        cells = _cells(row, dense)
        if beside:
            cells.insert(3, f"{table.ratio(row.method, 'dense-bf16'):.2f}")
        if table.model:
            saved = table.saved(row.method)
            cells.append("" if saved is None else f"{saved:.1%}")
        lines.append(f"| {row.method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def memory_as_markdown(memory: Mapping[str, float]) -> str:
    """Return a table of bytes by method."""
    lines = ["### Peak memory of a rank", "", MEMORY_NOTE, ""]
    lines += ["| method | MB | bytes a parameter |", "|---|---:|---:|"]
    parameters = memory["parameters"]
    for name, peak in memory.items():
        if name != "parameters":
            lines.append(f"| {name} | {peak / 1e6:.1f} | {peak / parameters:.2f} |")
    return "\n".join(lines) + "\n"


MEMORY_NOTE = (
    "Of two ranks with emulated computing, a process for each method: the peak of resident memory "
    "in steps after the first, less what was resident before the model was made. Parameters, "
    "gradients and moments, and all that the method keeps or needs for a while; two resamples."
)


def write(
    folder: Path,
    tables: Sequence[GradientPathTable],
    memory: Mapping[str, float] | None,
    facts: Mapping[str, Any],
) -> None:
    """Write README.md, results.json and figure.png to `folder`."""
    found = targets(tables)
    values = {
        "facts": dict(facts),
        "tables": [asdict(table) for table in tables],
        "memory": dict(memory or {}),
        "targets": [asdict(target) for target in found],
    }
    parts = ["; ".join(f"{name} {value}" for name, value in facts.items()) + "\n"]
    parts += [as_markdown(table) for table in tables]
    parts += [memory_as_markdown(memory)] if memory else []
    parts += ["### Targets\n\n" + "".join(f"- {target}\n" for target in found)]
    draw = partial(plot, tables=tables)
    write_page(folder, text="\n".join(parts), values=values, draw=draw)


def read(folder: Path) -> tuple[list[GradientPathTable], dict[str, float] | None, dict[str, Any]]:
    """Return tables, memory and facts that `write` wrote.

    Raises `ConfigError` if there are none.
    """
    if not (folder / RESULTS).is_file():
        raise ConfigError(
            f"{folder / RESULTS}: no such file; leave --again out to measure everything"
        )
    values = read_results(folder)
    tables = [
        GradientPathTable(
            **each
            | {
                "network": Network(**each["network"]),
                "link": AlphaBetaLink(**each["link"]),
                "rows": [GradientPathRow(**row) for row in each["rows"]],
            }
        )
        for each in values["tables"]
    ]
    return tables, values["memory"] or None, values["facts"]


def plot(file: Path, tables: Sequence[GradientPathTable]) -> None:
    """Draw step times as bars, with blocked time dark and predictions as ticks.

    There is a panel for each table, and a row of panels for each protocol.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "log") from None
    protocols = list(dict.fromkeys(table.protocol for table in tables))
    columns = max(sum(table.protocol == p for table in tables) for p in protocols)
    tallest = max(len(table.rows) for table in tables)
    size = (3.2 * columns + 1.5, (0.25 * tallest + 1.0) * len(protocols))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(protocols), columns, squeeze=False)
    for protocol, axes in zip(protocols, panels, strict=True):
        mine = [table for table in tables if table.protocol == protocol]
        for axis in axes[len(mine) :]:
            axis.set_axis_off()
        for number, (table, axis) in enumerate(zip(mine, axes[: len(mine)], strict=True)):
            _panel(axis, table, named=number == 0)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    FigureCanvasAgg(figure).print_png(file)


def _panel(axis: Any, table: GradientPathTable, *, named: bool) -> None:
    places = list(range(len(table.rows)))
    steps = [1e3 * row.median for row in table.rows]
    blocked = [1e3 * row.blocked for row in table.rows]
    free = [step - wait for step, wait in zip(steps, blocked, strict=True)]
    axis.barh(places, free, color="#7fa7c9", label="step")
    axis.barh(places, blocked, left=free, color="#1f4e79", label="of it blocked")
    predicted = [1e3 * row.predicted for row in table.rows]
    axis.plot(predicted, places, "|", color="black", markersize=9, label="alpha-beta")
    axis.set_yticks(places, [row.method for row in table.rows] if named else [])
    axis.invert_yaxis()
    axis.set_title(fill(table.title, TITLE_WIDTH), fontsize=8)
    axis.set_xlabel("ms", fontsize=8)
    axis.tick_params(labelsize=7)


def _cells(row: GradientPathRow, over_dense: float | None) -> list[str]:
    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:.1f}"

    def mb(count: float | None) -> str:
        return "" if count is None else f"{1e-6 * count:.2f}"

    return [
        ms(row.median),
        ms(row.least),
        "" if over_dense is None else f"{over_dense:.2f}",
        ms(row.predicted),
        f"{row.median / row.predicted:.3f}",
        ms(row.blocked),
        mb(row.bytes_sent),
        mb(row.counted),
        ms(row.resample),
        ms(row.spread),
    ]
