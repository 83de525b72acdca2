"""The report of a study: tables as Markdown, the same with pictures as one HTML page, and PNGs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path

from megatron.errors import ConfigError
from megatron.metrics.log_line import byte_size, memory_size, timestamp
from megatron.report.drawing import can_draw, write_png
from megatron.report.page import chart_cards, document, link_to, table_card
from megatron.report.writing import REPORT
from megatron.report.writing import write_page as write_html
from tools.bench.common.page_files import MARK, PAGE, table, write_page
from tools.studies.declaration import DeclaredStudy
from tools.studies.pictures import BYTES, GapPicture, ParetoPicture, curves_of, pictures_of
from tools.studies.reproduction import RepeatedGroup, repeated_groups
from tools.studies.rows import StudyRow, read_rows
from tools.studies.statistics import (
    Difference,
    SeedGroup,
    beaten_by,
    difference,
    groups_of,
    scatter_of,
    training_seconds,
)

HTML = "study.html"
OPENING = "Study: `"
"""How the Markdown of a report begins, below its title."""


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """All that is reported of a study whose runs have these rows."""

    study: DeclaredStudy
    rows: Sequence[StudyRow]
    groups: Sequence[SeedGroup]
    pairs: Sequence[Difference]
    repeated: Sequence[RepeatedGroup] = ()
    against: str = ""
    """Name of the file of rows with which `repeated` compares."""

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


def report_of(
    study: DeclaredStudy, rows: Sequence[StudyRow], against: Path | None = None
) -> StudyReport:
    """Compare the groups of a study, also with the rows of the same runs in `against`."""
    groups = groups_of(rows, study.baselines)
    by_name = {group.name: group for group in groups}
    scatter = scatter_of(g.gaps for g in groups if g.name != study.baselines[g.name])
    pairs = [
        difference(by_name[first], by_name[second], scatter=scatter)
        for first, second in study.pairs
        if first in by_name and second in by_name
    ]
    found = [pair for pair in pairs if pair is not None]
    report = StudyReport(study=study, rows=rows, groups=groups, pairs=found)
    if against is None:
        return report
    others = [row for row in read_rows(against) if row.group in study.baselines]
    repeated = repeated_groups(rows, others, study.baselines)
    return replace(report, repeated=repeated, against=against.name)


def write_report(report: StudyReport, out: Path, runs: Path | None = None) -> list[Path]:
    """Write README.md, results.json, study.html and the pictures; return the files.

    study.html has links to the reports in the folders of the runs, as far as `runs` has them. A
    page that has a head of its own keeps it (`tools.bench.common.page_files`). Raises `ConfigError`
    rather than replace another README.md.
    """
    page = out / PAGE
    old = page.read_text(encoding="utf-8") if page.is_file() else ""
    # Below the title, which reports of earlier versions lack.
    if (
        old
        and MARK not in old
        and not old.startswith(OPENING)
        and f"\n\n{OPENING}" not in old[:999]
    ):
        raise ConfigError(f"--out: {page} is no report of a study; give another folder")
    title = "" if MARK in old else f"# {report.study.title}\n\n"
    values = {
        "groups": [asdict(group) for group in report.groups],
        "pairs": [{**asdict(pair), "verdict": pair.verdict} for pair in report.pairs],
        "missing": report.missing,
    }
    if report.repeated:
        values["repeated"] = [{**asdict(each), "verdict": each.verdict} for each in report.repeated]
    write_page(out, text=title + as_markdown(report), values=values)
    pictures = _pictures(report)
    links = {
        row.name: link_to(runs / row.name / REPORT, out)
        for row in report.rows
        if runs is not None and (runs / row.name / REPORT).is_file()
    }
    write_html(out / HTML, as_html(report, pictures, links))
    files = [page, out / HTML]
    if can_draw():
        for name, picture in pictures.items():
            write_png(picture, out / f"{name}.png")
            files.append(out / f"{name}.png")
    return files


# ---- tables --------------------------------------------------------------------------------

COLUMNS = ("run", "loss", "gap", "error")
"""Columns of a group before those of the scores."""
COSTS = ("payload", "/ reference", "entries", "step, ms", "memory", "clipped", "seeds", "ranks")
BEATEN_BY = "beaten by"


def group_table(report: StudyReport) -> tuple[list[str], list[list[str]]]:
    """Return the columns of the table of groups that hold something, and a line for each group."""
    lines = [_cells(group, report) for group in report.groups]
    head = [*COLUMNS, *(score.name for score in report.study.scores), *COSTS, BEATEN_BY]
    shown = [place for place in range(len(head)) if any(line[place] for line in lines)]
    return [head[place] for place in shown], [[line[place] for place in shown] for line in lines]


def _cells(group: SeedGroup, report: StudyReport) -> list[str]:
    sending = [each for each in report.groups if each.payload]
    beaten = beaten_by(group, sending, BYTES.measure) if group.payload else None
    is_baseline = group.name == report.study.baselines[group.name]
    cells = [group.name, "none" if group.loss is None else f"{group.loss:.4f}"]
    cells += ["" if group.gap is None or is_baseline else f"{group.gap:+.4f}"]
    own = "" if group.error_is_own else "~"
    cells += ["" if group.error is None or is_baseline else f"{own}{group.error:.4f}"]
    for score in report.study.scores:
        cells += [f"{group.scores[score.name]:.4f}" if score.name in group.scores else ""]
    cells += [byte_size(group.payload) if group.payload else ""]
    share = group.payload / report.reference
    cells += ["" if math.isnan(share) or not share else f"{share:.3f}"]
    cells += ["" if group.density is None else f"{group.density:.3f}"]
    cells += ["" if group.step_seconds is None else f"{1e3 * group.step_seconds:.1f}"]
    cells += ["" if group.peak_memory is None else memory_size(group.peak_memory)]
    cells += [f"{group.clipped:.0%}", _seeds(group), str(group.ranks)]
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
REPEATED_COLUMNS = ("run", "seeds", "gap", "gap there", "difference", "error", "verdict")
TEXTS = ("run", BEATEN_BY, "pair", "verdict")
"""Columns of words; all others are numbers."""


def repeated_cells(report: StudyReport) -> list[list[str]]:
    """Return the cells of the table of groups beside other rows."""
    return [
        [
            each.name,
            str(len(each.seeds)),
            f"{each.gap:+.4f}",
            f"{each.other:+.4f}",
            f"{each.difference:+.4f}",
            "" if each.error is None else f"{each.error:.4f}",
            each.verdict,
        ]
        for each in report.repeated
    ]


def repeated_note(report: StudyReport) -> str:
    """Return what the table of groups beside other rows shows."""
    apart = sum(each.is_apart for each in report.repeated)
    return (
        f"The same runs in {report.against}, from another machine or an earlier time: gaps over "
        "the seeds that both files have. Error: of their difference, by the scatter of gaps over "
        f"seeds. {apart} of {len(report.repeated)} differ at the level of 5 %."
    )


def meanings(report: StudyReport) -> str:
    """Return what the columns of the table of groups mean."""
    columns, _ = group_table(report)
    others = {
        "payload": "Payload: size of a vector whose ring all-reduce makes a rank send as much "
        "along the data-parallel axis, mean of the steps of the run itself.",
        "/ reference": f"/ reference: over the payload of {report.study.reference}.",
        "entries": "Entries: share of the entries of the gradients that a step sends, or would "
        "send on several ranks.",
        "step, ms": "Step: median, on a machine that may have run several at a time.",
        BEATEN_BY: "Beaten by: runs of at most the same payload whose loss is lower at the level "
        "of 5 % (Student's t of the paired differences, not corrected for the number of "
        "comparisons).",
    }
    first = (
        "Loss: validation loss at the end, nats, mean over seeds. Gap: loss less that of "
        f"{_baselines(report)} of the same seed; error: its standard error over seeds, after ~ "
        "that of one seed by the scatter of all groups that have several."
    )
    return " ".join([first, *(others[name] for name in columns if name in others)])


def remarks(report: StudyReport) -> list[str]:
    """Return what the rows lack."""
    lines: list[str] = []
    if old := [row.name for row in report.rows if row.step_seconds is None]:
        names = f"{len(old)} ({_first(old)})" if len(old) < len(report.rows) else "all"
        lines.append(
            "Rows converted from an earlier format, which held no step time, memory, commit and "
            f"processor: {names}."
        )
    if report.missing:
        names = f"{len(report.missing)} ({_first(report.missing)})"
        lines.append(f"Runs without a result: {names}.")
    return lines


def _baselines(report: StudyReport) -> str:
    """Return the baseline of the study, and the groups that have another."""
    others: dict[str, list[str]] = {}
    for group, baseline in report.study.baselines.items():
        if baseline not in (group, report.study.baseline):
            others.setdefault(baseline, []).append(group)
    each = "; ".join(f"of {name} for {_first(found)}" for name, found in others.items())
    return f"{report.study.baseline} ({each})" if each else report.study.baseline


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)


def as_markdown(report: StudyReport) -> str:
    """Return the tables as Markdown, with the pictures of the folder."""
    lines = [f"{OPENING}{report.study.path.name}`.", "", *table(*group_table(report), texts=TEXTS)]
    lines += [text for remark in remarks(report) for text in ("", remark)]
    if report.pairs:
        lines += ["", *table(PAIR_COLUMNS, pair_cells(report), texts=TEXTS)]
    if report.repeated:
        lines += ["", repeated_note(report), ""]
        lines += table(REPEATED_COLUMNS, repeated_cells(report), texts=TEXTS)
    lines += [""]
    if can_draw():
        for name, picture in _pictures(report).items():
            text = caption(picture, _first)
            lines += [f"![{picture.title}]({name}.png)\n", *([f"{text}\n"] if text else [])]
    return "\n".join([*lines, meanings(report), ""])


def _pictures(report: StudyReport) -> dict[str, ParetoPicture | GapPicture]:
    return pictures_of(report.groups, report.study.baselines, training_seconds(report.rows))


def caption(picture: ParetoPicture | GapPicture, listed: Callable[[Sequence[str]], str]) -> str:
    """Return what is to be read below a picture; `listed` writes the names of groups."""
    if isinstance(picture, GapPicture):
        return ""
    texts = [picture.cost.note] if picture.cost.note else []
    if names := picture.left_out:
        texts.append(f"Left out, since {picture.cost.lacking}: {len(names)} ({listed(names)}).")
    return " ".join(texts)


def as_html(
    report: StudyReport,
    pictures: dict[str, ParetoPicture | GapPicture],
    links: Mapping[str, str],
) -> str:
    """Return the report as a complete HTML document.

    `links` are the addresses of the runs' own reports by name.
    """
    body = [f"<header><h1>{escape(report.study.title)}</h1></header>"]
    head, lines = group_table(report)
    body += [table_card("Runs", lines, head=head)]
    body += [f'<p class="card">{escape(text)}</p>' for text in remarks(report)]
    drawn, curves = list(pictures.values()), curves_of(report.groups, report.rows)
    captions = [*(caption(each, ", ".join) for each in drawn), *("" for _ in curves)]
    body += [chart_cards([*drawn, *curves], captions=captions)]
    body += [table_card("Pairs", pair_cells(report), head=PAIR_COLUMNS)]
    if report.repeated:
        body += [f'<p class="card">{escape(repeated_note(report))}</p>']
        body += [table_card("Made again", repeated_cells(report), head=REPEATED_COLUMNS)]
    if links:
        names = (f'<a href="{escape(link)}">{escape(name)}</a>' for name, link in links.items())
        body += [f'<p class="card">Reports of the runs: {", ".join(names)}</p>']
    body += ['<details class="card"><summary>What the columns mean</summary>']
    body += [f"<p>{escape(meanings(report))}</p></details>"]
    return document(report.study.title, body, written=timestamp(time.time()))
