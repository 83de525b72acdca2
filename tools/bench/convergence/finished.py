"""Detection of run folders that already hold a run as it is asked for, from any study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.config import GPTConfig, parse, resolve
from megatron.errors import ConfigError
from megatron.run_dir import CONFIG
from megatron.status import read_status
from pretrain_gpt import GRADIENT_PATHS

ELSEWHERE = ("data", "checkpoint", "parallel", "logging", "run", "recompute")
"""Sections that may differ: where things are, and what changes no loss."""


def is_finished(folder: Path, flags: Sequence[str], ranks: int) -> bool:
    """Whether the folder holds all steps of the run that these flags of `pretrain_gpt.py` ask for.

    Raises `ConfigError` where it holds another run, whose steps would be taken for this one's.
    """
    status = read_status(folder)
    if status is None or status.state != "done" or not (folder / CONFIG).is_file():
        return False
    asked = resolve(parse(flags, paths=GRADIENT_PATHS), ranks)
    found = resolve(parse(["--config", str(folder / CONFIG)], paths=GRADIENT_PATHS), ranks)
    if differing := _differences(asked, found):
        raise ConfigError(
            f"--work: {folder} holds a run with other settings: {', '.join(differing)}; remove it, "
            "or give another --work"
        )
    return status.iteration == asked.total_iterations()


def _differences(asked: GPTConfig, found: GPTConfig) -> list[str]:
    theirs = found.sections
    return [
        name
        for name, section in asked.sections.items()
        if name not in ELSEWHERE and section != theirs.get(name)
    ]
