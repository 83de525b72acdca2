"""The runs of the study of Radius. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tools.bench.convergence.study import DENSE, EARLY, SEEDS, START, Flag, StudyRun, checked

MOST_RUNS = 46
INTERVAL = 50
LOWRANK = (("lowrank-rank", "4"), ("lowrank-density", "0.01"))
"""Flags of the declared run of `lowrank+sparse`, its defaults."""


def study() -> tuple[StudyRun, ...]:
    """Return all runs, the most important first: a study may be stopped at any of them."""
    runs = [StudyRun(variant=DENSE, seed=seed) for seed in SEEDS]
    runs += [StudyRun(variant=DENSE, seed=SEEDS[0], beta2=0.95)]
    for seed in SEEDS:
        runs += [radius(0.1, seed=seed), radius(0.4, seed=seed)]
        runs += [rolling(d, select, seed=seed) for d in (0.1, 0.4) for select in SELECTIONS]
    runs += [radius(0.1, beta2=0.95), *(rolling(0.1, s, beta2=0.95) for s in SELECTIONS)]
    runs += [radius(0.4, start=EARLY), radius(0.1, start=EARLY)]
    runs += [rolling(0.1, select, start=EARLY) for select in SELECTIONS]
    runs += [rolling(0.4, "update", start=EARLY)]
    runs += [radius(0.1, label="no_feedback", more=[("radius-residual", "none")])]
    runs += [
        radius(d, label="by_gradient", more=[("radius-select", "gradient")]) for d in (0.1, 0.4)
    ]
    runs += [radius(0.5), radius(0.4, interval=10), radius(0.4, interval=200)]
    runs += [radius(0.1, interval=10), radius(0.1, interval=200)]
    runs += [baseline("topk", "topk_0.1", [("topk-density", "0.1")])]
    runs += [baseline("powersgd", "powersgd_4", [("powersgd-rank", "4")])]
    runs += [baseline("lowrank+sparse", "lowrank_4_0.01", LOWRANK)]
    runs += [in_turns(8)]
    runs += [baseline("demo", "demo_32-mean", [("demo-sign", "false")]), demo(32)]
    runs += [local("diloco_50"), local("diloco_50-topk", [("outer-compression", "topk")])]
    return checked(runs, most=MOST_RUNS)


SELECTIONS = ("update", "seeded")


def radius(
    density: float,
    *,
    seed: int = SEEDS[0],
    beta2: float = 0.999,
    start: float = START,
    interval: int = INTERVAL,
    label: str = "",
    more: Sequence[Flag] = (),
) -> StudyRun:
    """Return Radius as published, or with one change named by `label`."""
    changed = f"-{label}" if label else ""
    period = "" if interval == INTERVAL else f"-interval_{interval}"
    return StudyRun(
        variant=f"radius_{density:g}{period}{changed}",
        seed=seed,
        beta2=beta2,
        start=start,
        path="radius",
        interval=interval,
        flags=(("radius-density", f"{density:g}"), *more),
    )


def rolling(
    density: float,
    select: str,
    *,
    seed: int = SEEDS[0],
    beta2: float = 0.999,
    start: float = START,
) -> StudyRun:
    """Return Radius whose tensors are flushed part by part."""
    return StudyRun(
        variant=f"rolling_{density:g}-{select}",
        seed=seed,
        beta2=beta2,
        start=start,
        path="radius",
        interval=INTERVAL,
        flags=(
            ("radius-density", f"{density:g}"),
            ("radius-schedule", "rolling"),
            ("radius-select", select),
        ),
    )


def baseline(path: str, variant: str, flags: Sequence[Flag]) -> StudyRun:
    """Return a method whose result depends on the number of ranks."""
    return StudyRun(
        variant=variant, seed=SEEDS[0], start=START, path=path, flags=tuple(flags), ranks=4
    )


def local(variant: str, flags: Sequence[Flag] = ()) -> StudyRun:
    """Return local steps of four replicas, which are averaged every 50 steps."""
    return replace(baseline("diloco", variant, flags), every=(("local-steps", 50),))


def in_turns(interval: int) -> StudyRun:
    """Return the path that sends one of `interval` parts of each matrix in every step."""
    return StudyRun(
        variant=f"roundrobin_{interval}",
        seed=SEEDS[0],
        start=START,
        path="roundrobin",
        flags=(("roundrobin-interval", f"{interval}"),),
    )


def demo(k: int) -> StudyRun:
    """Return DeMo with the sign, from the beginning: its optimizer cannot continue AdamW's run."""
    return StudyRun(
        variant=f"demo_{k}",
        seed=SEEDS[0],
        path="demo",
        flags=(
            ("demo-k", f"{k}"),
            ("optimizer", "sgd"),
            ("sgd-momentum", "0"),
            ("clip-grad", "0"),
        ),
        ranks=4,
    )
