"""The run folder around a run: opened, announced, closed, and what it says of a failure."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config import Config, to_yaml
from megatron.errors import ConfigError, SparsetronError
from megatron.runtime import Launch, Runtime, job_environment
from megatron.status import Status, write_status

if TYPE_CHECKING:
    from megatron.metrics import Metrics
    from megatron.parallel.groups import ProcessGroups
    from megatron.training import Outcome, Progress

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
SECONDS_TO_SPEAK = 2.0
_PACKAGES = ("sparsetron", "torch", "numpy", "safetensors", "pyyaml", "apex", "mpi4py")


def name_run_dir(config: Config) -> Path:
    """The run folder: `--run-dir`, by default `runs/<name of the configuration file>`."""
    return Path(config.run.run_dir) if config.run.run_dir else Path("runs") / config.name


def prepare_run_dir(run_dir: Path) -> None:
    """Make the folder and write into it that a run has begun.

    Raises `ConfigError` where it cannot be written: at once, not after the first interval.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        write_status(run_dir, _signed(Status(state="running")))
    except OSError as error:
        raise ConfigError(
            f"run_dir: {run_dir.resolve()}: {error.strerror}; choose a folder that can be written"
        ) from None


def keep_config(config: Config, run_dir: Path) -> None:
    """Write the resolved configuration and the versions, once it is sure that they are the run's:
    a refused start, or one that only evaluates, leaves those of the run that trained."""
    if config.training.skip_train and (run_dir / CONFIG).exists():
        return
    (run_dir / CONFIG).write_text(to_yaml(config), encoding="utf-8")
    text = json.dumps(environment(), indent=1) + "\n"
    (run_dir / ENVIRONMENT).write_text(text, encoding="utf-8")


def environment() -> dict[str, object]:
    """Versions, commit and job this run can be traced to. No variable outside an allow-list."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "machine": platform.machine(),
        "job": job_environment(),
    }


def compare_configs(config: Config, groups: ProcessGroups) -> None:
    """Refuse ranks that were started differently. Collective over the world."""
    mine = hashlib.sha256(to_yaml(config).encode()).hexdigest()
    seen = groups.world.gather_text(mine)
    odd = [rank for rank, text in enumerate(seen) if text != seen[0]]
    if odd:
        raise ConfigError(
            f"rank {odd[0]} was started with another configuration than rank 0; give every rank "
            "the same file and flags"
        )


def announce(metrics: Metrics, config: Config, runtime: Runtime, groups: ProcessGroups) -> None:
    """Say what is about to run: configuration, grid, device, and what was ignored or changed."""
    launch = runtime.launch
    metrics.say(f"configuration:\n{to_yaml(config).rstrip()}")
    metrics.say(f"grid: {groups.dims}, started by {launch.launcher}")
    metrics.say(f"device: {runtime.device.type}, backend {runtime.backend}")
    for notice in config.notices:
        metrics.say(f"note: {notice}")


def write_pictures(run_dir: Path, metrics: Metrics) -> None:
    """The report and the loss curve; a run that trained does not fail for want of a picture."""
    from megatron.report import write_report

    try:
        metrics.say(f"report: {write_report(run_dir, say=metrics.say)}")
    except (OSError, SparsetronError) as error:
        metrics.say(f"no report: {error}")


def finish(outcome: Outcome, progress: Progress, run_dir: Path) -> None:
    """Write how the run ended."""
    status = Status(
        state="left" if outcome.left else "done",
        left=outcome.left or "",
        exit_code=outcome.exit_code,
        iteration=progress.iteration,
    )
    write_status(run_dir, _signed(status))


def report_failure(
    error: SparsetronError, launch: Launch | None, run_dir: Path | None, argv: Sequence[str]
) -> int:
    """One line on stderr, the same in status.json, and the exit code.

    What every rank knows alike (a wrong flag, or what they agreed on) is told by rank 0 alone.
    """
    rank = launch.rank if launch is not None else 0
    if "--debug" in argv:
        traceback.print_exception(error, file=sys.stderr)
    if rank and (error.shared or run_dir is None):
        if not error.shared:
            # torchrun ends everybody with the first rank that leaves: let rank 0 speak before.
            time.sleep(SECONDS_TO_SPEAK)
        return error.exit_code
    where = f"rank {rank}: " if launch is not None and launch.world_size > 1 else ""
    print(f"{where}{error}", file=sys.stderr, flush=True)
    folder = run_dir or _run_dir_in(argv)
    if folder is not None and folder.is_dir():
        status = Status(state="failed", exit_code=error.exit_code, reason=str(error), rank=rank)
        with suppress(OSError):
            write_status(folder, _signed(status))
    return error.exit_code


def _signed(status: Status) -> Status:
    """The status with the job and the version it comes from."""
    job = job_environment().get("SLURM_JOB_ID", "")
    return dataclasses.replace(status, job_id=job, version=_version("sparsetron"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _run_dir_in(argv: Sequence[str]) -> Path | None:
    """The run folder of a command line that could not be parsed as a whole."""
    for flag, value in zip(argv, [*argv[1:], ""], strict=True):
        if flag == "--run-dir":
            return Path(value)
        if flag.startswith("--run-dir="):
            return Path(flag.removeprefix("--run-dir="))
    return None


def _commit() -> str | None:
    """Commit of the code that runs, `-dirty` where it was changed since; None outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
