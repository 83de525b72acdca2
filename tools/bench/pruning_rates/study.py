"""The runs of the study of learning rates of pruned networks. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from tools.bench.convergence.study import DENSE, SEEDS, SGD_LR, StudyPlan, StudyRun, checked
from tools.bench.pruning.study import (
    SPARSITY,
    early_bird,
    from_scratch,
    pruned,
    small,
    with_radius,
)

PLAN = StudyPlan(steps=400, tokens=512, sequence=128, valid_tokens=65536)
"""The size of the runs, a fifth of the tokens of the study of pruning."""
LR = 1e-3
"""The highest learning rate of a run of factor 1 with AdamW."""
FACTORS = (1, 2, 4, 8)
MOST_RUNS = 64


def study() -> tuple[StudyRun, ...]:
    """Return all runs, the most important first: a study may be stopped at any of them."""
    runs = [StudyRun(variant=DENSE, seed=SEEDS[0])]
    scratch, others, rest = swept()
    for factor in FACTORS:
        runs += [at_rate(run, factor) for run in scratch]
    for factor in FACTORS:
        runs += [at_rate(run, factor) for run in others if factor > 1 or not run.is_dense]
    runs += [from_scratch(SPARSITY, rewired=True, growth="zeros")]
    for factor in FACTORS:
        again = [replace(run, seed=seed) for seed in SEEDS[1:] for run in scratch[:2]]
        runs += [at_rate(run, factor) for run in again]
    runs += [StudyRun(variant=DENSE, seed=SEEDS[0], optimizer="sgd")]
    runs += [at_rate(run, factor) for factor in FACTORS for run in rest]
    return checked(runs, most=MOST_RUNS)


def swept() -> tuple[tuple[StudyRun, ...], ...]:
    """Return the runs of the study of pruning at p = 0.9, and dense ones, in three groups.

    The groups are runs from scratch, others with AdamW, and the rest, in order of importance.
    """
    scratch = (
        from_scratch(SPARSITY, rewired=True),
        from_scratch(SPARSITY, rewired=False),
        from_scratch(SPARSITY, rewired=True, keep_moments=True),
    )
    others = (
        small(),
        pruned("magnitude"),
        pruned("random"),
        early_bird(),
        StudyRun(variant=DENSE, seed=SEEDS[0]),
    )
    rest = (
        with_radius(),
        pruned("magnitude", optimizer="sgd"),
        pruned("random", optimizer="sgd"),
    )
    return scratch, others, rest


def at_rate(run: StudyRun, factor: int) -> StudyRun:
    """Return the run at `factor` times its learning rate, a fork from its fork on."""
    if factor == 1:
        return run
    highest = factor * (SGD_LR if run.optimizer == "sgd" else LR)
    rates = (("lr", f"{highest:g}"), ("min-lr", f"{highest / 10:g}"))
    return replace(run, variant=f"{run.variant}{MARK}{factor}", flags=(*run.flags, *rates))


MARK = "-lr_x"
"""Stands before the factor in the name of a run whose rate is not the first."""


def base_and_factor(group: str) -> tuple[str, int]:
    """Return the name of a group at factor 1, and its factor."""
    head, mark, tail = group.partition(MARK)
    if not mark:
        return group, 1
    factor, dash, rest = tail.partition("-")
    return f"{head}{dash}{rest}", int(factor)
