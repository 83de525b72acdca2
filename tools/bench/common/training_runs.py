"""Run folders that already hold a run of `pretrain_gpt.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.config import Config, parse, resolve
from megatron.errors import ConfigError
from megatron.run_dir import CONFIG
from megatron.status import read_status
from pretrain_gpt import GRADIENT_PATHS

REPO = Path(__file__).resolve().parents[3]
ELSEWHERE = ("data", "checkpoint", "parallel", "logging", "run", "recompute")
"""Sections that may differ: folders, and settings that change no loss."""


def is_finished(folder: Path, flags: Sequence[str], ranks: int) -> bool:
    """Return whether the folder holds all steps of the run with these flags.

    Args:
        folder: The run folder.
        flags: Flags of `pretrain_gpt.py`.
        ranks: Ranks of the run.

    Raises `ConfigError` if it holds another run, whose steps could be taken for this one's.
    """
    status = read_status(folder)
    if status is None or status.state != "done" or not (folder / CONFIG).is_file():
        return False
    asked = resolve(parse(flags, paths=GRADIENT_PATHS), ranks)
    known = ["--config", str(folder / CONFIG)]
    found = resolve(parse(known, paths=GRADIENT_PATHS), ranks)
    if differing := _differences(asked, found):
        raise ConfigError(
            f"--work: {folder} holds a run with other settings: {', '.join(differing)}; remove it, "
            "or give another --work"
        )
    return status.iteration == asked.total_iterations()


def _differences(asked: Config, found: Config) -> list[str]:
    theirs = found.sections
    return [
        name
        for name, section in asked.sections.items()
        if name not in ELSEWHERE and section != theirs.get(name)
    ]
