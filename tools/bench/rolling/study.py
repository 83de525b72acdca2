"""The runs of the study of settings of Radius at equal bytes. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from tools.bench.convergence.radius import radius, rolling
from tools.bench.convergence.study import (
    DENSE,
    REFERENCE_STEPS,
    SEEDS,
    Flag,
    StudyPlan,
    StudyRun,
    checked,
)

PLAN = StudyPlan(steps=400, tokens=512, sequence=128, valid_tokens=65536)
"""The size of the runs."""
BUDGET = Fraction(19, 100)
"""Bytes of a matrix over those of a dense fp32 step: density 0.1 with T = 10."""
INTERVALS = (8, 10, 20, 40)
"""Values of T, in steps, that divide the step of the fork and have a density for the budget."""
SHORTEST, BASE, LONGER = 5, 10, 20
MOST_RUNS = 40


def density_for(interval: int, *, width: int = 4) -> float:
    """Return d such that d + (1 - d) / T entries of `width` bytes fill the budget."""
    entries = BUDGET * 4 / width
    return round(float((entries * interval - 1) / (interval - 1)), 4)


def study() -> tuple[StudyRun, ...]:
    """Return all runs, the most important first: a study may be stopped at any of them."""
    runs: list[StudyRun] = []
    for seed in SEEDS[:2]:
        runs += [StudyRun(variant=DENSE, seed=seed)]
        runs += [of_rolling(interval, seed=seed) for interval in INTERVALS]
        runs += [of_rolling(BASE, seed=seed, wire="bf16")]
        runs += [of_paper(seed=seed), of_paper(seed=seed, clip="per-step")]
        runs += [of_rolling(BASE, seed=seed, clip="per-step")]
        runs += [of_rolling(interval, seed=seed, wire="bf16") for interval in (SHORTEST, LONGER)]
    return checked(runs, most=MOST_RUNS)


def of_rolling(interval: int, *, seed: int = SEEDS[0], wire: str = "", clip: str = "") -> StudyRun:
    """Return a run of the rolling schedule that fills the budget at T = `interval`."""
    density = density_for(interval, width=2 if wire else 4)
    return _changed(rolling(density, "update", seed=seed), interval, wire=wire, clip=clip)


def of_paper(*, seed: int = SEEDS[0], clip: str = "") -> StudyRun:
    """Return a run of the paper's schedule that fills the budget at T = `BASE`."""
    return _changed(radius(density_for(BASE), seed=seed), BASE, clip=clip)


def _changed(run: StudyRun, interval: int, *, wire: str = "", clip: str = "") -> StudyRun:
    schedule = run.variant.split("_")[0]
    name = [f"{schedule}_{density_of(run)}", f"T_{interval}"]
    flags: Sequence[Flag] = ()
    if wire:
        name += [f"{wire}_values"]
        flags = [*flags, ("grad-wire", wire)]
    if clip:
        name += [f"clip_{clip}".replace("-", "_")]
        flags = [*flags, ("radius-clip", clip)]
    return replace(
        run,
        variant="-".join(name),
        # The plan scales it back to `interval` steps.
        interval=interval * REFERENCE_STEPS // PLAN.steps,
        flags=(*run.flags, *flags),
        # A single rank has nothing to round.
        ranks=2 if wire else 1,
    )


def density_of(run: StudyRun) -> str:
    """Return the density of a run, as its flag has it."""
    return dict(run.flags)["radius-density"]
