"""The report of a study: tables as Markdown, the same with pictures as one HTML page, and PNGs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError
from megatron.metrics.log_line import memory_size, timestamp
from megatron.report.charts import BLUE, ORANGE, PALETTE
from megatron.report.drawing import can_draw, write_png
from megatron.report.page import chart_cards, document, table_card
from megatron.report.writing import write_page as write_html
from tools.bench.common.page_files import MARK, PAGE, write_page
from tools.studies.declaration import DeclaredStudy
from tools.studies.rows import StudyRow
from tools.studies.statistics import (
    Difference,
    Measure,
    SeedGroup,
    beaten_by,
    difference,
    frontier,
    groups_of,
    scatter_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HTML = "study.html"
OPENING = "Study: `"
"""How the Markdown of a report begins."""
WIDE = 5.0
"""Ratio of the largest to the least cost beyond which the axis is logarithmic."""
MARKERS = "os^Dv"


@dataclass(frozen=True)
class Cost:
    """A cost that losses are drawn against: its file, its title, and its value of a group."""

    file: str
    title: str
    unit: str
    measure: Measure


BYTES = Cost("bytes", "Payload of a step", "B", lambda group: group.payload)
COSTS = (
    BYTES,
    Cost("time", "Seconds of a step", "s", lambda group: group.step_seconds),
    Cost("memory", "Peak memory of a rank", "B", lambda group: group.peak_memory),
)


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """All that is reported of a study whose runs have these rows."""

    study: DeclaredStudy
    rows: Sequence[StudyRow]
    groups: Sequence[SeedGroup]
    pairs: Sequence[Difference]

    @property
    def reference(self) -> float:
        """Payload of the reference; NaN if it has no row or sends nothing."""
        name = self.study.reference
        payload = next((group.payload for group in self.groups if group.name == name), 0.0)
        return payload or math.nan

    @property
    def missing(self) -> list[str]:
        """Names of the runs that have no row."""
        done = {row.name for row in self.rows}
        return [run.name for run in self.study.runs if run.name not in done]


def report_of(study: DeclaredStudy, rows: Sequence[StudyRow]) -> StudyReport:
    """Compare the groups of a study."""
    groups = groups_of(rows, study.groups, study.baseline)
    by_name = {group.name: group for group in groups}
    scatter = scatter_of(group.gaps for group in groups if group.name != study.baseline)
    pairs = [
        difference(by_name[first], by_name[second], scatter=scatter)
        for first, second in study.pairs
        if first in by_name and second in by_name
    ]
    found = [pair for pair in pairs if pair is not None]
    return StudyReport(study=study, rows=rows, groups=groups, pairs=found)


def write_report(report: StudyReport, out: Path) -> list[Path]:
    """Write README.md, results.json, study.html and the pictures; return the files.

    A page that has a head of its own keeps it (`tools.bench.common.page_files`). Raises
    `ConfigError` rather than replace another README.md.
    """
    page = out / PAGE
    if page.is_file():
        text = page.read_text(encoding="utf-8")
        if MARK not in text and not text.startswith(OPENING):
            raise ConfigError(f"--out: {page} is no report of a study; give another folder")
    values = {
        "groups": [asdict(group) for group in report.groups],
        "pairs": [{**asdict(pair), "verdict": pair.verdict} for pair in report.pairs],
        "missing": report.missing,
    }
    write_page(out, text=as_markdown(report), values=values)
    pictures = pictures_of(report)
    write_html(out / HTML, as_html(report, pictures))
    files = [page, out / HTML]
    if can_draw():
        for name, picture in pictures.items():
            write_png(picture, out / f"{name}.png")
            files.append(out / f"{name}.png")
    return files


# ---- tables --------------------------------------------------------------------------------

COLUMNS = (
    "run",
    "ranks",
    "seeds",
    "payload",
    "/ reference",
    "step, ms",
    "memory",
    "clipped",
    "loss",
    "gap",
    "error",
    "beaten by",
)


def group_cells(report: StudyReport) -> list[list[str]]:
    """Return the cells of the table of groups, a line for each."""
    return [_cells(group, report) for group in report.groups]


def columns(report: StudyReport) -> list[str]:
    """Return the heads of the table of groups: those of `COLUMNS`, and the study's scores."""
    return [*COLUMNS[:-1], *(score.name for score in report.study.scores), COLUMNS[-1]]


def _cells(group: SeedGroup, report: StudyReport) -> list[str]:
    sending = [each for each in report.groups if each.payload]
    beaten = beaten_by(group, sending, BYTES.measure) if group.payload else None
    is_baseline = group.name == report.study.baseline
    cells = [group.name, str(group.ranks), _seeds(group)]
    cells += [memory_size(group.payload) if group.payload else f"{group.density:.3f} of all"]
    share = group.payload / report.reference
    cells += ["" if math.isnan(share) or not share else f"{share:.3f}"]
    cells += [f"{1e3 * group.step_seconds:.1f}", memory_size(group.peak_memory)]
    cells += [f"{group.clipped:.0%}"]
    cells += ["none" if group.loss is None else f"{group.loss:.4f}"]
    cells += ["" if group.gap is None or is_baseline else f"{group.gap:+.4f}"]
    own = "" if group.error_is_own else "~"
    cells += ["" if group.error is None or is_baseline else f"{own}{group.error:.4f}"]
    for score in report.study.scores:
        cells += [f"{group.scores[score.name]:.4f}" if score.name in group.scores else ""]
    return [*cells, "" if beaten is None else ", ".join(beaten) or "none"]


def _seeds(group: SeedGroup) -> str:
    failed = f" ({group.failed} failed)" if group.failed else ""
    return f"{len(group.losses)}{failed}"


def pair_cells(report: StudyReport) -> list[list[str]]:
    """Return the cells of the table of pairs."""
    return [
        [
            f"{pair.first} less {pair.second}",
            str(len(pair.seeds)),
            f"{pair.mean:+.4f}",
            "" if pair.error is None else f"{'~' * (len(pair.seeds) == 1)}{pair.error:.4f}",
            pair.verdict,
        ]
        for pair in report.pairs
    ]


PAIR_COLUMNS = ("pair", "seeds", "difference", "error", "verdict")


def note(report: StudyReport) -> list[str]:
    """Return what the columns mean, and what is missing."""
    name = report.study.reference
    reference = "" if name is None else f"/ reference: over the payload of {name}. "
    lines = [
        "Loss: validation loss at the end, nats, mean over seeds. Gap: loss less that of "
        f"{report.study.baseline} of the same seed; error: its standard error over seeds, after ~ "
        "that of one seed by the scatter of all groups that have several. Payload: size of a "
        "vector whose ring all-reduce makes a rank send as much along the data-parallel axis, mean "
        "of the steps of the run itself; a run of one rank has the share of the entries that it "
        f"would send. {reference}Step: median, on a machine that may have run several at a time. "
        "Beaten by: runs of at most the same payload whose loss is lower at the level of 5 % "
        "(Student's t of the paired differences, not corrected for the number of comparisons).",
    ]
    if report.missing:
        first = ", ".join(report.missing[:5])
        more = ", ..." if len(report.missing) > 5 else ""
        lines.append(f"Runs without a result: {len(report.missing)} ({first}{more}).")
    return lines


def as_markdown(report: StudyReport) -> str:
    """Return the tables as Markdown, with the pictures of the folder."""
    lines = [f"{OPENING}{report.study.path.name}`. {note(report)[0]}", ""]
    lines += [text for extra in note(report)[1:] for text in (extra, "")]
    lines += markdown_table(
        columns(report), group_cells(report), texts={0, len(columns(report)) - 1}
    )
    if report.pairs:
        lines += ["", *markdown_table(PAIR_COLUMNS, pair_cells(report), texts={0, 4})]
    lines += [""]
    if can_draw():
        pictures = pictures_of(report).items()
        lines += [f"![{picture.title}]({name}.png)\n" for name, picture in pictures]
    return "\n".join(lines)


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: set[int]
) -> list[str]:
    """Return the lines of a table; columns in `texts` are aligned to the left."""
    rule = "|".join("---" if place in texts else "---:" for place in range(len(head)))
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]


def as_html(report: StudyReport, pictures: dict[str, ParetoPicture | GapPicture]) -> str:
    """Return the report as a complete HTML document."""
    body = [f"<header><h1>{escape(report.study.title)}</h1></header>"]
    body += [f'<p class="card">{escape(text)}</p>' for text in note(report)]
    body += [table_card("Runs", group_cells(report), head=columns(report))]
    body += [table_card("Pairs", pair_cells(report), head=PAIR_COLUMNS)]
    body += [chart_cards(list(pictures.values()))]
    return document(report.study.title, body, written=timestamp(time.time()))


# ---- pictures ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParetoPicture:
    """Gap against a cost: a point for each group, and the Pareto front."""

    title: str
    groups: Sequence[SeedGroup]
    cost: Cost

    def draw(self, figure: Figure) -> None:
        """Draw the points with their names, and the front as steps."""
        from matplotlib.ticker import EngFormatter

        axes = figure.add_subplot()
        axes.set_title(self.title)
        axes.set(xlabel=self.cost.title.lower(), ylabel="loss less baseline")
        costs = [self.cost.measure(group) for group in self.groups]
        if max(costs) > WIDE * min(costs):
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(self.cost.unit, sep=" "))
        front = frontier(self.groups, self.cost.measure)
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


@dataclass(frozen=True)
class GapPicture:
    """Gaps to the baseline with their standard errors, a line for each group."""

    title: str
    groups: Sequence[SeedGroup]

    def draw(self, figure: Figure) -> None:
        """Draw the gaps; a hollow point has the error of one seed."""
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
        names = [f"{group.name} ({len(group.gaps)})" for group in self.groups]
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("nats, standard error; in brackets: seeds")


def pictures_of(report: StudyReport) -> dict[str, ParetoPicture | GapPicture]:
    """Return the pictures by the name of their file."""
    found: dict[str, ParetoPicture | GapPicture] = {}
    for cost in COSTS:
        shown = [g for g in report.groups if g.gap is not None and cost.measure(g) > 0]
        if len(shown) > 1:
            found[f"loss_by_{cost.file}"] = ParetoPicture(f"Loss by {cost.file}", shown, cost)
    baseline = report.study.baseline
    gaps = [g for g in report.groups if g.gap is not None and g.name != baseline]
    if gaps:
        found["gaps"] = GapPicture(f"Loss less that of {baseline}", gaps)
    return found
