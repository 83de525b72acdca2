"""Results of finished runs, one JSON line each; a report needs no run folders."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.metrics.logger import JSONL, lines_of, parse_line
from tools.bench.convergence.model import parameters
from tools.bench.convergence.study import CLIP, EARLY_BIRD_DISTANCE, StudyPlan, StudyRun

WINDOWS = 100
"""Points of a loss curve; each is the mean over an equal share of the run's steps."""
MOST_KEPT = 50
"""Shares of the kept index in a row: a rolling schedule selects at every step."""

Row = dict[str, Any]


def row_of(run: StudyRun, plan: StudyPlan, folder: Path, *, exit_code: int) -> Row:
    """Return the row of a finished run, from its metrics.jsonl.

    `valid_loss` is None if the run ended with exit code 5. `payload` has the bytes sent over a
    dense step's bytes, mean and maximum of the steps after the fork (entries instead of bytes on
    one rank). `ticket` of a pruned run is the step after which it was drawn; `stored` is the share
    of parameters that a smaller or pruned model trains; `dsr_pruned` has (step, pruned weights) of
    each rewiring. `curve` has (last step, mean training loss) of each whole window. Raises
    `DataError` if the folder is not that of a finished run.
    """
    steps, valid = _read(folder / JSONL)
    length = run.length(plan)
    if not steps or (exit_code == 0 and length not in valid):
        raise DataError(f"{folder}: holds no evaluation of step {length}; remove the folder")
    taken = [steps[i] for i in sorted(steps)]
    losses = {i: float(step["lm_loss"]) for i, step in steps.items()}
    norms = [float(step["grad_norm"]) for step in taken if step["grad_norm"] is not None]
    ticket = _ticket(run, plan, steps)
    payload = [_payload(step, run, plan, ticket=ticket) for step in taken]
    row: Row = {
        "name": run.name,
        "group": run.group,
        "variant": run.variant,
        "seed": run.seed,
        "beta2": run.beta2,
        "start": run.start,
        "path": run.path,
        "interval": None if run.interval is None else plan.scaled(run.interval),
        "ranks": run.ranks,
        "plan": asdict(plan),
        "exit_code": exit_code,
        "last_step": max(steps),
        "valid_loss": valid.get(length) if exit_code == 0 else None,
        "train_loss": _tail(losses, length),
        "payload": {"mean": round(statistics.fmean(payload), 6), "most": round(max(payload), 6)},
        "clipped": round(sum(norm > CLIP for norm in norms) / max(1, len(norms)), 4),
        "largest_norm": max(norms, default=0.0),
        "seconds": round(sum(step["step_seconds"] for step in taken), 1),
        "curve": curve(losses, plan),
    }
    kept = [(i, steps[i]["index_kept"]) for i in sorted(steps) if "index_kept" in steps[i]]
    if kept:
        stride = -(-len(kept) // MOST_KEPT)
        row["index_kept"] = [[i, round(share, 4)] for i, share in kept[::stride]]
    pruned = [[i, int(steps[i]["dsr_pruned"])] for i in sorted(steps) if "dsr_pruned" in steps[i]]
    row |= {"dsr_pruned": pruned} if pruned else {}
    return row | _of_pruning(run, plan, ticket)


def setting(row: Row) -> tuple[int, float, str]:
    """Return the setting that a row shares with its dense run: seed, beta2 and optimizer."""
    return row["seed"], row["beta2"], row.get("optimizer", "adam")


def curve(losses: Mapping[int, float], plan: StudyPlan) -> list[tuple[int, float]]:
    """Return the mean loss of each window of a run of the plan that `losses` has completely."""
    width = plan.steps // WINDOWS
    points: list[tuple[int, float]] = []
    for last in range(width, plan.steps + 1, width):
        window = [losses.get(i, math.nan) for i in range(last - width + 1, last + 1)]
        mean = statistics.fmean(window)
        if math.isfinite(mean):
            points.append((last, round(mean, 5)))
    return points


def append_row(path: Path, row: Row) -> None:
    """Append a line to the results; a torn line before it stays a separate line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.is_file() else b""
    torn = bool(before) and not before.endswith(b"\n")
    with open(path, "a", encoding="utf-8") as stream:
        stream.write("\n" * torn + json.dumps(row) + "\n")


def read_rows(path: Path, plan: StudyPlan | None = None) -> list[Row]:
    """Return the results so far; empty without a file.

    With `plan`: `ConfigError` for rows of a study of another size, which must not be mixed. A torn
    last line is left out.
    """
    if not path.is_file():
        return []
    rows: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if plan is not None and row["plan"] != asdict(plan):
            raise ConfigError(
                f"--results: {path} holds runs of {row['plan']}, asked for is {asdict(plan)}; give "
                "the same sizes, or another --results and --work"
            )
        rows[row["name"]] = row
    return list(rows.values())


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a metrics file; none without a file."""
    for line in lines_of(path) if path.is_file() else ():
        values = parse_line(line)
        if values is not None:
            yield values


def _read(path: Path) -> tuple[dict[int, dict[str, Any]], dict[int, float]]:
    steps: dict[int, dict[str, Any]] = {}
    valid: dict[int, float] = {}
    for values in records(path):
        if "lm_loss" in values:
            steps[values["iteration"]] = values
        if "valid_loss" in values:
            valid[values["iteration"]] = float(values["valid_loss"])
    return steps, valid


def _of_pruning(run: StudyRun, plan: StudyPlan, ticket: int | None) -> Row:
    """Return the fields that only rows of a pruning study have."""
    row: Row = {} if run.optimizer == "adam" else {"optimizer": run.optimizer}
    if run.sparsity is not None:
        row |= {"sparsity": float(run.sparsity), "ticket": ticket}
    if run.entries(plan) != parameters(plan.sequence):
        row["stored"] = round(_stored(run, plan), 6)
    return row


def _stored(run: StudyRun, plan: StudyPlan) -> float:
    """Return the trained parameters over those of the shared model."""
    return run.entries(plan) / parameters(plan.sequence)


def _ticket(run: StudyRun, plan: StudyPlan, steps: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Return the step after which the run trains its final mask, or None.

    An early-bird run records a distance for each mask that it draws, and draws none after its
    ticket.
    """
    if run.ticket == "early-bird":
        drawn = [i for i, step in steps.items() if "mask_distance" in step]
        last = max(drawn, default=None)
        alike = last is not None and float(steps[last]["mask_distance"]) < EARLY_BIRD_DISTANCE
        return last if alike else None
    return 0 if run.start is None else plan.start_step(run.start) - 1


def _payload(
    record: Mapping[str, Any], run: StudyRun, plan: StudyPlan, *, ticket: int | None
) -> float:
    """Return the bytes of a step as a share of fp32 dense (an all-reduce by the ring model).

    A path reports which share of the stored entries it sent.
    """
    if run.ranks > 1:
        dense = 8 * (run.ranks - 1) / run.ranks * parameters(plan.sequence)
        return record["bytes_sent"] / dense
    pruned = ticket is not None and record["iteration"] > ticket
    return float(record["density"]) * (_stored(run, plan) if pruned else 1.0)


def _tail(losses: Mapping[int, float], steps: int) -> float | None:
    first = steps - steps // 20 + 1
    last = [losses[i] for i in range(first, steps + 1) if i in losses]
    return round(statistics.fmean(last), 5) if last else None
