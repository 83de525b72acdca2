"""The memory ledger as text and as pictures: a pie of the kinds, and their course over a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError, missing_extra
from megatron.low_memory.planned_memory import MemoryColumn
from megatron.low_memory.strategies import ActivationCourse
from megatron.report.charts import PALETTE

if TYPE_CHECKING:
    from megatron.low_memory.ledger import MemoryLedger
    from megatron.low_memory.memory_recorder import MemorySample

KINDS = ("model", "optimizer", "forward", "backward", "other")
MB = 1e6
MOST_POINTS = 2000
"""Operators of a step that the timeline shows; of more, each run of neighbours gives its peak."""


def ledger_lines(ledger: MemoryLedger) -> Iterator[str]:
    """Yield the ledger as lines of text, in MB of 10^6 bytes."""
    columns = ledger.columns
    yield f"{ledger.summary}; rank {ledger.rank} of {ledger.world}"
    yield ""
    yield f"{'MB':<26}" + "".join(f"{name:>12}" for name in columns)
    for kind in ("model", "optimizer", "stored"):
        yield _row(kind if kind != "stored" else "stored by a microbatch", kind, columns.values())
    for kind in ("forward", "backward", "other"):
        yield _row(f"{kind}, at the peak", kind, columns.values())
    yield _row("peak", "total", columns.values())
    yield ""
    names = list(dict.fromkeys(name for column in columns.values() for name in column.layers))
    for name in names:
        cells = "".join(_cell(column.layers.get(name)) for column in columns.values())
        yield f"{'stored by ' + name:<26}{cells}"
    yield ""
    yield ledger.peak_text
    if ledger.process_peak is not None:
        yield f"peak of the process over the measured step: {ledger.process_peak / MB:.1f} MB more"
    if ledger.flops is not None:
        flops = ledger.flops
        share = flops.recomputed / (flops.forward + flops.backward)
        yield (
            f"GFLOP of a microbatch: forward {flops.forward / 1e9:.3f}, backward "
            f"{flops.backward / 1e9:.3f}, recomputed {flops.recomputed / 1e9:.3f} ({share:.1%}); "
            f"by the formula of the whole model {flops.formula / 1e9:.3f}"
        )
    yield from (f"{name} is missing: {reason}" for name, reason in ledger.missing.items())


def _row(label: str, kind: str, columns: Any) -> str:
    return f"{label:<26}" + "".join(_cell(getattr(column, kind)) for column in columns)


def _cell(size: int | None) -> str:
    return f"{'-':>12}" if size is None else f"{size / MB:>12.3f}"


def draw_ledger(file: Path, ledger: MemoryLedger) -> None:
    """Write a PNG with the pie and the timeline of a ledger.

    Raises:
        ConfigError: The ledger has no column, matplotlib is not installed, or the file cannot be
            written.
    """
    names = ("tracked", "planned", "measured")
    column = next((ledger.columns[name] for name in names if name in ledger.columns), None)
    if column is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in ledger.missing.items())
        raise ConfigError(f"{file}: no column is there to be drawn; {reasons}")
    figure = _figure()
    grid = figure.add_gridspec(1, 3)
    _pie(figure.add_subplot(grid[0, 0]), column, ledger.summary)
    axes = figure.add_subplot(grid[0, 1:])
    samples = thin(ledger.samples, MOST_POINTS)
    peak = ledger.peak
    if peak is not None:
        kinds = [[getattr(sample, kind) / MB for sample in samples] for kind in KINDS]
        axes.stackplot(range(len(samples)), *kinds, labels=KINDS, colors=PALETTE[: len(KINDS)])
        axes.annotate(
            ledger.peak_text,
            (samples.index(peak), peak.total / MB),
            textcoords="offset points",
            xytext=(0, 6),
            ha="center",
            fontsize=8,
        )
        axes.set_ylim(0, 1.15 * peak.total / MB)
        for number, sample in enumerate(samples[1:], 1):
            if sample.phase != samples[number - 1].phase:
                axes.axvline(number, color="#6b7280", linewidth=0.6)
                axes.text(number, 0, f" {sample.phase}", rotation=90, fontsize=7, va="bottom")
        axes.legend(fontsize=8, frameon=False, loc="upper right")
    axes.set_xlabel("operators of a step")
    axes.set_ylabel("MB")
    _save_picture(file, figure)


def draw_course(file: Path, title: str, kinds: dict[str, float], course: ActivationCourse) -> None:
    """Write a PNG with the pie of `kinds` (bytes) and the course of the report's accounting.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure()
    grid = figure.add_gridspec(1, 3)
    _slices(figure.add_subplot(grid[0, 0]), kinds, title)
    axes = figure.add_subplot(grid[0, 1:])
    stored = [moment.stored / MB for moment in course.moments]
    gradients = [moment.gradient / MB for moment in course.moments]
    axes.stackplot(
        range(len(stored)), stored, gradients, labels=("stored", "gradient"), colors=PALETTE[2:4]
    )
    axes.legend(fontsize=8, frameon=False)
    axes.set_xlabel("operations: forward, then backward")
    axes.set_ylabel("activations, MB")
    _save_picture(file, figure)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "log") from None
    return Figure(figsize=(11, 3.8), dpi=110, layout="constrained")


def _save_picture(file: Path, figure: Any) -> None:
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        raise ConfigError(f"--out {file}: {error.strerror}") from None


def _pie(axes: Any, column: MemoryColumn, title: str) -> None:
    _slices(axes, column.kinds, title)


def _slices(axes: Any, kinds: Any, title: str) -> None:
    whole = sum(kinds.values()) or 1
    axes.pie(list(kinds.values()), colors=PALETTE[: len(kinds)], startangle=90)
    axes.set_title(title, fontsize=8)
    shares = [f"{kind} {size / whole:.1%}" for kind, size in kinds.items()]
    axes.legend(shares, loc="upper center", bbox_to_anchor=(0.5, 0), fontsize=8, frameon=False)


def thin(samples: Sequence[MemorySample], most: int) -> list[MemorySample]:
    """Return at most `most` samples: of each run of neighbours, the first with the most bytes.

    The first sample with the most bytes of all is among them.
    """
    size = -(-len(samples) // most) if samples else 1
    return [
        max(samples[start : start + size], key=lambda sample: sample.total)
        for start in range(0, len(samples), size)
    ]
