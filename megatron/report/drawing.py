"""Line charts as SVG text, for a page that must work without a network or scripts.

A chart takes about a millisecond; with matplotlib it would take a tenth of a second or more at the
end of every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

MAX_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `x` and `y` have equal length; the curve is interrupted where y is not finite."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    width: float = 1.6
    opacity: float = 1.0
    markers: bool = False
    dashed: bool = False

    def after(self, x: float) -> Series:
        """Return the part of the curve right of `x`."""
        kept = [i for i, value in enumerate(self.x) if value > x]
        return replace(self, x=[self.x[i] for i in kept], y=[self.y[i] for i in kept])


def smoothing_window(count: int) -> int:
    """Return the window (odd) of the moving average for a curve of `count` points; 1 = none.

    The window is about a 50th of `count`.
    """
    return 1 if count < 60 else 2 * (count // 100) + 1


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the centred mean of the finite values.

    A trailing mean would draw a falling loss too high. For the same reason the window narrows
    symmetrically where a run begins; at the end it only loses its right side.
    """
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    smoothed = []
    for i in range(len(values)):
        half = min(window // 2, i)
        first, last = i - half, min(i + half + 1, len(values))
        count = counts[last] - counts[first]
        smoothed.append((sums[last] - sums[first]) / count if count else math.nan)
    return smoothed


def thin(
    x: Sequence[float], y: Sequence[float], *, most: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """Thin a curve to about `most` points: the smallest and the largest value of each section."""
    if len(x) <= most:
        return list(x), list(y)
    size = math.ceil(2 * len(x) / most)
    kept: list[int] = []
    for start in range(0, len(x), size):
        stretch = range(start, min(start + size, len(x)))
        finite = [i for i in stretch if math.isfinite(y[i])]
        if not finite:
            kept.append(start)
            continue
        kept += sorted({min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)})
    return [x[i] for i in kept], [y[i] for i in kept]


TickFormat = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high`, with ticks inside it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def position(self, value: float) -> float:
        """Return the position of a value, 0 at `low` and 1 at `high`.

        On a log axis the value is positive.
        """
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(
    values: Iterable[float], *, ticks: int, from_zero: bool = False, whole: bool = False
) -> Axis:
    """Return an axis that begins and ends at a tick and spans all finite values.

    `whole`: ticks are whole numbers.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # For a constant, leave some room around it, and never make an empty range.
        room = abs(high) * 0.1 or 1.0
        low, high = (low if from_zero and low == 0 else low - room), high + room
    step = round_step((high - low) / ticks)
    if whole:
        step = float(math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = tuple(i * step for i in range(first, last + 1))
    return Axis(low=marks[0], high=marks[-1], ticks=marks)


def span_axis(low: float, high: float, *, ticks: int) -> Axis:
    """Return a linear axis over exactly [low, high], with the whole-number ticks inside."""
    if high <= low:
        low, high = low - 1, low + 1
    step = max(1.0, round_step((high - low) / ticks))
    marks = range(math.ceil(low / step), math.floor(high / step) + 1)
    return Axis(low=low, high=high, ticks=tuple(i * step for i in marks))


def log_axis(values: Iterable[float]) -> Axis:
    """Return a logarithmic axis over the positive values; 1, 2, 5 are marked if decades are few."""
    positive = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    low, high = min(positive), max(positive)
    if high / low < 1.5:
        low, high = low / 1.5, high * 1.5
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(decades) <= 4 else (1,)
    stride = math.ceil(len(decades) / 7)
    marks = [digit * 10.0**e for e in decades[::stride] for digit in digits]
    return Axis(
        low=low / 1.1,
        high=high * 1.1,
        ticks=tuple(mark for mark in marks if low / 1.1 <= mark <= high * 1.1),
        log=True,
    )


def round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))


def plain(value: float) -> str:
    """Format as 4, 0.25, 1.5e-4."""
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        digits, exponent = f"{value:.4e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.10g}" if abs(value) < 1e-12 else f"{round(value, 9):.7g}"


def counted(value: float) -> str:
    """Format as 0, 500, 1.5k, 20M."""
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.4g}"


def traffic(value: float) -> str:
    """Format as 512 B, 2.5 MB."""
    text = counted(value)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


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
    """Return an <svg> element with axes, a legend and one line per series.

    `marks` are x positions that get a red tick on the lower axis, named `mark_label` in the legend.
    Values that are not finite interrupt a line; on a log axis so do values below 0.
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
