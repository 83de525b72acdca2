"""The run folder during a run: locking, configuration, announcement, final status."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.find import (
    CHECKPOINTS,
    ENVIRONMENT,
    SAVE,
    loads_elsewhere,
    save_directory,
)
from megatron.checkpoint.verify import open_to_all
from megatron.config import Config, brief_settings, to_yaml
from megatron.config.compilation import choose_compilation
from megatron.errors import ConfigError
from megatron.fault_tolerance.flight_recorder import clear_dumps
from megatron.fault_tolerance.run_lock import RunLock
from megatron.launch import (
    Runtime,
    check_cuda_variables,
    cuda_variables,
    job_environment,
    unused_gpus,
)
from megatron.processor import (
    describe_processor,
    multiplies_natively,
    processor_model,
    vector_instructions,
)
from megatron.status import NO_SPACE, Status, read_status, replace_text, write_status

if TYPE_CHECKING:
    from megatron.metrics import Metrics, Throughput
    from megatron.parallel.groups import ProcessGroups
    from megatron.training import TrainOutcome, TrainState

CONFIG = "config.yaml"
PROGRAMS = ("*.py", "*.c", "*.sh")
"""Files of the repository that decide what a run does beside its settings."""
_PACKAGES = ("sparsetron", "torch", "numpy", "safetensors", "pyyaml", "apex", "mpi4py")


def name_run_dir(config: Config) -> Path:
    """Return the run folder: `--run-dir`, by default `runs/` and the name of the configuration."""
    return Path(config.run.run_dir) if config.run.run_dir else Path("runs") / config.name


def lock_run_dir(
    run_dir: Path, *, log: Callable[[str], None], name: str = "run_dir"
) -> Callable[[], None]:
    """Create the run folder and lock it against other runs; return a function that unlocks it.

    `name` is that of the setting which names the folder. Raises `ConfigError` if the folder cannot
    be made or is in use, before any of its files changes.
    """
    with writing_to(run_dir, name):
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        if danger := open_to_all(run_dir):
            raise ConfigError(f"{name}: {run_dir.resolve()}: {danger}")
        lock = RunLock.take(run_dir, job=job_environment(), log=log)
    return lock.release if lock is not None else lambda: None


def lock_folders(
    config: Config, run_dir: Path, held: ExitStack, *, log: Callable[[str], None]
) -> None:
    """Lock the run folder and, if it is another one, that of `--save`, until `held` closes.

    Two runs with one `--save` would delete each other's checkpoints. Raises as `lock_run_dir`.
    """
    held.callback(lock_run_dir(run_dir, log=log))
    save = config.checkpoint.save
    if save is None or config.training.skip_train:
        return
    if os.path.realpath(save) != os.path.realpath(run_dir):
        held.callback(lock_run_dir(Path(save), log=log, name="save"))


def keeps_status(config: Config, run_dir: Path, *, attempt: str) -> bool:
    """Return whether this start only evaluates, and status.json is that of another start.

    The status then stays: an evaluation neither ends an unfinished run nor resumes it.
    """
    status = read_status(run_dir) if config.training.skip_train else None
    return status is not None and status.attempt != attempt


def prepare_run_dir(
    run_dir: Path, *, attempt: str = "", nccl: bool = False, keep_status: bool = False
) -> str:
    """Write the status "running" to the run folder, and make room for dumps of collectives.

    With `keep_status`, status.json stays as it is. Returns one line on the dumps of collectives
    that an earlier start left, empty without any. Raises `ConfigError` if the folder cannot be
    written: at once, instead of at the first save.
    """
    with writing_to(run_dir):
        if not keep_status:
            write_status(run_dir, signed(Status(state="running", attempt=attempt)))
        return clear_dumps(run_dir, nccl=nccl)


@contextmanager
def writing_to(run_dir: Path, name: str = "run_dir") -> Iterator[None]:
    """Raise `ConfigError` for an `OSError` of the body, which writes to the run folder."""
    try:
        yield
    except OSError as error:
        full = error.errno in NO_SPACE
        way_out = "free some space or " if full else ""
        # Not `resolve`, which fails for a loop of links.
        raise ConfigError(
            f"{name}: {os.path.abspath(run_dir)}: {error.strerror}; "
            f"{way_out}choose a folder that can be written"
        ) from None


def keep_config(config: Config, run_dir: Path, runs_on: Mapping[str, object]) -> None:
    """Write the resolved configuration and the versions, once the run is sure to train with them.

    The folder of `--save`, which the configuration file leaves out, is recorded with the versions,
    and so is what the ranks run on (`Runtime.facts`).
    A `--ckpt-step` of the run's own checkpoints is left out, since later starts have newer ones.
    A start that was refused or that only evaluates leaves the files of the run that trained. Raises
    `ConfigError` if the files cannot be written, and then leaves no partial file.
    """
    if config.training.skip_train and (run_dir / CONFIG).exists():
        return
    save = os.path.abspath(save_directory(config, run_dir))
    facts = {**runs_on, **environment()}
    if os.path.realpath(save) != os.path.realpath(run_dir / CHECKPOINTS):
        facts[SAVE] = save
    if not loads_elsewhere(config, run_dir):
        checkpoint = dataclasses.replace(config.checkpoint, ckpt_step=None)
        config = dataclasses.replace(config, checkpoint=checkpoint)
    with writing_to(run_dir):
        replace_text(run_dir / CONFIG, to_yaml(config))
        replace_text(run_dir / ENVIRONMENT, json.dumps(facts, indent=1) + "\n")


def environment() -> dict[str, object]:
    """Return commit, versions, processor and job of this run; variables from an allow-list only."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "machine": platform.machine(),
        "processor": describe_processor(),
        "job": job_environment(),
    }


def announce(metrics: Metrics, config: Config, runtime: Runtime, groups: ProcessGroups) -> None:
    """Log the configuration, the grid, the device and notices, before the run begins."""
    launch = runtime.launch
    metrics.log(
        f"configuration:\n{to_yaml(config).rstrip()}",
        brief=f"settings that are not defaults (log.txt has all):\n{brief_settings(config)}",
    )
    metrics.log(f"grid: {groups.dims}, started by {launch.launcher}")
    for line in config.descriptions():
        metrics.log(line)
    metrics.log(f"device: {runtime.device.type}, backend {runtime.backend}")
    if runtime.device.type == "cpu":
        unused = unused_gpus() if config.run.device != "cpu" else None
        if unused:
            metrics.log(f"warning: {unused}")
        metrics.log(_processor(config))
    else:
        variables = [f"{name}={value}" for name, value in cuda_variables().items()]
        metrics.log(f"environment: {', '.join(variables) or 'no variable of CUDA or NCCL is set'}")
        for warning in (check_cuda_variables(config), *config.cuda_notices()):
            if warning:
                metrics.log(f"note: {warning}")
    if config.compiles:
        metrics.log(f"compile: {choose_compilation(config, runtime.device.type)}")
    for notice in config.notices:
        metrics.log(f"note: {notice}")


def _processor(config: Config) -> str:
    """Return the log line on the CPU: model, instruction set, and whether products are widened."""
    import torch

    line = f"processor: {processor_model()}, {vector_instructions()} instructions"
    precision = config.precision
    dtype = torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32
    if multiplies_natively(dtype):
        return line
    name = "bf16" if precision.bf16 else "fp16"
    return f"{line}; {name} products run in fp32, since this CPU multiplies no {name}"


def write_pictures(run_dir: Path, metrics: Metrics) -> None:
    """Write the report with its charts; a failure is only logged."""
    from megatron.report import write_report

    try:
        with metrics.busy("drawing of the report"):
            report = write_report(run_dir, log=metrics.log)
        metrics.log(f"report: {report}")
    except Exception as error:  # the run has ended, whatever becomes of its charts
        metrics.log(f"no report: {type(error).__name__}: {error}")


def finish(
    outcome: TrainOutcome,
    progress: TrainState,
    run_dir: Path,
    throughput: Throughput | None = None,
    *,
    attempt: str = "",
) -> None:
    """Write the final status, "done" or "left", with the means over this start's steps."""
    status = Status(
        state="left" if outcome.left else "done",
        left=outcome.left or "",
        exit_code=outcome.exit_code,
        iteration=progress.iteration,
        throughput=dataclasses.asdict(throughput) if throughput is not None else {},
        attempt=attempt,
    )
    write_status(run_dir, signed(status))


def signed(status: Status) -> Status:
    """Return the status with the job and the program's version filled in."""
    job = job_environment().get("SLURM_JOB_ID", "")
    return dataclasses.replace(status, job_id=job, version=_version("sparsetron"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str | None:
    """Return the commit of the running code, with `-dirty` if it differs; None if git fails.

    A program that the commit lacks differs from it. Rows and pages do not count: a study adds rows
    to a file of the repository between its runs.
    """
    commit = _git("describe", "--always")
    changed = _git("status", "--porcelain", "--", *PROGRAMS)
    if commit is None or changed is None:
        return None
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str | None:
    """Return the output of git on the repository of this package; None if git fails."""
    command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
