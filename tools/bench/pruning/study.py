"""The runs of the study of pruning.

No torch. No torch.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from tools.bench.convergence.model import shape_of, stored
from tools.bench.convergence.radius import INTERVAL
from tools.bench.convergence.study import (
    DENSE,
    EARLY,
    SEEDS,
    START,
    Optimizer,
    StudyPlan,
    StudyRun,
    Ticket,
    checked,
)

MOST_RUNS = 28
SPARSITY = Fraction(9, 10)
REWIRED = (Fraction(9, 10), Fraction(8, 10), Fraction(7, 10))
EARLY_BIRD_INTERVAL = 10
DSR_INTERVAL = 50
"""Steps between masks drawn, and between rewirings at first, of a run of `REFERENCE_STEPS`."""
SMALL_SHAPE = shape_of(stored(StudyPlan.sequence, SPARSITY), StudyPlan.sequence)
"""Shape of the dense model with as many parameters as the pruned one stores."""


def study() -> tuple[StudyRun, ...]:
    """All runs, those first that matter most: a study may be stopped at any of them.

    Its dense runs are those of the study of Radius, so that one folder of runs serves both.
    """
    runs = [StudyRun(variant=DENSE, seed=seed) for seed in SEEDS]
    runs += [pruned("magnitude", seed=seed) for seed in SEEDS]
    runs += [pruned("random", seed=seed) for seed in SEEDS]
    runs += [early_bird(seed=seed) for seed in SEEDS]
    runs += [small()]
    runs += [StudyRun(variant=DENSE, seed=SEEDS[0], optimizer="sgd")]
    runs += [pruned(ticket, optimizer="sgd") for ticket in ("magnitude", "random")]
    runs += [with_radius()]
    for sparsity in REWIRED:
        runs += [from_scratch(sparsity, rewired=True), from_scratch(sparsity, rewired=False)]
    runs += [from_scratch(SPARSITY, rewired=True, keep_moments=True)]
    for seed in SEEDS[1:]:
        runs += [from_scratch(SPARSITY, rewired=rewired, seed=seed) for rewired in (True, False)]
    return checked(runs, most=MOST_RUNS)


def pruned(ticket: Ticket, *, seed: int = SEEDS[0], optimizer: Optimizer = "adam") -> StudyRun:
    """Pruned at once where it leaves the dense run."""
    return StudyRun(
        variant=f"{ticket}_{float(SPARSITY):g}",
        seed=seed,
        optimizer=optimizer,
        start=START,
        path="samo",
        sparsity=SPARSITY,
        ticket=ticket,
    )


def early_bird(*, seed: int = SEEDS[0]) -> StudyRun:
    """Pruned as soon as what pruning would keep holds still."""
    return StudyRun(
        variant=f"early_bird_{float(SPARSITY):g}",
        seed=seed,
        start=EARLY,
        path="samo",
        every=(("samo-early-bird-interval", EARLY_BIRD_INTERVAL),),
        sparsity=SPARSITY,
        ticket="early-bird",
    )


def small(*, seed: int = SEEDS[0]) -> StudyRun:
    """A dense model of the same family with as many parameters."""
    layers, hidden = SMALL_SHAPE
    return StudyRun(variant=f"dense_{layers}x{hidden}", seed=seed, shape=SMALL_SHAPE)


def with_radius(density: str = "0.4") -> StudyRun:
    """Pruned, and of what is left a part is sent."""
    return StudyRun(
        variant=f"magnitude_{float(SPARSITY):g}-radius_{density}",
        seed=SEEDS[0],
        start=START,
        path="samo+radius",
        interval=INTERVAL,
        sparsity=SPARSITY,
        ticket="magnitude",
        flags=(("radius-density", density),),
    )


def from_scratch(
    sparsity: Fraction,
    *,
    rewired: bool,
    seed: int = SEEDS[0],
    keep_moments: bool = False,
    growth: Literal["survivors", "zeros"] = "survivors",
) -> StudyRun:
    """Sparse from the beginning, by a random mask that stays or by one that DSR changes.

    `keep_moments`: of what a rewiring leaves in place. `growth`: `--dsr-growth`.
    """
    differs = "-kept_moments" * keep_moments + "-growth_by_zeros" * (growth == "zeros")
    flags = (("dsr-reset-moments", "new"),) * keep_moments
    flags += (("dsr-growth", growth),) * (growth == "zeros")
    return StudyRun(
        variant=f"{'dsr' if rewired else 'random'}_{float(sparsity):g}{differs}-from_scratch",
        seed=seed,
        path="samo",
        every=(("dsr-interval", DSR_INTERVAL),) if rewired else (),
        sparsity=sparsity,
        ticket="random",
        flags=flags,
    )
