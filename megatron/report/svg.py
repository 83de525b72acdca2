"""Line charts as SVG text, for a page that must work without a network or scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from megatron.report.axes import Axis, TickFormat, counted, linear_axis, log_axis, plain, span_axis
from megatron.report.series import Series, thin

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 68, 18, 68, 44
INK, QUIET, GRID = "#1f2937", "#6b7280", "#e5e7eb"
SKIP_COLOR = "#dc2626"
MAX_MARKS = 200


def chart(
    title: str,
    series: Sequence[Series],
    *,
    log: bool = False,
    from_zero: bool = False,
    whole: bool = False,
    tick_format: TickFormat = plain,
    marks: Sequence[float] = (),
    mark_label: str = "",
    x_label: str = "iteration",
) -> str:
    """An <svg> element with axes, a legend and one line for each series.

    `marks` are x positions that get a red tick on the lower axis, named `mark_label` in the
    legend. Values that are not finite interrupt a line; on a log axis so do those below 0.
    """
    thinned = [(s, *thin(s.x, s.y)) for s in series]
    x_values = [x for s in series for x in s.x] or [0.0, 1.0]
    y_values = [y for _, _, ys in thinned for y in ys]
    x_axis = span_axis(min(x_values), max(x_values), ticks=6)
    y_axis = (
        log_axis(y_values)
        if log
        else linear_axis(y_values, ticks=5, from_zero=from_zero, whole=whole)
    )
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg" aria-label="{escape(title)}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif">',
        _text(LEFT - 52, 24, title, size=15, color=INK, weight=600),
    ]
    parts += _legend(series, mark_label if marks else "")
    parts += _grid(x_axis, y_axis, tick_format=tick_format, x_label=x_label)
    parts += [_line(s, xs, ys, x_axis=x_axis, y_axis=y_axis) for s, xs, ys in thinned]
    parts += _marks(marks, x_axis=x_axis)
    parts.append("</svg>")
    return "\n".join(part for part in parts if part)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    color: str = QUIET,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )


def _legend(series: Sequence[Series], mark_label: str) -> list[str]:
    entries = [(s.label, s.color, s.opacity, s.dashed) for s in series if s.label]
    if mark_label:
        entries.append((mark_label, SKIP_COLOR, 1.0, False))
    if len(entries) < 2 and not mark_label:
        return []
    parts, x, y = [], float(LEFT), 38
    for label, color, opacity, dashed in entries:
        width = 21 + 6.3 * len(label)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + 15
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        parts.append(
            f'<line x1="{x:.1f}" x2="{x + 16:.1f}" y1="{y}" y2="{y}" stroke="{escape(color)}" '
            f'stroke-width="2.5" stroke-opacity="{opacity}"{dashes}/>'
        )
        parts.append(_text(x + 21, y + 4, label))
        x += width + 18
    return parts


def _grid(x_axis: Axis, y_axis: Axis, *, tick_format: TickFormat, x_label: str) -> list[str]:
    parts = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in y_axis.ticks:
        y = _y(y_axis, tick)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, y + 4, tick_format(tick), anchor="end"))
    for tick in x_axis.ticks:
        x = _x(x_axis, tick)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}" stroke="{QUIET}"/>')
        parts.append(_text(x, bottom + 18, counted(tick), anchor="middle"))
    parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" stroke="{QUIET}"/>')
    parts.append(_text((LEFT + right) / 2, HEIGHT - 8, x_label, anchor="middle"))
    return parts


def _line(
    series: Series, xs: Sequence[float], ys: Sequence[float], *, x_axis: Axis, y_axis: Axis
) -> str:
    commands: list[str] = []
    dots: list[str] = []
    pen_down = False
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if not _drawable(y, log=y_axis.log):
            pen_down = False
            continue
        px, py = _x(x_axis, x), _y(y_axis, y)
        commands.append(f"{'L' if pen_down else 'M'}{px} {py}")
        ends_alone = i + 1 == len(xs) or not _drawable(ys[i + 1], log=y_axis.log)
        if series.markers or (not pen_down and ends_alone):
            dots.append(
                f'<circle cx="{px}" cy="{py}" r="{3.2 if series.markers else 1.6}" '
                f'fill="{escape(series.color)}"><title>{counted(x)}: {plain(y)}</title></circle>'
            )
        pen_down = True
    if not commands:
        return ""
    dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
    path = (
        f'<path d="{"".join(commands)}" fill="none" stroke="{escape(series.color)}" '
        f'stroke-width="{series.width}" stroke-opacity="{series.opacity}" '
        f'stroke-linejoin="round"{dashes}/>'
    )
    return path + "".join(dots)


def _marks(marks: Sequence[float], *, x_axis: Axis) -> list[str]:
    bottom = HEIGHT - BOTTOM
    stride = math.ceil(len(marks) / MAX_MARKS) or 1
    return [
        f'<line x1="{x}" x2="{x}" y1="{bottom - 9}" y2="{bottom}" '
        f'stroke="{SKIP_COLOR}" stroke-width="1.5"/>'
        for x in (_x(x_axis, mark) for mark in marks[::stride])
    ]


def _drawable(y: float, *, log: bool) -> bool:
    return math.isfinite(y) and (y > 0 or not log)


def _x(axis: Axis, value: float) -> float:
    return round(LEFT + axis.position(value) * (WIDTH - LEFT - RIGHT), 1)


def _y(axis: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.position(value) * (HEIGHT - TOP - BOTTOM), 1)
