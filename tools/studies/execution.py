"""Runs of a study on this machine or in an allocation, several at a time; each start can go on.

Every run is started by scripts/launch.sh. A finished run leaves a row in a file of its own under
WORK/rows. A later start skips runs that have a row and resumes those that were interrupted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from megatron.errors import ConfigError, NumericsError, SparsetronError
from megatron.metrics.log_line import duration
from megatron.status import read_status
from tools.studies.commands import Commands
from tools.studies.declaration import DeclaredRun, DeclaredStudy
from tools.studies.rows import StudyRow, read_rows, row_of, write_row

REPO = Path(__file__).resolve().parents[2]

Log = Callable[[str], None]


class Launcher:
    """Starts runs with scripts/launch.sh, `jobs` processes at a time, and can end all of them."""

    def __init__(self, study: DeclaredStudy, *, jobs: int) -> None:
        self._entry, self._jobs = study.entry, jobs
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.stopping = False

    def __call__(self, flags: Sequence[str], *, ranks: int, folder: Path, console: Path) -> int:
        """Start a run on `ranks` ranks, with its output in `console`; return the exit code."""
        wanted = {"ENTRY": self._entry, "RANKS_PER_NODE": str(ranks), "RUN_DIR": str(folder)}
        if "SLURM_JOB_ID" in os.environ and "LAUNCHER" not in os.environ:
            wanted["LAUNCHER"] = "srun"
        if "OMP_NUM_THREADS" not in os.environ:
            wanted["OMP_NUM_THREADS"] = str(
                max(1, len(os.sched_getaffinity(0)) // max(ranks, self._jobs))
            )
        environment = {k: v for k, v in os.environ.items() if k not in ("CONFIG", "GRAD_PATH")}
        with open(console, "ab") as stream:
            with self._lock:
                if self.stopping:
                    return 130
                process = subprocess.Popen(
                    [str(REPO / "scripts" / "launch.sh"), "--", *flags],
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env={**environment, **wanted},
                    start_new_session=True,  # Ctrl-C reaches runs once, through `stop`
                )
                self._running.add(process)
            code = process.wait()
        with self._lock:
            self._running.discard(process)
        return code

    def stop(self) -> None:
        """Ask every run to save and leave, and start no other."""
        with self._lock:
            self.stopping = True
            for process in self._running:
                process.send_signal(signal.SIGTERM)


class Execution:
    """The execution of a study in the folder `work`, with at most `jobs` processes at a time.

    A run of more ranks than `jobs` has the machine to itself. `data` is the folder of the data.
    """

    def __init__(
        self,
        study: DeclaredStudy,
        work: Path,
        *,
        data: Path,
        jobs: int,
        launcher: Launcher,
        log: Log,
    ) -> None:
        self._study, self._work, self._jobs = study, work, jobs
        self._launcher, self._log = launcher, log
        self._commands = Commands(study, work / "runs", data)
        self._base_locks = {run.base or run.name: threading.Lock() for run in study.runs}

    @property
    def done(self) -> dict[str, StudyRow]:
        """The rows of finished runs by name. Raises `ConfigError` for a row of other settings."""
        paths = sorted((self._work / "rows").glob("*.json"))
        return self.checked(row for path in paths for row in read_rows(path))

    def checked(self, rows: Iterable[StudyRow]) -> dict[str, StudyRow]:
        """Return the rows of runs that the study declares, by name, in the order of the study.

        Raises `ConfigError` for a row whose settings are not those that the study declares now.
        """
        found = {row.name: row for row in rows}
        for run in self._study.runs:
            if run.name in found and found[run.name].settings != self._commands.digest(run):
                raise ConfigError(
                    f"{self._study.path}: {run.name} has a row of other settings; rename the run, "
                    "or remove its row and its run folder"
                )
        return {run.name: found[run.name] for run in self._study.runs if run.name in found}

    def run_all(self, wanted: Sequence[DeclaredRun]) -> list[str]:
        """Run all of `wanted` that have no row; return the names of those that have none then."""
        done = self.done.keys()
        waiting = [run for run in wanted if run.name not in done]
        self._log(f"{len(wanted) - len(waiting)} of {len(wanted)} runs are done")
        failed: list[str] = []
        running: dict[Future[StudyRow], DeclaredRun] = {}
        progress = _Progress(self._commands, len(wanted), self._jobs)
        with ThreadPoolExecutor(self._jobs) as pool:
            while waiting or running:
                if self._launcher.stopping and waiting:
                    self._log(f"stopped: {len(waiting)} runs are left for another start")
                    failed += [run.name for run in waiting]
                    waiting = []
                    continue
                for run in self._ready(waiting, running.values()):
                    waiting.remove(run)
                    self._log(f"{run.name}: starts")
                    running[pool.submit(self.run_one, run)] = run
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run = running.pop(future)
                    try:
                        row = future.result()
                    except SparsetronError as error:
                        stopped = self._launcher.stopping
                        self._log(f"{run.name}: {'stopped' if stopped else error}")
                        failed.append(run.name)
                        continue
                    rest = progress.after(row, [*waiting, *running.values()])
                    self._log(f"{run.name}: {told(row)}; {rest}")
        return failed

    def _ready(
        self, waiting: Sequence[DeclaredRun], running: Iterable[DeclaredRun]
    ) -> list[DeclaredRun]:
        """Return the next runs to start, in order, as far as there is room for their ranks."""
        busy = {run.name: min(run.ranks, self._jobs) for run in running}
        found: list[DeclaredRun] = []
        for run in waiting:
            busy[run.name] = min(run.ranks, self._jobs)
            if sum(busy.values()) > self._jobs:
                break
            found.append(run)
        return found

    def run_one(self, run: DeclaredRun) -> StudyRow:
        """Make a run, unless its folder holds it already, and write its row.

        Raises `ConfigError` with the exit code and the file of its output if a start failed.
        """
        # Forks of one base would otherwise make its checkpoints at the same time.
        with self._base_locks[run.base or run.name]:
            code = self._start_all(run, bases=True)
        if not code:
            code = self._start_all(run, bases=False)
        if code not in (0, NumericsError.exit_code):
            raise ConfigError(f"exit code {code}; see {self._console(run)}")
        return self._row(run, code)

    def _start_all(self, run: DeclaredRun, *, bases: bool) -> int:
        """Make the starts of the base that are missing, or those of the run itself."""
        for started, flags in self._commands.starts(run):
            is_own = started.name == run.name and "--exit-interval" not in flags
            if is_own == bases or (is_own and self._is_finished(run)):
                continue
            folder = self._commands.folder(started.name)
            console = self._console(run)
            console.parent.mkdir(parents=True, exist_ok=True)
            code = self._launcher(flags, ranks=started.ranks, folder=folder, console=console)
            if code:
                return code
        return 0

    def _is_finished(self, run: DeclaredRun) -> bool:
        status = read_status(self._commands.folder(run.name))
        steps = self._commands.steps(run)
        return status is not None and status.state == "done" and status.iteration == steps

    def _row(self, run: DeclaredRun, code: int) -> StudyRow:
        row = row_of(
            self._commands.folder(run.name),
            name=run.name,
            group=run.group,
            seed=run.seed,
            ranks=run.ranks,
            settings=self._commands.digest(run),
            exit_code=code,
            first_step=1 if run.fork is None else run.fork.step + 1,
            clip=self._commands.config(run).optimizer.clip_grad,
        )
        write_row(self._work / "rows" / f"{run.name}.json", row)
        return row

    def _console(self, run: DeclaredRun) -> Path:
        return self._work / "console" / f"{run.name}.txt"


class _Progress:
    """Counts finished runs and estimates the time of the rest."""

    def __init__(self, commands: Commands, total: int, jobs: int) -> None:
        self._commands, self._total, self._jobs = commands, total, jobs
        self._began = time.monotonic()
        self._work = 0.0

    def after(self, row: StudyRow, rest: Sequence[DeclaredRun]) -> str:
        """Return progress after a run: how many are done, and how long the rest may take.

        The time goes by the steps that were made since the start, each rank's for itself.
        """
        self._work += row.steps * row.ranks
        ahead = sum(self._commands.steps(run) * run.ranks for run in rest)
        seconds = (time.monotonic() - self._began) * ahead / max(1.0, self._work)
        done = self._total - len(rest)
        left = f", about {duration(seconds)} left" if rest else ""
        return f"{done} of {self._total}{left}"


def told(row: StudyRow) -> str:
    """Return the result of a run in words."""
    if row.valid_loss is None:
        return f"ended at step {row.steps} with exit code {row.exit_code}"
    return f"validation loss {row.valid_loss:.4f}, {row.seconds:.0f} s"
