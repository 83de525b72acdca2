"""What every entry of a tier has in common with its baseline, and facts of an entry's path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megatron.config import Config
from megatron.errors import ConfigError
from tools.studies.commands import Commands
from tools.studies.declaration import DeclaredRun, DeclaredStudy

INTERVALS = ("_interval", "local_steps")
"""Ends of the settings of paths whose steps differ in cost, and repeat after so many."""
UNUSED = {"samo_early_bird_interval"}
"""Settings with such an end that nothing reads in an entry; see `check_entries`."""
START = "_start_iter"
"""End of the settings that delay a path."""


def check_entries(study: DeclaredStudy, commands: Commands) -> None:
    """Raise `ConfigError`, naming the entry, for one that changes what the tier fixes."""
    baseline = next(run for run in study.runs if run.group == study.baseline)
    fixed = dict(_fixed(baseline, commands))
    for group in study.groups:
        runs = [run for run in study.runs if run.group == group]
        where = f"{study.path}: runs.{group}"
        for name, value in _fixed(runs[0], commands):
            if value != fixed[name]:
                raise ConfigError(f"{where}: {name} is not that of {study.baseline}")
        if [run.seed for run in runs] != list(range(1, len(runs) + 1)):
            raise ConfigError(f"{where}.seeds: must be 1, 2 and so on, without a gap")
        settings = path_settings(commands.config(runs[0]))
        if None in (value for name, value in settings.items() if name.endswith(START)):
            raise ConfigError(
                f"{where}.flags: give the step with which the path begins, *-start-iter"
            )
        if settings.get("samo_pruning") == "early-bird":
            raise ConfigError(
                f"{where}.flags: samo-pruning early-bird prunes after a step that is not known "
                "beforehand, so that the time of a run cannot be told; give a mask file"
            )


def _fixed(run: DeclaredRun, commands: Commands) -> Iterator[tuple[str, object]]:
    config = commands.config(run)
    yield "model", config.model
    yield "data", config.data
    yield "precision", (config.precision.fp16, config.precision.bf16)
    yield "global-batch-size", config.training.global_batch_size
    yield "rampup-batch-size", config.training.rampup_batch_size
    yield "number of steps", commands.steps(run)
    yield "evaluation", config.evaluation
    # A row has the bytes between data-parallel ranks alone, not those between ranks of one copy.
    yield "number of ranks", run.ranks
    yield "number of data-parallel ranks", commands.data_parallel(run)
    # Both would have the steps of another run.
    yield "fork", run.fork
    yield "load", config.checkpoint.load


def path_settings(config: Config) -> dict[str, Any]:
    """Return the settings of the gradient path of a run, by field."""
    found: dict[str, Any] = {}
    for section in config.extensions.values():
        found |= asdict(section)  # type: ignore[call-overload]  # sections are dataclasses
    return found


def start_of(config: Config) -> int:
    """Return the steps before the path begins, which are dense."""
    settings = path_settings(config)
    return max((value or 0 for name, value in settings.items() if name.endswith(START)), default=0)


def cycle_of(config: Config) -> int:
    """Return the steps after which the costs of a path's steps repeat."""
    settings = path_settings(config)
    repeats = (name for name in settings if name.endswith(INTERVALS) and name not in UNUSED)
    return max((settings[name] or 1 for name in repeats), default=1)


def wire_of(config: Config) -> str:
    """Return how values travel in the steps before the path begins."""
    return config.gradient.grad_wire or "fp32"
