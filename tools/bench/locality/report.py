"""Frequencies of being among the largest entries as curves, table and plot. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.report.charts import PALETTE
from tools.bench.common.figures import plain_axes, save
from tools.bench.common.page_files import PAGE, write_page

POINTS = 200
"""Points of a curve, evenly spaced in the logarithm of the percentage."""


@dataclass(frozen=True, kw_only=True)
class LocalityCurve:
    """The frequencies with which entries of one kind of layer were among the `top` share.

    `percent` of the entries, the most frequent first, were marked with at least the frequency at
    the same position of `frequency` (marks over steps). `always`, `half` and `ever` are the shares
    of entries with a frequency of at least 0.9, at least 0.5, and above 0. `shared` is the mean
    share of one step's marks that the next step also has, `from_first` the share of the first
    step's marks that the last step also has. Random marks would give `top` for both.
    """

    kind: str
    what: str
    top: float
    steps: int
    entries: int
    always: float
    half: float
    ever: float
    shared: float
    from_first: float
    percent: tuple[float, ...]
    frequency: tuple[float, ...]

    @classmethod
    def of_counts(
        cls,
        counts: Sequence[int],
        *,
        kind: str,
        what: str,
        top: float,
        steps: int,
        shared: float,
        from_first: float,
    ) -> LocalityCurve:
        """Return the curve for the number of steps, of `steps`, in which each entry was marked."""
        rates = np.sort(np.asarray(counts, dtype=np.float64))[::-1] / steps
        places = np.unique(np.geomspace(1, len(rates), POINTS).astype(np.int64)) - 1
        return cls(
            kind=kind,
            what=what,
            top=top,
            steps=steps,
            entries=len(rates),
            always=float((rates >= 0.9).mean()),
            half=float((rates >= 0.5).mean()),
            ever=float((rates > 0).mean()),
            shared=shared,
            from_first=from_first,
            percent=tuple((100 * (places + 1) / len(rates)).round(6).tolist()),
            frequency=tuple(rates[places].round(4).tolist()),
        )


@dataclass(frozen=True, kw_only=True)
class KeptShare:
    """Share of the index that each selection of a Radius run kept: (step, share)."""

    name: str
    shares: tuple[tuple[int, float], ...]


def write_report(
    out: Path,
    curves: Sequence[LocalityCurve],
    kept: Sequence[KeptShare],
    facts: Mapping[str, Any],
    *,
    log: Callable[[str], None],
) -> None:
    """Write README.md, results.json and, with matplotlib, figure.png into `out`."""
    values = {
        "facts": dict(facts),
        "curves": [asdict(curve) for curve in curves],
        "kept": [asdict(each) for each in kept],
    }
    draw = partial(write_plot, curves=curves, kept=kept)
    text = as_markdown(curves, kept, facts)
    write_page(out, text=text, values=values, draw=draw, indent=None)
    log(f"{out / PAGE}")


def as_markdown(
    curves: Sequence[LocalityCurve], kept: Sequence[KeptShare], facts: Mapping[str, Any]
) -> str:
    """Return the page."""
    lines: list[str] = []
    if curves:
        lines += ["; ".join(f"{name} {value}" for name, value in facts.items()), ""]
        lines += [
            "At each step the entries of each matrix with the largest magnitude are marked. Share "
            "of all entries marked in at least 90 % and 50 % of the steps, and ever; share of a "
            "step's marks that the next step sets too, and of the first step's that the last one "
            "sets (marks by chance: the share in the column top).",
            "",
            "![How often entries were on top](figure.png)",
            "",
            "| layers | top | of | 90 % | 50 % | ever | next step | last step |",
            "|---|---:|---|---:|---:|---:|---:|---:|",
        ]
    for c in curves:
        shares = [c.always, c.half, c.ever, c.shared, c.from_first]
        cells = [c.kind, f"{c.top:g}", f"absolute {c.what}", *(f"{share:.2%}" for share in shares)]
        lines.append(f"| {' | '.join(cells)} |")
    if kept:
        lines += ["", "Share of its index that a selection of Radius kept:", ""]
        lines += ["| run | selections | first | mean | last |", "|---|---:|---:|---:|---:|"]
    for each in kept:
        shares = [share for _, share in each.shares]
        mean = sum(shares) / len(shares)
        lines.append(
            f"| {each.name} | {len(shares)} | {shares[0]:.1%} | {mean:.1%} | {shares[-1]:.1%} |"
        )
    return "\n".join(lines) + "\n"


def write_plot(path: Path, curves: Sequence[LocalityCurve], kept: Sequence[KeptShare]) -> bool:
    """Draw one panel for each share, and one for the kept index; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    tops = sorted({curve.top for curve in curves})
    panels = len(tops) + bool(kept)
    figure = Figure(figsize=(1 + 4.5 * panels, 4), dpi=130, layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for panel, top in zip(axes, tops, strict=False):
        _frequencies(panel, [curve for curve in curves if curve.top == top], top)
    if kept:
        for each, color in zip(kept, PALETTE * len(kept), strict=False):
            steps, shares = zip(*each.shares, strict=True)
            axes[-1].plot(steps, shares, color=color, marker=".", label=each.name)
        axes[-1].set_title("Share of the index kept", loc="left", fontsize=10)
        axes[-1].set_xlabel("step")
        axes[-1].set_ylim(0, 1)
    for panel in axes:
        plain_axes(panel)
        panel.legend(frameon=False, fontsize=8)
    save(figure, path)
    return True


def _frequencies(panel: Any, curves: Sequence[LocalityCurve], top: float) -> None:
    kinds = list(dict.fromkeys(curve.kind for curve in curves))
    for curve in curves:
        panel.plot(
            curve.percent,
            curve.frequency,
            color=PALETTE[kinds.index(curve.kind) % len(PALETTE)],
            linestyle="-" if curve.what == "gradient" else "--",
            label=f"{curve.kind}, {curve.what}",
        )
    panel.set_xscale("log")
    panel.set_title(f"Share of steps among the top {100 * top:g} %", loc="left", fontsize=10)
    panel.set_xlabel("entries, most frequent first (%)")
    panel.set_ylim(0, 1)
