"""The front of a memory budget as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.config.byte_size import parse_bytes, show_bytes
from megatron.errors import ConfigError, missing_extra
from megatron.low_memory.memory_budget import BudgetSearch, Candidate

MB = 10**6


def front_lines(search: BudgetSearch, budget: str) -> Iterator[str]:
    """Yield a table of the settings that some budget chooses; a star marks that of `budget`."""
    chosen = search.fastest(parse_bytes(budget))
    yield "    planned peak    FLOPs  settings"
    for candidate in search.front:
        mark = "*" if candidate is chosen else " "
        flags = candidate.flags or "as given"
        yield f"{mark} {candidate.peak / MB:>11,.1f} MB {candidate.flops:>8.3f}  {flags}"
    yield ""
    yield verdict(search, budget)


def verdict(search: BudgetSearch, budget: str) -> str:
    """Return a line on what the budget chooses, or on the least memory if nothing fits."""
    chosen = search.fastest(parse_bytes(budget))
    if chosen is None:
        least = show_bytes(search.front[-1].peak)
        return f"nothing fits into {budget}; the smallest planned peak is {least}"
    share = chosen.flops / search.candidates[0].flops - 1
    return f"{budget} takes {chosen.flags or 'the settings as given'}, with {share:.1%} more FLOPs"


def front_data(search: BudgetSearch, budget: str) -> dict[str, Any]:
    """Return the front as data for JSON, in bytes; "chosen" is None if nothing fits."""
    chosen = search.fastest(parse_bytes(budget))
    return {
        "budget": parse_bytes(budget),
        "chosen": None if chosen is None else _as_data(chosen),
        "front": [_as_data(candidate) for candidate in search.front],
    }


def _as_data(candidate: Candidate) -> dict[str, Any]:
    return {"peak": candidate.peak, "flops": candidate.flops, "flags": candidate.flags}


def draw_front(file: Path, search: BudgetSearch, budget: str) -> None:
    """Write a PNG of all candidates, of the front and of the budget.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "log") from None
    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    size, front = parse_bytes(budget), search.front
    axes.scatter(*_points(search.candidates), s=6, color="#9ca3af", label="legal settings")
    axes.plot(*_points(front), marker="o", color="#2563eb", label="fastest at some budget")
    axes.axvline(size / MB, color="#6b7280", linewidth=0.8, label=f"budget of {budget}")
    if (chosen := search.fastest(size)) is not None:
        axes.scatter(*_points([chosen]), s=90, color="#dc2626", zorder=3, label="chosen")
    axes.set_xlabel("planned peak of the fullest rank, MB")
    axes.set_ylabel("FLOPs of a step, ratio to none recomputed")
    axes.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        raise ConfigError(f"--picture {file}: {error.strerror}") from None


def _points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [each.peak / MB for each in candidates], [each.flops for each in candidates]
