"""An estimate of a study's time, from short dense runs in parallel, one per job."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from megatron.errors import ConfigError
from megatron.metrics.logger import JSONL
from tools.bench.convergence.rows import records
from tools.bench.convergence.study import REFERENCE_STEPS, StudyPlan, StudyRun, flags_of

STEPS = 40
WARM_UP = 5
SEVERAL_RANKS = 2.5
"""Rough cost of a run of several ranks, relative to a run of one rank."""


def measure(
    runs: Sequence[StudyRun],
    plan: StudyPlan,
    *,
    data: Path,
    work: Path,
    jobs: int,
    runner: Callable[[Sequence[str], int, Path], int],
) -> None:
    """Print seconds per step and of the rest of a run, and the study's hours at some lengths."""
    folder = work / "measure"
    folder.mkdir(parents=True, exist_ok=True)
    attempt = time.time_ns()

    def one(number: int) -> tuple[float, float]:
        run = StudyRun(variant=f"{attempt}-{number}", seed=1)
        flags = flags_of(run, plan, data=data, runs_dir=folder)
        flags += ["--train-iters", str(STEPS), "--lr-warmup-iters", "1"]
        began = time.perf_counter()
        code = runner([*flags, "--eval-interval", str(STEPS)], 1, folder / "console.txt")
        took = time.perf_counter() - began
        if code:
            raise ConfigError(f"a run failed with exit code {code}; see {folder / 'console.txt'}")
        seconds = step_seconds(folder / run.name / JSONL)
        return statistics.median(seconds[WARM_UP:]), took - sum(seconds)

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, range(jobs)))
    step = statistics.median(each[0] for each in found)
    rest = statistics.median(each[1] for each in found)
    print(f"{plan.tokens} tokens, {plan.dtype}, {jobs} at once: a step {step:.3f} s (median of ")
    print(f"{jobs} x {STEPS - WARM_UP}), start, evaluation and saving {rest:.1f} s a run")
    print("steps  one dense run, min  study, h")
    for share in (0.1, 0.3, 0.5, 0.7, 1.0):
        size = replace(plan, steps=round(share * REFERENCE_STEPS))
        total = study_seconds(runs, size, step=step, rest=rest) / jobs
        dense = size.steps * step + rest
        print(f"{size.steps:5d}  {dense / 60:18.1f}  {total / 3600:8.2f}")


def study_seconds(runs: Sequence[StudyRun], plan: StudyPlan, *, step: float, rest: float) -> float:
    """Return the seconds of all runs in sequence; forks exclude the steps that they share."""
    total = 0.0
    for run in runs:
        steps = plan.steps * (1 - (run.start or 0.0))
        total += (steps * step + rest) * (1.0 if run.ranks == 1 else SEVERAL_RANKS)
    return total


def step_seconds(path: Path) -> list[float]:
    """Return the seconds of each step in a metrics file."""
    return [line["step_seconds"] for line in records(path) if "lm_loss" in line]
