"""A tolerant reader of run folders: after a crash any file may be torn or missing."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.checkpoint.find import recorded_directory
from megatron.errors import ConfigError
from megatron.metrics.logger import (
    COUNTED,
    JSONL,
    LOG,
    LOSS,
    PHASE,
    columns_of,
    lines_of,
    loss_key,
    parse_line,
)
from megatron.metrics.record import EVALUATION_KINDS
from megatron.regular_file import open_regular, read_regular
from megatron.status import Status, read_status

ENVIRONMENT = "environment.json"
LEDGER = "ledger.json"
SAMPLE = "sample.txt"
MAX_TEXT = 200_000

_Lines = dict[int, dict[str, Any]]
"""Lines of metrics.jsonl by iteration."""
_LOADED = re.compile(rb"loaded checkpoint .* of step (\d+)\s*$")
_CHECKPOINT = re.compile(r"step_\d+(\.damaged-\d+)?")


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run, as read from its folder.

    `steps` maps each of the `COLUMNS` to one float for each recorded step, NaN where there is no
    number; all lists have the length of `iterations`, which rise. `counted` and `per_second` are of
    `unit`. `evaluations` maps valid and test to (iteration, loss) pairs. Of a repeated step or
    evaluation the last line counts.
    """

    folder: Path
    iterations: list[int]
    steps: dict[str, list[float]]
    evaluations: dict[str, list[tuple[int, float]]]
    unreadable_lines: int
    restarts: int
    config_text: str
    config: Mapping[str, Any]
    environment: Mapping[str, str]
    status: Status | None
    unit: str = "tokens"
    means: Mapping[str, dict[str, list[tuple[int, float]]]] = field(
        default_factory=dict[str, dict[str, list[tuple[int, float]]]]
    )
    """Means of the task beside the loss, such as the accuracy: for each name (iteration, value)
    pairs by set: train, valid, test."""
    path: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Numbers of the gradient path's own, by name: the steps that have one, and the values."""
    phases: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Seconds per step of each timer, where they were read."""
    loaded: list[int] = field(default_factory=list)
    """Steps of the checkpoints from which the run resumed, in order."""
    starts: list[tuple[int, int]] = field(default_factory=list)
    """The step after which each start went on, and its ranks, where metrics.jsonl says so."""
    checkpoints: list[str] = field(default_factory=list)
    sample: str = ""
    ledger: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The profile of a step's memory that tools/profile_memory.py wrote into the folder."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    def finite(self, key: str) -> list[float]:
        """Return the finite values of a column."""
        return [value for value in self.steps[key] if math.isfinite(value)]


def read_run(run_dir: str | Path) -> RunData:
    """Read a run folder; `ConfigError` if it has no metrics.jsonl."""
    folder = Path(run_dir)
    if not (folder / JSONL).is_file():
        raise ConfigError(f"{folder}: holds no {JSONL}; give the folder of a run (--run-dir)")
    steps, evaluations, starts, unreadable = _read_metrics(folder / JSONL)
    iterations = sorted(steps)
    columns = columns_of({key: None for step in steps.values() for key in step})
    means = _other_means(steps, evaluations)
    own = {*columns.values(), *means}
    others = {
        key: [(i, _number(steps[i][key])) for i in iterations if key in steps[i]]
        for key in sorted({key for step in steps.values() for key in step} - own)
    }
    config_text = _text(folder / "config.yaml")
    return RunData(
        folder=folder,
        iterations=iterations,
        steps={
            name: [_number(steps[i].get(key)) for i in iterations] for name, key in columns.items()
        },
        evaluations={
            kind: [(i, _number(found[i][f"{kind}_loss"])) for i in sorted(found)]
            for kind, found in evaluations.items()
        },
        unit=columns[COUNTED],
        means=means,
        path={key: points for key, points in others.items() if not key.startswith(PHASE)},
        phases={
            key.removeprefix(PHASE): points
            for key, points in others.items()
            if key.startswith(PHASE)
        },
        loaded=_loaded(folder / LOG),
        starts=sorted(starts.items()),
        unreadable_lines=unreadable,
        restarts=len(list(folder.glob(f"{JSONL}.cut-*"))),
        config_text=config_text,
        config=_flat_config(config_text),
        environment=_environment(folder / ENVIRONMENT),
        status=read_status(folder),
        checkpoints=_checkpoints(recorded_directory(folder)),
        sample=_text(folder / SAMPLE),
        ledger=_json(folder / LEDGER),
    )


def _read_metrics(
    path: Path,
) -> tuple[_Lines, dict[str, _Lines], dict[int, int], int]:
    """Return the lines of steps, and those of evaluations by set.

    Then follow the ranks of each start, by the step after which it went on, and the number of
    unreadable lines.
    """
    steps: _Lines = {}
    starts: dict[int, int] = {}
    evaluations: dict[str, _Lines] = {kind: {} for kind in EVALUATION_KINDS}
    unreadable = 0
    for line in lines_of(path):
        values = parse_line(line)
        if values is None:
            unreadable += 1
            continue
        iteration = int(values["iteration"] or 0)
        if loss_key(values) is not None:
            steps[iteration] = values
        for kind, found in evaluations.items():
            if f"{kind}_loss" in values:
                found[iteration] = values
        if type(ranks := values.get("ranks")) is int:
            starts[iteration] = ranks
    return steps, evaluations, starts, unreadable


def _other_means(
    steps: _Lines, evaluations: Mapping[str, _Lines]
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the means that evaluations have beside the loss, of steps and of evaluations."""
    names = {
        key.removeprefix(f"{kind}_")
        for kind, found in evaluations.items()
        for line in found.values()
        for key in line
        if key.startswith(f"{kind}_")
    } - {LOSS}
    return {
        name: {
            "train": [(i, _number(steps[i][name])) for i in sorted(steps) if name in steps[i]],
            **{
                kind: [(i, _number(found[i].get(f"{kind}_{name}"))) for i in sorted(found)]
                for kind, found in evaluations.items()
            },
        }
        for name in sorted(names)
    }


def _loaded(log: Path) -> list[int]:
    try:
        found = (_LOADED.search(line) for line in lines_of(log))
        return [int(match[1]) for match in found if match]
    except OSError:
        return []


def _number(value: object) -> float:
    if not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _text(path: Path) -> str:
    try:
        descriptor = open_regular(path, os.O_RDONLY)
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_TEXT)
    except OSError:
        return ""


def _flat_config(text: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return dict(_leaves(loaded)) if isinstance(loaded, dict) else {}


def _leaves(mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield str(key), value


def _environment(path: Path) -> dict[str, str]:
    return {key.replace("_", " "): _inline(value) for key, value in _json(path).items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(read_regular(path).decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_inline(inner)}" for key, inner in value.items())
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(_inline, value))
    return str(value)


def _checkpoints(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name))
