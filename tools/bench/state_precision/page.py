"""The page of the study of optimizer states: bytes, losses and paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config import parse, resolve
from megatron.low_memory.planned_memory import planned_gpt
from megatron.parallel.dims import ParallelDims
from megatron.report.charts import PALETTE
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.common.figures import plain_axes, save
from tools.bench.convergence.groups import RunGroup
from tools.bench.convergence.model import HEADS, VOCABULARY, parameters
from tools.bench.convergence.report import ReportedFinding, Study, table
from tools.bench.convergence.rows import Row
from tools.bench.convergence.study import SEEDS, StudyPlan, flags_of
from tools.bench.state_precision.study import (
    AT_LOW_RATES,
    IN_FP16,
    LOW_RATES,
    RATES,
    SETTINGS,
    SHAPE,
    StateSetting,
    study,
)
from tools.studies.statistics import standard_error

Losses = dict[str, dict[int, float]]
"""Validation loss by variant and seed."""


def losses_of(rows: Sequence[Row]) -> Losses:
    """Return the validation losses of the runs that ended well."""
    found: Losses = {}
    for row in rows:
        if row["valid_loss"] is not None:
            found.setdefault(row["variant"], {})[row["seed"]] = row["valid_loss"]
    return found


def differences(losses: Losses, setting: StateSetting) -> dict[int, float]:
    """Return by seed the loss of a setting minus that of its reference; empty for a reference."""
    if setting.variant == setting.reference:
        return {}
    own, reference = (losses.get(name, {}) for name in (setting.variant, setting.reference))
    return {seed: own[seed] - reference[seed] for seed in sorted(own.keys() & reference.keys())}


def planned_bytes(setting: StateSetting, plan: StudyPlan) -> float:
    """Return the planned bytes of model and optimizer, for each parameter.

    They are the planned column of the memory ledger: weights, gradients and states of all
    parameters, norms and biases too, without scratch memory.
    """
    flags = flags_of(setting.run(SEEDS[0]), plan, data=Path("data"), runs_dir=Path("runs"))
    config = resolve(parse(flags, paths=GRADIENT_PATHS), 1)
    column = planned_gpt(
        config,
        ParallelDims(tp=1, dp=1, pp=1),
        GRADIENT_PATHS[config.gradient.grad_path],
        rank=0,
        vocabulary=VOCABULARY,
    )
    return (column.model + column.optimizer) / parameters(plan.sequence, SHAPE)


def tell(rows: Sequence[Row], groups: Sequence[RunGroup]) -> ReportedFinding:
    """Return the tables of the page, with the names of runs that have no row yet."""
    del groups  # their gaps are to one reference, those of this study to three
    losses, plan = losses_of(rows), StudyPlan(**rows[0]["plan"])
    lines = differences_table(losses, (*SETTINGS, *IN_FP16), plan)
    lines += ["", f"The same at learning rates of {_between(LOW_RATES)}:", ""]
    lines += differences_table(losses, AT_LOW_RATES, plan)
    done = {row["name"] for row in rows}
    missing = [run.name for run in study() if run.name not in done]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    values = {
        "differences": {each.variant: differences(losses, each) for each in _all()},
        "bytes": {each.variant: planned_bytes(each, plan) for each in _all()},
        "missing": missing,
    }
    return ReportedFinding(lines=lines, values=values)


def differences_table(
    losses: Losses, settings: Sequence[StateSetting], plan: StudyPlan
) -> list[str]:
    """Return the table of bytes, losses and differences to the reference, seed by seed."""
    header = ("states", "bytes", "loss", "difference", "error", *(f"seed {s}" for s in SEEDS))
    lines: list[list[str]] = []
    for setting in settings:
        own, found = losses.get(setting.variant, {}), differences(losses, setting)
        mean = f"{statistics.fmean(own.values()):.4f}" if own else ""
        difference = f"{statistics.fmean(found.values()):+.4f}" if found else ""
        error = f"{standard_error(list(found.values())):.4f}" if len(found) > 1 else ""
        each = [f"{found[seed]:+.4f}" if seed in found else "" for seed in SEEDS]
        bytes_each = f"{planned_bytes(setting, plan):.2f}"
        lines.append([setting.title, bytes_each, mean, difference, error, *each])
    return table(header, lines)


def draw(path: Path, rows: Sequence[Row]) -> bool:
    """Draw the differences by setting, seeds and means; return False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    losses = losses_of(rows)
    shown = [each for each in _all() if differences(losses, each)]
    figure = Figure(figsize=(9, 1 + 0.36 * len(shown)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for place, setting in enumerate(shown):
        found = list(differences(losses, setting).values())
        color = PALETTE[setting in AT_LOW_RATES]
        axes.plot(found, [place] * len(found), "o", color=color, alpha=0.35, markersize=4)
        error = standard_error(found) if len(found) > 1 else 0.0
        axes.errorbar(statistics.fmean(found), place, xerr=error, fmt="D", color=color, capsize=3)
    names = [_label(setting) for setting in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="#111827", linewidth=0.8)
    axes.set_xlabel("validation loss less that with fp32 states (nats a token)")
    plain_axes(axes)
    save(figure, path)
    return True


def _label(setting: StateSetting) -> str:
    return setting.title + (", low rate" if setting in AT_LOW_RATES else "")


def _all() -> tuple[StateSetting, ...]:
    return (*SETTINGS, *IN_FP16, *AT_LOW_RATES)


def _between(rates: Sequence[tuple[str, str]]) -> str:
    highest, lowest = (value for _, value in rates)
    return f"{highest} to {lowest}"


def _preface(plan: Mapping[str, Any]) -> str:
    layers, hidden = SHAPE
    batch, size = plan["tokens"] // plan["sequence"], parameters(plan["sequence"], SHAPE)
    return (
        f"GPT of {layers} layers x {hidden}, {HEADS} heads, {size:,} parameters, a byte-level BPE "
        f"of {VOCABULARY:,} entries, wikipedia text; {plan['steps']:,} steps of {batch} x "
        f"{plan['sequence']} tokens, AdamW, learning rate {_between(RATES)} (cosine), weight decay "
        "0.1, clipping at 1, no dropout. Parameters are bf16 or fp16, gradients fp32 unless the "
        "row says bf16. fp16 is a storage format here: a CPU without units for fp16 multiplies it "
        "at 0.25 GFLOP/s, so that the trainer widens operands of products to fp32, and rounds "
        "results to fp16. Bytes: planned, of weights, gradients and states, for each parameter "
        "(embeddings are matrices; norms and biases keep fp32 states). Difference: validation loss "
        f"of {plan['valid_tokens']:,} tokens, less that of the reference of the same seed; error: "
        "its standard error over seeds."
    )


STATES = Study(
    folder="state_precision",
    runs=study(),
    preface=_preface,
    tell=tell,
    panels=(),
    colors={},
    draw=draw,
    caption="Validation loss less that with fp32 states: seeds, mean and standard error",
)
