"""The runs of the study of gradient paths by the bytes that they send. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tools.bench.convergence.radius import baseline, in_turns, rolling
from tools.bench.convergence.study import (
    DENSE,
    REFERENCE_STEPS,
    START,
    Flag,
    StudyPlan,
    StudyRun,
    checked,
)

PLAN = StudyPlan(steps=400, tokens=512, sequence=128, valid_tokens=65536)
"""The size of the runs, that of `tools.bench.rolling`: a dense run serves both studies."""
SEEDS = (1, 2, 3, 4)
OTHER_SEEDS = SEEDS[:2]
"""Seeds of the runs that are clearly beaten after two."""
LENGTHS = (80, 120, 160, 240, 320)
"""Steps of the shorter dense runs, with which `tools.bench.time_to_loss` compares at equal time."""
INTERVAL = 20
"""T of the rolling schedule, in steps."""
SHORTER = "dense_steps_"
"""Prefix of the variants of shorter dense runs."""
MOST_RUNS = 80


def study() -> tuple[StudyRun, ...]:
    """Return all runs, the most important first: a study may be stopped at any of them."""
    return checked([run for seed in SEEDS for run in of_seed(seed)], most=MOST_RUNS)


def of_seed(seed: int) -> list[StudyRun]:
    """Return the dense run of a seed, a run of each setting that forks from it, and shorter runs."""
    runs = [
        encoded("bf16"),
        encoded("int8"),
        encoded("int4"),
        radius(0.35, "int4"),
        baseline("lowrank+sparse", "lowrank_4_0.01", []),
        baseline("powersgd", "powersgd_4", [("powersgd-rank", "4")]),
        baseline("powersgd", "powersgd_16", [("powersgd-rank", "16")]),
        local(10),
        local(10, wire="int4"),
    ]
    if seed in OTHER_SEEDS:
        runs += [
            radius(0.35, "bf16"),
            radius(0.35, "int8"),
            radius(0.1, "int8"),
            replace(in_turns(8), ranks=2),
            baseline("topk", "topk_0.01", [("topk-density", "0.01")]),
        ]
    runs += [shorter(steps) for steps in LENGTHS]
    return [StudyRun(variant=DENSE, seed=seed), *(replace(run, seed=seed) for run in runs)]


def shorter(steps: int) -> StudyRun:
    """Return a dense run whose learning rate has reached its lowest after `steps`."""
    return StudyRun(variant=f"{SHORTER}{steps}", seed=1, steps=steps)


def encoded(wire: str) -> StudyRun:
    """Return the dense path over a wire."""
    flags: Sequence[Flag] = [("grad-wire", wire)]
    return StudyRun(variant=f"dense_{wire}", seed=1, start=START, flags=tuple(flags), ranks=2)


def radius(density: float, wire: str) -> StudyRun:
    """Return the rolling schedule over a wire."""
    run = rolling(density, "update")
    return replace(
        run,
        variant=f"rolling_{density:g}_{wire}",
        interval=INTERVAL * REFERENCE_STEPS // PLAN.steps,
        flags=(*run.flags, ("grad-wire", wire)),
        ranks=2,
    )


def local(steps: int, *, wire: str = "") -> StudyRun:
    """Return local steps, whose changes of weights travel in fp32 or over a wire."""
    flags: list[Flag] = [("local-steps", f"{steps}")]
    if wire:
        flags += [("grad-wire", wire)]
    name = "_".join(["diloco", f"{steps}", *([wire] if wire else [])])
    return StudyRun(variant=name, seed=1, start=START, path="diloco", flags=tuple(flags), ranks=2)
