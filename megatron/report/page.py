"""The HTML around charts and tables. Every text from a file is escaped here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from megatron.report.charts import run_charts
from megatron.report.drawing import NEEDS_MATPLOTLIB, Chart, Picture, as_svg, can_draw
from megatron.report.facts import (
    config_table,
    evaluated,
    evaluation_table,
    phase_table,
    run_table,
    tiles,
)
from megatron.report.memory import memory_charts, memory_table
from megatron.report.runs import RunData

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")

_LONGEST_FIGURE = 24
_FIGURE = re.compile(r"[-+~]?\d|(-|nan|-?inf|none|)$")
"""How the cells of a column of numbers begin."""
_MOST_COLUMNS = 4
"""Columns beside names that a telephone shows as a table; of more, each row is a block."""


def run_page(run: RunData, *, written: str) -> str:
    """Return the report of one run as a complete HTML document; `written` is the displayed time."""
    state = run.status.state if run.status else ""
    badge = f'<span class="state {escape(state)}">{escape(state)}</span>' if state else ""
    body = [
        f"<header><h1>{escape(run.name)}</h1>{badge}</header>",
        _tiles(tiles(run)),
        chart_cards(run_charts(run)) or '<p class="card">No step is recorded yet.</p>',
        '<div class="tables">',
        table_card("Run", run_table(run)),
        table_card("Configuration", config_table(run)),
        "<div>",
        table_card(
            "Step time by phase",
            phase_table(run),
            head=("phase, slowest rank", "ms, median", "of the step"),
        ),
        table_card(
            "Evaluations",
            evaluation_table(run),
            head=("iteration", "set", "loss", *(name.replace("_", " ") for name in evaluated(run))),
        ),
        "</div></div>",
        _memory(run),
    ]
    if run.sample:
        body.append(
            '<section class="card text"><h2>Generated sample</h2>'
            f"<pre>{escape(run.sample)}</pre></section>"
        )
    if run.config_text:
        body.append(
            '<details class="card"><summary>Full configuration</summary>'
            f"<pre>{escape(run.config_text)}</pre></details>"
        )
    return document(run.name, body, written=written)


def comparison_page(
    title: str,
    charts: Sequence[Chart],
    rows: Sequence[Sequence[str]],
    settings: Sequence[Sequence[str]],
    links: Mapping[str, str],
    *,
    written: str,
) -> str:
    """Return the page that compares runs.

    It has the `settings` that differ, the figures (`rows`), each with its heading first, and the
    charts. `links` are the addresses of the runs' own reports by name.
    """
    differing = table_card("Settings that differ", settings[1:], head=tuple(settings[0]))
    figures = table_card("Runs", rows[1:], head=tuple(rows[0]), links=links)
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        differing or '<p class="card">No setting differs.</p>',
        figures,
        chart_cards(charts),
    ]
    return document(title, body, written=written)


def document(title: str, body: Sequence[str], *, written: str) -> str:
    """Return a complete document that loads nothing and runs nothing."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body><main>",
            *body,
            f"<footer>Sparsetron, written {escape(written)}</footer>",
            "</main></body>\n</html>\n",
        ]
    )


def _tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    cards = [
        f'<div class="card"><span>{escape(name)}</span><b>{escape(figure)}</b>'
        f"<span>{escape(remark)}</span></div>"
        for name, figure, remark in figures
    ]
    return f'<div class="tiles">{"".join(cards)}</div>'


def chart_cards(charts: Sequence[Picture], *, captions: Sequence[str] = ()) -> str:
    """Return the charts as pictures, or a note in their place; empty without charts.

    `captions` are texts below the charts, one for each or none at all.
    """
    if charts and not can_draw():
        return f'<p class="card">The charts are left out: {escape(NEEDS_MATPLOTLIB)}.</p>'
    texts = [f"<p>{escape(text)}</p>" if text else "" for text in captions or [""] * len(charts)]
    cards = "".join(
        f'<div class="card">{as_svg(chart)}{text}</div>'
        for chart, text in zip(charts, texts, strict=True)
    )
    return cards and f'<div class="charts">{cards}</div>'


def link_to(path: Path, folder: Path) -> str:
    """Return the address of a file in a page that lies in `folder`."""
    return quote(os.fsencode(os.path.relpath(path, folder)))


def _memory(run: RunData) -> str:
    """Return the section of the memory of a step; empty without a ledger."""
    rows = memory_table(run.ledger)
    table = table_card("Memory of a training step", rows[1:], head=rows[0] if rows else ())
    return table + (chart_cards(memory_charts(run.ledger)) if can_draw() else "")


def table_card(
    title: str,
    rows: Sequence[Sequence[str]],
    *,
    head: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
) -> str:
    """Return a table with a title; empty without rows.

    `links` are addresses by the text of a row's first cell.
    """
    if not rows:
        return ""
    # A shorter row below the figures is a remark.
    columns = zip(*(row for row in rows if len(row) == len(rows[0])), strict=True)
    kinds = ["number" * bool(head and all(map(_is_figure, cells))) for cells in columns]
    is_wide = len(head) > _MOST_COLUMNS and not kinds[0]
    kinds[0] = ""
    kind = ' class="wide"' * is_wide
    lines = [f'<section class="card"><h2>{escape(title)}</h2><table{kind}>']
    if head:
        cells = zip(head, kinds, strict=False)
        lines.append(f"<tr>{''.join(_cell(cell, kind, tag='th') for cell, kind in cells)}</tr>")
    heads = head[1:] if is_wide else [""] * len(kinds)
    for first, *others in rows:
        name, link = escape(first), (links or {}).get(first)
        name = name if link is None else f'<a href="{escape(link)}">{name}</a>'
        cells = "".join(map(_cell, others, kinds[1:], heads))
        lines.append(f"<tr><td>{name}</td>{cells}</tr>")
    return "\n".join([*lines, "</table></section>"])


def _is_figure(text: str) -> bool:
    return len(text) <= _LONGEST_FIGURE and _FIGURE.match(text) is not None


def _cell(text: str, kind: str, head: str = "", *, tag: str = "td") -> str:
    """Return a cell; a text that is longer than a figure may wrap."""
    kind = "text" if tag == "td" and len(text) > _LONGEST_FIGURE else kind
    found = f' class="{kind}"' if kind else ""
    found += f' data-head="{escape(head)}"' if head else ""
    return f"<{tag}{found}>{escape(text)}</{tag}>"
