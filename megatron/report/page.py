"""The HTML around charts and tables. Every text that came from a file is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron.report.charts import run_charts
from megatron.report.facts import (
    config_table,
    evaluated,
    evaluation_table,
    phase_table,
    run_table,
    tiles,
)
from megatron.report.runs import RunData

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f3f4f6; color: #1f2937; line-height: 1.45;
  font: 15px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1340px; margin: 0 auto; padding: 28px 24px 48px; }
header { display: flex; align-items: baseline; gap: 14px; flex-wrap: wrap; margin-bottom: 18px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 10px; }
.state { padding: 2px 12px; border-radius: 999px; font-size: 13px; font-weight: 600;
  background: #e5e7eb; color: #374151; }
.done { background: #d1fae5; color: #065f46; } .failed { background: #fee2e2; color: #991b1b; }
.running { background: #dbeafe; color: #1e40af; } .left { background: #fef3c7; color: #92400e; }
.card { background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; padding: 16px 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 14px; }
.tiles b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.tiles span { font-size: 12.5px; color: #6b7280; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
  gap: 14px; margin: 14px 0; }
.charts .card { padding: 8px 10px; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr));
  gap: 14px; align-items: start; margin-bottom: 14px; }
svg.chart { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
td, th { text-align: left; padding: 4px 10px 4px 0; border-top: 1px solid #f0f1f3;
  vertical-align: top; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr:first-child > * { border-top: 0; }
td:first-child { color: #6b7280; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 160px; }
th { color: #6b7280; font-weight: 500; }
section.card { overflow-x: auto; }
section.card + section.card { margin-top: 14px; } .tables section.card { margin-top: 0; }
pre { margin: 8px 0 0; font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }
details, section.text { margin-top: 14px; }
summary { cursor: pointer; font-weight: 600; }
footer { margin-top: 20px; color: #6b7280; font-size: 12.5px; }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
"""

_LONGEST_FIGURE = 16


def run_page(run: RunData, *, written: str) -> str:
    """The report of one run as a complete HTML document; `written` is the time to be shown."""
    state = run.status.state if run.status else ""
    badge = f'<span class="state {escape(state)}">{escape(state)}</span>' if state else ""
    charts = run_charts(run)
    body = [
        f"<header><h1>{escape(run.name)}</h1>{badge}</header>",
        _tiles(tiles(run)),
        _charts(charts) if charts else '<p class="card">No step is recorded yet.</p>',
        '<div class="tables">',
        _table("Run", run_table(run)),
        _table("Configuration", config_table(run)),
        _table(
            "Step time by phase",
            phase_table(run),
            head=("phase, slowest rank", "ms, median", "of the step"),
        ),
        _table(
            "Evaluations",
            evaluation_table(run),
            head=("iteration", "set", "loss", *(name.replace("_", " ") for name in evaluated(run))),
        ),
        "</div>",
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
    charts: Sequence[str],
    rows: Sequence[Sequence[str]],
    settings: Sequence[Sequence[str]],
    *,
    written: str,
) -> str:
    """The page that lays runs over each other.

    The `settings` in which they differ, their figures (`rows`), each with its heading first, and
    the charts.
    """
    differing = _table("Settings that differ", settings[1:], head=tuple(settings[0]))
    figures = _table("Runs", rows[1:], head=tuple(rows[0]))
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        differing or '<p class="card">No setting differs.</p>',
        figures,
        _charts(charts),
    ]
    return document(title, body, written=written)


def document(title: str, body: Sequence[str], *, written: str) -> str:
    """A complete document that loads nothing and runs nothing."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body><main>",
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


def _charts(charts: Sequence[str]) -> str:
    cards = [f'<div class="card">{chart}</div>' for chart in charts]
    return f'<div class="charts">{"".join(cards)}</div>'


def _table(title: str, rows: Sequence[Sequence[str]], *, head: Sequence[str] = ()) -> str:
    if not rows:
        return ""
    lines = [f'<section class="card"><h2>{escape(title)}</h2><table>']
    if head:
        lines.append(f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>")
    lines += [f"<tr><td>{escape(row[0])}</td>{''.join(map(_cell, row[1:]))}</tr>" for row in rows]
    return "\n".join([*lines, "</table></section>"])


def _cell(text: str) -> str:
    """A cell; a text that is longer than a figure may be broken into lines."""
    kind = ' class="text"' if len(text) > _LONGEST_FIGURE else ""
    return f"<td{kind}>{escape(text)}</td>"
