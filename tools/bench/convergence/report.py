"""Page, table and plots of a convergence study, from its results file alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from tools.bench.common.page_files import FIGURE, PAGE, write_page
from tools.bench.convergence.groups import RunGroup, groups_of
from tools.bench.convergence.model import HEADS, HIDDEN, LAYERS, VOCABULARY
from tools.bench.convergence.plot import Panel, write_plot
from tools.bench.convergence.rows import Row, read_rows
from tools.bench.convergence.study import StudyRun


@dataclass(frozen=True, kw_only=True)
class ReportedFinding:
    """The findings of a study: lines of the page, and values beside `groups` in its file."""

    lines: list[str]
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A declared set of runs, those first that matter most, and what its page is made of.

    `folder` of `tools/bench` has its program and its results. `colors` of the dots in the plot go
    by the first word of a variant. `draw` writes another picture of the rows to a file, False where
    matplotlib is missing; `caption` says what the picture shows.
    """

    folder: str
    runs: tuple[StudyRun, ...]
    preface: Callable[[Mapping[str, Any]], str]
    tell: Callable[[Sequence[Row], Sequence[RunGroup]], ReportedFinding]
    panels: tuple[Panel, ...]
    colors: Mapping[str, str]
    draw: Callable[[Path, Sequence[Row]], bool] | None = None
    caption: str = "Loss less that of the dense run"


def write_report(results: Path, out: Path, study: Study, *, log: Callable[[str], None]) -> None:
    """Write the study's page, its values as JSON and, with matplotlib, its plot into `out`.

    Raises `ConfigError` where there are no results.
    """
    rows = read_rows(results)
    if not rows:
        raise ConfigError(f"--results: {results} holds no finished run")
    order = {run.group: number for number, run in reversed(list(enumerate(study.runs)))}
    groups = sorted(groups_of(rows), key=lambda group: order.get(group.name, len(order)))
    told = study.tell(rows, groups)
    groups_as_json = [asdict(group) for group in groups]
    values = {"plan": rows[0]["plan"], "groups": groups_as_json, **told.values}

    def draw(path: Path) -> bool:
        if study.draw is not None:
            return study.draw(path, rows)
        return write_plot(path, rows, groups, panels=study.panels, colors=study.colors)

    write_page(out, text=as_markdown(rows, study, told), values=values, draw=draw)
    log(f"{out / PAGE}: {len(rows)} of {len(study.runs)} runs")


# ---- the page ------------------------------------------------------------------------------


def as_markdown(rows: Sequence[Row], study: Study, told: ReportedFinding) -> str:
    """Return the page: how it was made, and what the study tells."""
    plan = rows[0]["plan"]
    lines = [study.preface(plan), ""]
    declared = {run.name for run in study.runs}
    found = sum(row["name"] in declared for row in rows)
    lines += [f"{found} of {len(study.runs)} runs are in. Made by", ""]
    lines += [f"    {_command(plan, study)}", ""]
    lines += ["and `--report`.", "", f"![{study.caption}]({FIGURE})", ""]
    return "\n".join([*lines, *told.lines, ""])


def size_of(plan: Mapping[str, Any]) -> str:
    """Model, text and optimizer of a page, as a sentence."""
    batch = plan["tokens"] // plan["sequence"]
    return (
        f"GPT of {LAYERS} layers x {HIDDEN}, {HEADS} heads, a byte-level BPE of {VOCABULARY:,} "
        f"entries, wikipedia text; {plan['steps']:,} steps of {batch} x {plan['sequence']} tokens, "
        f"{plan['dtype']} parameters with fp32 sums, AdamW, learning rate 1e-3 to 1e-4 (cosine), "
        "weight decay 0.1, clipping at 1, no dropout."
    )


def gap_and_error(plan: Mapping[str, Any]) -> str:
    """Return the definition of gap and error for a page."""
    return (
        "Gap: validation loss (nats a token) less that of the dense run of the same seed "
        f"over {plan['valid_tokens']:,} tokens; error: its standard error over seeds, after ~ that "
        "of one seed by the scatter of all groups that have several."
    )


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table whose first column is text and whose others are numbers."""
    rule = f"|---|{'---:|' * (len(header) - 1)}"
    named, *rest = (f"| {' | '.join(cells)} |" for cells in (header, *lines))
    return [named, rule, *rest]


def loss_cells(group: RunGroup) -> list[str]:
    """Validation loss, gap and error."""
    loss = f"{statistics.fmean(group.losses):.4f}" if group.losses else "diverged"
    gap = "" if group.gap is None else f"{group.gap:+.4f}"
    approximately = "" if group.error_is_own else "~"
    return [loss, gap, "" if group.error is None else f"{approximately}{group.error:.4f}"]


def _command(plan: Mapping[str, Any], study: Study) -> str:
    sizes = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in plan.items())
    return f"python -m tools.bench.{study.folder}.run --text-folder TEXT --jobs 2 {sizes}"
