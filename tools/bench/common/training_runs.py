"""Runs of an entry script that a benchmark starts, and run folders that already hold one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.config import Config, GPTConfig, parse, resolve
from megatron.errors import ConfigError
from megatron.run_dir import CONFIG
from megatron.status import read_status
from pretrain_gpt import GRADIENT_PATHS
from tools.studies.processes import Processes

REPO = Path(__file__).resolve().parents[3]
ELSEWHERE = ("data", "checkpoint", "parallel", "logging", "run", "recompute")
"""Sections that may differ: folders, and settings that change no loss."""

Runner = Callable[[Sequence[str], Path], int]
"""Runs an entry script in one process, with output to a file; returns the exit code."""


class ScriptProcesses(Processes):
    """A `Runner` that starts an entry script, with `threads` threads in each process."""

    def __init__(self, *, threads: int, script: str) -> None:
        super().__init__()
        self._threads, self._script = threads, script

    def __call__(self, flags: Sequence[str], console: Path) -> int:
        command = ["env", f"OMP_NUM_THREADS={self._threads}", sys.executable]
        command += [str(REPO / self._script), *flags]
        with open(console, "ab") as stream:
            return self.wait_for(command, stdout=stream, stderr=subprocess.STDOUT)


def is_finished(
    folder: Path, flags: Sequence[str], ranks: int, task: type[Config] = GPTConfig
) -> bool:
    """Return whether the folder holds all steps of the run with these flags.

    Args:
        folder: The run folder.
        flags: Flags of the entry script of `task`.
        ranks: Ranks of the run.
        task: The configuration that the flags describe.

    Raises `ConfigError` if it holds another run, whose steps could be taken for this one's.
    """
    status = read_status(folder)
    if status is None or status.state != "done" or not (folder / CONFIG).is_file():
        return False
    asked = resolve(parse(flags, paths=GRADIENT_PATHS, task=task), ranks)
    known = ["--config", str(folder / CONFIG)]
    found = resolve(parse(known, paths=GRADIENT_PATHS, task=task), ranks)
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
