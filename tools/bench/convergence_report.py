"""Table and plots of a convergence study, from its results file alone."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from tools.bench.convergence_plot import write_plot
from tools.bench.convergence_rows import Row, read_rows
from tools.bench.convergence_study import HEADS, HIDDEN, LAYERS, REFERENCE_STEPS, VOCABULARY, Run

READING = "## Reading"
"""What follows this line in convergence.md is written by hand and kept."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in their seed only. `gap`: mean over seeds of validation loss less that of
    the dense run of the same seed and beta2; `error` is its standard error, with one seed from the
    scatter of the groups that have more (`error_is_own` False). None where a run did not end well
    or nothing is known."""

    name: str
    variant: str
    beta2: float
    start: float | None
    interval: int | None
    ranks: int
    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    gaps: tuple[float, ...]
    gap: float | None
    error: float | None
    error_is_own: bool
    payload: float
    largest_payload: float
    clipped: float
    failed: int

    @property
    def title(self) -> str:
        """How the table calls it."""
        return _title(self.name)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Whether a group's gap is at most half of plain Radius's: `margin` is the mean over seeds of
    half of that gap less this one, `error` its standard error; met where beyond twice that."""

    name: str
    against: str
    ratio: float
    margin: float
    error: float
    seeds: int

    @property
    def met(self) -> bool:
        """Whether it is, beyond twice its standard error."""
        return self.margin > 2 * self.error


def write_report(
    results: Path, out: Path, runs: Sequence[Run], *, say: Callable[[str], None]
) -> None:
    """Write convergence.md, .json and, with matplotlib, .png into `out`.

    Raises `ConfigError` where there are no results.
    """
    rows = read_rows(results)
    if not rows:
        raise ConfigError(f"--results: {results} holds no finished run")
    order = {run.group: number for number, run in reversed(list(enumerate(runs)))}
    groups = sorted(groups_of(rows), key=lambda group: order.get(group.name, len(order)))
    goals = goals_of(groups)
    out.mkdir(parents=True, exist_ok=True)
    values = {
        "plan": rows[0]["plan"],
        "groups": [asdict(group) for group in groups],
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals],
    }
    (out / "convergence.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    page = out / "convergence.md"
    page.write_text(as_markdown(rows, groups, goals, _reading(page), runs), encoding="utf-8")
    say(f"{page}: {len(rows)} of {len(runs)} runs")
    if not write_plot(out / "convergence.png", rows, groups):
        say("convergence.png is left out: matplotlib is not installed")


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """The rows by group, with their gaps to the dense runs there are."""
    dense = {(r["seed"], r["beta2"]): r["valid_loss"] for r in rows if r["start"] is None}
    members: dict[str, list[Row]] = {}
    for row in rows:
        members.setdefault(row["group"], []).append(row)
    gaps = {name: _gaps(found, dense) for name, found in members.items()}
    scatter = _scatter([list(found.values()) for found in gaps.values()])
    return [_group(name, found, gaps[name], scatter) for name, found in members.items()]


def _gaps(rows: Sequence[Row], dense: Mapping[tuple[int, float], float | None]) -> dict[int, float]:
    """By seed, of those that ended well and leave a dense run that did."""
    found: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        reference = dense.get((row["seed"], row["beta2"]))
        if row["start"] is not None and row["valid_loss"] is not None and reference is not None:
            found[row["seed"]] = row["valid_loss"] - reference
    return found


def _scatter(samples: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of a gap over seeds, pooled over the groups that have several."""
    several = [sample for sample in samples if len(sample) > 1]
    if not several:
        return None
    squares = sum((len(sample) - 1) * statistics.variance(sample) for sample in several)
    return math.sqrt(squares / sum(len(sample) - 1 for sample in several))


def _group(
    name: str, rows: Sequence[Row], gaps: Mapping[int, float], scatter: float | None
) -> Group:
    first, values = rows[0], list(gaps.values())
    own = len(values) > 1
    error = statistics.stdev(values) / math.sqrt(len(values)) if own else scatter
    return Group(
        name=name,
        variant=first["variant"],
        beta2=first["beta2"],
        start=first["start"],
        interval=first["interval"],
        ranks=first["ranks"],
        seeds=tuple(sorted(row["seed"] for row in rows)),
        losses=tuple(row["valid_loss"] for row in rows if row["valid_loss"] is not None),
        gaps=tuple(values),
        gap=statistics.fmean(values) if values else None,
        error=error if values else None,
        error_is_own=own,
        payload=statistics.fmean(row["payload"]["mean"] for row in rows),
        largest_payload=max(row["payload"]["most"] for row in rows),
        clipped=statistics.fmean(row["clipped"] for row in rows),
        failed=sum(row["valid_loss"] is None for row in rows),
    )


def goals_of(groups: Sequence[Group]) -> list[Goal]:
    """Each rolling group beside plain Radius of its density, start and beta2, over the seeds both
    have; needs two of them."""
    found = []
    for group in groups:
        if not group.variant.startswith("rolling_"):
            continue
        plain_name = group.name.replace(group.variant, group.variant.split("-")[0]).replace(
            "rolling_", "radius_"
        )
        plain = next((other for other in groups if other.name == plain_name), None)
        if plain is None or plain.seeds != group.seeds or len(group.gaps) < 2:
            continue
        margins = [theirs / 2 - ours for theirs, ours in zip(plain.gaps, group.gaps, strict=True)]
        found.append(
            Goal(
                name=group.name,
                against=plain.name,
                ratio=statistics.fmean(group.gaps) / statistics.fmean(plain.gaps),
                margin=statistics.fmean(margins),
                error=statistics.stdev(margins) / math.sqrt(len(margins)),
                seeds=len(margins),
            )
        )
    return found


def as_markdown(
    rows: Sequence[Row],
    groups: Sequence[Group],
    goals: Sequence[Goal],
    reading: str,
    runs: Sequence[Run],
) -> str:
    """The page: how it was made, the table, the goal, and the reading of what was there before."""
    plan = rows[0]["plan"]
    lines = ["# What a gradient path costs in loss", "", _preface(plan), ""]
    lines += [f"{len(rows)} of {len(runs)} runs are in. Made by", "", f"    {_command(plan)}", ""]
    lines += ["and `--report`.", "", "![Loss less that of the dense run](convergence.png)", ""]
    lines += ["| run | seeds | T | payload | largest | clipped | validation loss | gap | error |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    lines += [_line(group) for group in groups]
    if goals:
        lines += ["", "| | gap / gap of plain Radius | half of that gap less this one | |"]
        lines += ["|---|---:|---:|---|"]
    for goal in goals:
        verdict = "at most half, beyond twice the error" if goal.met else "not shown"
        lines.append(
            f"| {_title(goal.name)} | {goal.ratio:.2f} | {goal.margin:+.4f} "
            f"± {goal.error:.4f} | {verdict} |"
        )
    return "\n".join([*lines, "", reading or f"{READING}\n"])


def _preface(plan: Mapping[str, Any]) -> str:
    batch = plan["tokens"] // plan["sequence"]
    return (
        f"GPT of {LAYERS} layers x {HIDDEN}, {HEADS} heads, a byte-level BPE of {VOCABULARY:,} "
        f"entries, wikipedia text; {plan['steps']:,} steps of {batch} x {plan['sequence']} tokens, "
        f"{plan['dtype']} parameters with fp32 sums, AdamW, learning rate 1e-3 to 1e-4 (cosine), "
        "weight decay 0.1, clipping at 1, no dropout. Every run but the dense ones is forked from "
        "the dense run of its seed and beta2, at 20 % of the steps unless said. Runs of one seed "
        "see the same batches. T is in steps; an interval in a name is that of a run of "
        f"{REFERENCE_STEPS:,}. Payload: bytes sent over those of a dense fp32 step, mean and "
        "largest of the steps after the fork. Clipped: share of the steps whose gradient norm was "
        "above 1. Gap: validation loss (nats a token) less that of the dense run of the same seed "
        f"over {plan['valid_tokens']:,} tokens; error: its standard error over seeds, after ~ that "
        "of one seed by the scatter of all groups that have several."
    )


def _command(plan: Mapping[str, Any]) -> str:
    sizes = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in plan.items())
    return f"python tools/bench/convergence.py --text-folder TEXT --jobs 2 {sizes}"


def _line(group: Group) -> str:
    cells = [group.title, ", ".join(map(str, group.seeds)), str(group.interval or "")]
    cells += [f"{group.payload:.3f}", f"{group.largest_payload:.3f}", f"{group.clipped:.0%}"]
    cells += [f"{statistics.fmean(group.losses):.4f}" if group.losses else "diverged"]
    cells += ["" if group.gap is None else f"{group.gap:+.4f}", _error(group)]
    return f"| {' | '.join(cells)} |"


def _title(name: str) -> str:
    return name.replace("-", ", ").replace("_", " ")


def _error(group: Group) -> str:
    if group.error is None:
        return ""
    return f"{'' if group.error_is_own else '~'}{group.error:.4f}"


def _reading(page: Path) -> str:
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    start = text.find(f"\n{READING}\n")
    return text[start + 1 :] if start >= 0 else ""
