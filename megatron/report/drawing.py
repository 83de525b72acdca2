"""Charts drawn by matplotlib: as SVG inside a page that must work without a network, and as PNG.

matplotlib is optional, and is imported when a chart is drawn. A chart itself is data.
"""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.metrics.log_line import byte_size, scaled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

NEEDS_MATPLOTLIB = "matplotlib is not installed (pip install 'sparsetron[log]')"
MAX_MARKS = 200
MARK_COLOR = "#dc2626"
INK, GREY, PAPER = "#1f2937", "#6b7280", "#ffffff"
"""Colours of what is no curve: in a page they are those of its text and its cards."""
MOST_VALUES = 60
"""Points of a curve that tell their values in a page."""
WIDTH = 5.0
"""Width in inches. A chart is so narrow that its text can be read on a telephone."""
HEIGHT = 2.8
LINE = 0.2
"""Inches of a line of the legend, by which a chart is higher."""
LETTERS = 52
"""Letters of a title, or of a label in the legend, that fit into the width of a chart."""
LEGEND_LETTERS = 64
"""Letters of a line of the legend, each label with six for its sign."""
STEPS = (1, 2, 2.5, 5, 10)
"""Distances of ticks, times a power of ten."""
STYLE = Path(__file__).with_name("chart.mplstyle")


class Picture(Protocol):
    """A picture that can be drawn into a figure."""

    @property
    def title(self) -> str:
        """Text above the picture, by which it is also read aloud."""
        ...

    def draw(self, figure: Figure) -> None:
        """Draw the picture into an empty figure."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `x` and `y` have equal length; the curve is interrupted where y is not finite.

    With `markers`, each point is marked. A curve that is `read` tells its values where it is
    pointed at.
    """

    x: Sequence[float]
    y: Sequence[float]
    color: str
    label: str = ""
    width: float = 1.8
    opacity: float = 1.0
    markers: bool = False
    dashed: bool = False
    read: bool = True
    in_legend: bool = True

    def after(self, x: float) -> Series:
        """Return the part of the curve right of `x`."""
        kept = [i for i, value in enumerate(self.x) if value > x]
        return replace(self, x=[self.x[i] for i in kept], y=[self.y[i] for i in kept])

    def placed(self, places: Mapping[int, float]) -> Series:
        """Return the points whose x is a key of `places`, at its value."""
        kept = [i for i, value in enumerate(self.x) if value in places]
        x = [places[int(self.x[i])] for i in kept]
        return replace(self, x=x, y=[self.y[i] for i in kept])

    @property
    def values(self) -> list[tuple[float, float]]:
        """At most `MOST_VALUES` of the points, the last one among them; none unless `read`."""
        points = [point for point in zip(self.x, self.y, strict=True) if math.isfinite(point[1])]
        if not (points and self.read):
            return []
        places = np.linspace(0, len(points) - 1, min(len(points), MOST_VALUES)).astype(int)
        return [points[place] for place in places]

    def draw(self, axes: Axes, label: str = "") -> None:
        """Draw the curve, and as dots the points that are marked or have no neighbour."""
        x, y = np.asarray(self.x, float), np.asarray(self.y, float)
        seen = np.isfinite(y) & ((y > 0) | (axes.get_yscale() == "linear"))
        y = np.where(seen, y, math.nan)
        line = "--" if self.dashed else "-"
        style = {"color": self.color, "alpha": self.opacity, "linewidth": self.width}
        # A curve along the edge of the axes keeps its width, and leaves the layout alone.
        style |= {"clip_on": False, "in_layout": False}
        axes.plot(x, y, line, label=label or "_", **style)
        padded = np.pad(seen, 1)
        dots = seen if self.markers else seen & ~padded[:-2] & ~padded[2:]
        axes.plot(x[dots], y[dots], "o" if self.markers else ".", markersize=4.5, **style)


@dataclass(frozen=True)
class Chart:
    """Curves over the iterations of a run, or over what `x_label` names.

    `unit` is "" for counts such as 1.5k, "B" for bytes such as 2.5 MB, and None for other numbers;
    `x_unit` is the same of the horizontal axis. With `last_values` the legend has them. `marks` are
    iterations that get a red tick on the lower axis, named `mark_label` in the legend. A
    logarithmic axis leaves out values that are not positive.
    """

    title: str
    series: Sequence[Series]
    _: KW_ONLY
    log: bool = False
    from_zero: bool = True
    unit: str | None = None
    marks: Sequence[float] = ()
    mark_label: str = ""
    y_label: str = ""
    x_label: str = "iteration"
    x_unit: str | None = ""
    last_values: bool = True

    def after(self, x: float) -> Chart:
        """Return the chart of what lies right of `x`."""
        title = f"{self.title} after iteration {x:,}"
        series = [each.after(x) for each in self.series]
        return replace(self, title=title, series=series, marks=[i for i in self.marks if i > x])

    def draw(self, figure: Figure) -> None:
        """Draw the curves with axes and a legend."""
        from matplotlib.ticker import MaxNLocator

        axes = figure.add_subplot()
        axes.set_title(wrapped(self.title))
        axes.set(xlabel=self.x_label, ylabel=self.y_label, xmargin=0.01)
        self._scale(axes)
        for series in self.series:
            series.draw(axes, self._label(series))
        for series in self.series:
            tell(axes, series.values, [self._text(series, point) for point in series.values])
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS, integer=self.x_unit == ""))
        set_unit(axes.xaxis, self.x_unit)
        marks = self.marks[:: math.ceil(len(self.marks) / MAX_MARKS) or 1]
        if marks:
            heights = np.full(len(marks), 0.03)
            place = axes.get_xaxis_transform()
            style = {"color": MARK_COLOR, "markersize": 9, "transform": place}
            axes.plot(marks, heights, "|", label=self.mark_label, **style)
        add_legend(figure, axes)

    def _label(self, series: Series) -> str:
        """Return the label of a curve in the legend, with its last value."""
        if not (self.last_values and series.in_legend and series.values):
            return series.label * series.in_legend
        return f"{series.label or 'last'} {value_text(series.values[-1][1], self.unit)}"

    def _text(self, series: Series, point: tuple[float, float]) -> str:
        """Return the values of a point, after the name of its curve if there are several."""
        several = sum(each.read for each in self.series) > 1
        x = f"{point[0]:,.0f}" if self.x_unit == "" else value_text(point[0], self.x_unit)
        return f"{series.label}, " * several + f"{x}: {value_text(point[1], self.unit)}"

    def _scale(self, axes: Axes) -> None:
        """Set the limits and the ticks of the vertical axis."""
        from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
        from matplotlib.transforms import nonsingular

        values = np.array([y for series in self.series for y in series.y], float)
        values = values[np.isfinite(values)]
        if self.log and np.any(values > 0):
            low, high = np.min(values[values > 0]), np.max(values)
            axes.set_yscale("log")
            # However small the range, one of 1, 2 and 5 times a power of ten is inside.
            axes.set_ylim(low / 1.6, high * 1.6)
            subs = (1, 2, 5) if high < 1e3 * low else (1,)
            axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            low, high = (np.min(values), np.max(values)) if len(values) else (0, 1)
            if self.from_zero:
                low, high = min(0, low), max(0, high) or 1
            low, high = nonsingular(low, high, expander=0.1)
            whole = self.unit is not None
            ticks = MaxNLocator(5, steps=STEPS, integer=whole).tick_values(low, high)
            axes.set_yticks(ticks)
            axes.set_ylim(ticks[0], ticks[-1])
        set_unit(axes.yaxis, self.unit)


@dataclass(frozen=True)
class PieChart:
    """The shares of a whole by name, each in one of the `colors`."""

    title: str
    shares: Mapping[str, float]
    colors: Sequence[str]

    def draw(self, figure: Figure) -> None:
        """Draw the pie, clockwise from the top, with the shares in the legend."""
        axes = figure.add_subplot()
        axes.set_title(wrapped(self.title))
        whole = sum(self.shares.values())
        labels = [f"{name} {value / whole:.1%}" for name, value in self.shares.items()]
        # Labels without a distance are those of the legend.
        style = {"labels": labels, "labeldistance": None, "colors": self.colors}
        axes.pie([*self.shares.values()], startangle=90, counterclock=False, **style)
        add_legend(figure, axes)


@dataclass(frozen=True)
class AreaChart:
    """Bytes over the operators of a step, stacked: one layer a name, each of one of the `colors`.

    `x` numbers the operators, and `phases` names the phase of each: a line marks its beginning.
    """

    title: str
    x: Sequence[int]
    layers: Mapping[str, Sequence[float]]
    colors: Sequence[str]
    phases: Sequence[str]

    def draw(self, figure: Figure) -> None:
        """Draw the layers with axes and a legend."""
        from matplotlib.ticker import EngFormatter

        axes = figure.add_subplot()
        axes.set_title(wrapped(self.title))
        axes.set(xlabel="operators of a step", xmargin=0)
        axes.stackplot(self.x, *self.layers.values(), labels=self.layers, colors=self.colors)
        axes.yaxis.set_major_formatter(EngFormatter("B", sep=" "))
        for x, phase, before in zip(self.x, self.phases, ("", *self.phases), strict=False):
            if phase != before:
                axes.axvline(x, color="white", linewidth=0.8)
                axes.text(x, 0, f" {phase}", rotation=90, fontsize=7, color="white", va="bottom")
        add_legend(figure, axes)


def value_text(value: float, unit: str | None) -> str:
    """Return a value with the unit of its axis."""
    if unit is None:
        return f"{value:.5g}"
    return byte_size(value) if unit == "B" else scaled(value).strip() + unit


def set_unit(axis: Axis, unit: str | None) -> None:
    """Write the ticks of an axis in a unit, as `Chart` describes it."""
    from matplotlib.ticker import EngFormatter

    formatter = EngFormatter(unit, sep=" " if unit else "") if unit is not None else "{x:.7g}"
    axis.set_major_formatter(formatter)


def add_legend(figure: Figure, axes: Axes) -> None:
    """Put a legend below the axes if a label is there."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        labels = [wrapped(label) for label in labels]
        columns = LEGEND_LETTERS // (6 + max(map(len, labels))) or 1
        lines = math.ceil(len(labels) / columns) + sum(label.count("\n") for label in labels)
        figure.set_figheight(HEIGHT + LINE * lines)
        figure.legend(handles, labels, loc="outside lower left", ncols=columns)


def tell(axes: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str]) -> None:
    """Let points tell a text where they are pointed at in a page; a picture does not show them."""
    if axes.get_yscale() == "log":
        kept = [place for place, (_, y) in enumerate(points) if y > 0]
        points, texts = [points[place] for place in kept], [texts[place] for place in kept]
    if points:
        gid = _VALUES + "\n".join(" ".join(text.split()) for text in texts)
        style = {"alpha": 0.0, "clip_on": False, "in_layout": False}
        axes.plot(*zip(*points, strict=True), "o", gid=encodable(gid), **style)


_VALUES = "values "


def encodable(text: str) -> str:
    """Return a text without lone surrogates, which a font and a page cannot take."""
    return text.encode(errors="replace").decode()


def wrapped(text: str) -> str:
    """Return a text in lines of the width of a chart."""
    return fill(encodable(text), LETTERS)


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def as_svg(picture: Picture) -> str:
    """Return the picture as an <svg> element, the same text for the same picture."""
    file = io.StringIO()
    with _drawn(picture) as figure:
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue().partition("<svg ")[2]
    text = re.sub(rf'<g id="{_VALUES}([^"]*)">(.*?)</g>\s*</g>', _circles, text, flags=re.DOTALL)
    for color, name in ((INK, "ink"), (GREY, "muted"), (PAPER, "card")):
        text = text.replace(color, f"var(--{name}, {color})")
    # Names of groups repeat in the other charts of a page.
    text = re.sub(r' id="[\w.]+_\d+"', "", text)
    return f'<svg class="chart" role="img" aria-label="{escape(picture.title)}" {text}'


def _circles(drawn: re.Match[str]) -> str:
    """Return circles that cannot be seen and tell the texts of `tell`."""
    places = re.findall(r'<use [^>]*x="([^"]*)" y="([^"]*)"', drawn[2])
    texts = re.split("\n|&#10;", drawn[1])
    circles = (
        f'<circle cx="{float(x):.1f}" cy="{float(y):.1f}" r="6"><title>{text}</title></circle>'
        for (x, y), text in zip(places, texts, strict=True)
    )
    return f'<g class="values">{"".join(circles)}</g>'


def write_png(picture: Picture, path: Path) -> None:
    """Write the picture as a PNG, atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _drawn(picture) as figure:
        figure.savefig(temporary, format="png", dpi=240)
    os.replace(temporary, path)


@contextmanager
def _drawn(picture: Picture) -> Iterator[Figure]:
    """Yield the figure of a picture, in the style that it must be saved in."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with warnings.catch_warnings(), style.context(["default", STYLE]):
        # Of letters that the font lacks, and of numbers at the edge of what a float can hold.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(WIDTH, HEIGHT))
        picture.draw(figure)
        yield figure


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
    array = np.asarray(values, float)
    finite = np.isfinite(array)
    with np.errstate(invalid="ignore", over="ignore"):
        sums, counts = (
            _window_sums(of_each, window // 2) for of_each in (np.where(finite, array, 0.0), finite)
        )
        return (sums / counts).tolist()


def _window_sums(values: NDArray[Any], half: int) -> NDArray[np.float64]:
    """Return the sum of each value and up to `half` neighbours on both sides, as `smooth` says.

    Differences of cumulative sums would lose all other values beside a huge one. Here values are
    cut into blocks as long as a window, and a window is the end of a block and the beginning of the
    next one, so that no sum has a value from outside its window.
    """
    count, window = len(values), 2 * half + 1
    blocks = np.zeros((count // window + 2, window))
    blocks.flat[:count] = values
    beginnings = np.cumsum(blocks, axis=1)
    ends = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]
    # What a block holds before a place: nothing before its first one.
    before = np.hstack([np.zeros((len(blocks), 1)), beginnings[:, :-1]])
    whole = ends.flat[: max(count - half, 0)] + before.flat[window : window + max(count - half, 0)]
    narrow = beginnings[0, : 2 * min(half, count) : 2]
    return np.concatenate([narrow, whole])
