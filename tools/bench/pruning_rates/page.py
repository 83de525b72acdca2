"""The page of the study of learning rates: losses by rate, and DSR against masks that stay."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.report.charts import PALETTE
from tools.bench.common.figures import plain_axes, save
from tools.bench.convergence.groups import RunGroup, title_of
from tools.bench.convergence.model import parameters
from tools.bench.convergence.report import ReportedFinding, Study, size_of, table
from tools.bench.convergence.rows import WINDOWS, Row
from tools.bench.convergence.study import SEEDS, StudyRun
from tools.bench.pruning.study import SPARSITY, from_scratch
from tools.bench.pruning_rates.study import FACTORS, base_and_factor, study, swept
from tools.studies.statistics import standard_error

MOVING, STAYING = (from_scratch(SPARSITY, rewired=rewired).group for rewired in (True, False))
Losses = dict[str, dict[int, dict[int, float]]]
"""Validation loss by group at factor 1, factor and seed."""


def losses_of(rows: Sequence[Row]) -> Losses:
    """Return the validation losses of the runs that ended well."""
    found: Losses = {}
    for row in rows:
        if row["valid_loss"] is not None:
            base, factor = base_and_factor(row["group"])
            found.setdefault(base, {}).setdefault(factor, {})[row["seed"]] = row["valid_loss"]
    return found


def tell(rows: Sequence[Row], groups: Sequence[RunGroup]) -> ReportedFinding:
    """Return the tables of the page, with the names of runs that have no row yet."""
    losses = losses_of(rows)
    lines = by_rate(losses)
    lines += [
        "",
        "DSR less the random mask that stays, from scratch, mean of the seeds both have:",
        "",
    ]
    lines += against(losses)
    width = window_of(rows[0]["plan"])
    lines += [
        "",
        "Share of the run's trained weights that a rewiring pruned (median and largest), and the "
        f"largest rise of the training loss over a rewiring, from the mean of {width} steps before "
        f"it to that of {width} steps after it:",
        "",
    ]
    lines += rewirings(rows)
    done = {row["name"] for row in rows}
    missing = [run.name for run in study() if run.name not in done]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    return ReportedFinding(lines=lines, values={"losses": losses, "missing": missing})


def by_rate(losses: Losses) -> list[str]:
    """Return the table of the losses of the first seed by factor, with the best factor."""
    header = ("run", *(f"x {factor}" for factor in FACTORS), "best")
    lines: list[list[str]] = []
    for base in _bases():
        found = {
            f: seeds[SEEDS[0]] for f, seeds in losses.get(base, {}).items() if SEEDS[0] in seeds
        }
        if found:
            best = min(found, key=lambda factor: found[factor])
            cells = [f"{found[factor]:.4f}" if factor in found else "" for factor in FACTORS]
            lines.append([title_of(base), *cells, f"x {best}" if len(found) > 1 else ""])
    return table(header, lines)


def against(losses: Losses) -> list[str]:
    """Return the table of the differences of DSR and a mask that stays, by factor."""
    lines: list[list[str]] = []
    for factor in FACTORS:
        moving, staying = (losses.get(base, {}).get(factor, {}) for base in (MOVING, STAYING))
        seeds = sorted(moving.keys() & staying.keys())
        if seeds:
            differences = [moving[seed] - staying[seed] for seed in seeds]
            error = f"{standard_error(differences):.4f}" if len(seeds) > 1 else ""
            mean = statistics.fmean(differences)
            lines.append([f"x {factor}", ", ".join(map(str, seeds)), f"{mean:+.4f}", error])
    return table(("rate", "seeds", "difference", "error"), lines)


def rewirings(rows: Sequence[Row]) -> list[str]:
    """Return the table of rewirings by run: their number, shares pruned, and rises of the loss."""
    lines: list[list[str]] = []
    for row in rows:
        if counts := row.get("dsr_pruned"):
            trained = row["stored"] * parameters(row["plan"]["sequence"])
            step, most = max(counts, key=lambda each: each[1])
            middle = statistics.median(count for _, count in counts)
            rises = loss_rises(row)
            struck = max(rises, key=lambda step: rises[step])
            lines.append(
                [
                    f"{title_of(row['group'])}, seed {row['seed']}",
                    str(len(counts)),
                    f"{middle / trained:.2f}",
                    f"{most / trained:.2f}",
                    str(step),
                    f"{rises[struck]:+.2f}",
                    str(struck),
                ]
            )
    header = ("run", "rewirings", "median", "largest", "after step", "loss rise", "after step")
    return table(header, lines)


def loss_rises(row: Row) -> dict[int, float]:
    """Return the rise of the training loss over each rewiring, by the step of the rewiring.

    The rise is the mean loss of the first whole window of the curve after the rewiring, minus that
    of the last one before it. A rewiring without both windows is left out.
    """
    width = window_of(row["plan"])
    found: dict[int, float] = {}
    for step, _ in row["dsr_pruned"]:
        before = [loss for last, loss in row["curve"] if last <= step]
        after = [loss for last, loss in row["curve"] if last - width >= step]
        if before and after:
            found[step] = after[0] - before[-1]
    return found


def window_of(plan: Mapping[str, Any]) -> int:
    """Return the number of steps over which a point of a loss curve is the mean."""
    return plan["steps"] // WINDOWS


def draw(path: Path, rows: Sequence[Row]) -> bool:
    """Draw the mean loss of each group by learning rate; return False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    losses, figure = losses_of(rows), Figure(figsize=(9, 5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    shown = [base for base in _bases() if len(losses.get(base, {})) > 1]
    for number, base in enumerate(shown):
        factors = sorted(losses[base])
        means = [statistics.fmean(losses[base][factor].values()) for factor in factors]
        style = "-" if number < len(PALETTE) else "--"
        color = PALETTE[number % len(PALETTE)]
        axes.plot(factors, means, f"o{style}", color=color, markersize=4, label=title_of(base))
    axes.set_xscale("log", base=2)
    axes.set_xticks(FACTORS, [f"x {factor}" for factor in FACTORS])
    axes.set_xlabel("learning rate, over that of the study of pruning")
    axes.set_ylabel("validation loss (nats a token), mean of seeds")
    plain_axes(axes)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)
    return True


def _bases() -> list[str]:
    rows: list[StudyRun] = [run for group in swept() for run in group]
    zeros = from_scratch(SPARSITY, rewired=True, growth="zeros")
    return list(dict.fromkeys(run.group for run in (*rows, zeros)))


def _preface(plan: Mapping[str, Any]) -> str:
    return (
        f"{size_of(plan)} The runs are those of the study of [pruning](../pruning/README.md) at p "
        f"= {float(SPARSITY):g}, named and made as there, in a fifth of the tokens. x k: k times "
        "the learning rate, highest and lowest; SGD: 0.1 to 0.01 at x 1. Weight decay is "
        "decoupled, so that a step's share of decay grows with the rate. A run that leaves a dense "
        "run does so at the dense run's rate, and has its own from there on. Losses: validation, "
        f"of {plan['valid_tokens']:,} tokens, of seed {SEEDS[0]}; in the picture the mean of seeds."
    )


RATES = Study(
    folder="pruning_rates",
    runs=study(),
    preface=_preface,
    tell=tell,
    panels=(),
    colors={},
    draw=draw,
    caption="Validation loss by learning rate",
)
