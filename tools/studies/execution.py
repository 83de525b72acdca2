"""Runs of a study on this machine or in an allocation, several at a time; each start can go on.

Every run is started by scripts/launch.sh. A finished run leaves a row in a file of its own under
WORK/rows. A later start skips runs that have a row and resumes those that were interrupted. A lock
for each run lets several processes, such as the tasks of a Slurm array, share one WORK.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from megatron.errors import ConfigError, NumericsError, SparsetronError
from megatron.metrics.log_line import duration
from megatron.status import read_status, replace_text
from tools.studies.commands import Commands
from tools.studies.declaration import DeclaredRun, DeclaredStudy, Score
from tools.studies.processes import Processes
from tools.studies.rows import StudyRow, read_rows, row_of, write_row

REPO = Path(__file__).resolve().parents[2]
LAUNCH = REPO / "scripts" / "launch.sh"
EVALUATE = REPO / "tools" / "evaluate.py"
NOT_HANDED_ON = ("CONFIG", "GRAD_PATH", "NODES", "PROGRAM", "TIME")
"""Variables of launch.sh that would change what a study declares."""
POLL_SECONDS = 0.5

Log = Callable[[str], None]


def is_array_task() -> bool:
    """Return whether this process is a task of a Slurm array."""
    return "SLURM_ARRAY_TASK_ID" in os.environ


class Launcher(Processes):
    """Starts runs with scripts/launch.sh, `jobs` processes at a time, and can end all of them."""

    def __init__(self, study: DeclaredStudy, *, jobs: int) -> None:
        super().__init__()
        self._entry, self._jobs = study.entry, jobs

    def __call__(
        self, flags: Sequence[str], *, ranks: int, folder: Path, console: Path, lock: int
    ) -> int:
        """Start a run on `ranks` ranks, with its output in `console`; return the exit code.

        The run holds the file descriptor `lock`, so that one that outlives a killed study keeps
        others away from its folder.
        """
        with open(console, "ab") as stream:
            return self.wait_for(
                [str(LAUNCH), "--", *flags],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._environment(ranks, folder),
                pass_fds=(lock,),
            )

    def evaluate(
        self, score: Score, file: str, folder: Path, *, step: int, console: Path, lock: int
    ) -> float:
        """Return a score of the model of a run after `step`, which is computed on `file`.

        Raises `ConfigError` if the tool fails, or its output has no such figure.
        """
        console.parent.mkdir(parents=True, exist_ok=True)
        out = console.with_suffix(f".{score.name}.json")
        command = [sys.executable, str(EVALUATE), str(folder), file, "--task", score.task, "--json"]
        command += ["--checkpoint-step", str(step)]  # never an older one if the last is damaged
        with open(console, "ab") as stream, open(out, "wb") as output:
            code = self.wait_for(command, stdout=output, stderr=stream, pass_fds=(lock,))
        if code:
            raise ConfigError(f"scores.{score.name}: exit code {code}; see {console}")
        found = json.loads(out.read_text(encoding="utf-8"))
        value = found.get(score.figure)
        if not isinstance(value, int | float):
            known = ", ".join(name for name in found if isinstance(found[name], int | float))
            raise ConfigError(f"scores.{score.name}.figure: {score.figure}; must be one of {known}")
        return value

    def _environment(self, ranks: int, folder: Path) -> dict[str, str]:
        """Return the variables of launch.sh for a run here, or in this job's allocation."""
        found = {k: v for k, v in os.environ.items() if k not in NOT_HANDED_ON}
        if found.get("LAUNCHER") in (None, "sbatch"):  # sbatch may also come from the site's file
            here = "torchrun" if ranks > 1 else "local"
            found["LAUNCHER"] = "srun" if "SLURM_JOB_ID" in found else here
        cores = len(os.sched_getaffinity(0)) // max(ranks, self._jobs)
        found.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
        return {
            **found,
            "ENTRY": self._entry,
            "RANKS_PER_NODE": str(ranks),
            "RUN_DIR": str(folder),
        }


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
        self._commands.check_losses()

    @property
    def done(self) -> dict[str, StudyRow]:
        """The rows of finished runs in `work` by name.

        Raises `ConfigError` for a row of other settings.
        """
        paths = sorted((self._work / "rows").glob("*.json"))
        return self.checked(self._own_row(path) for path in paths)

    def checked(self, rows: Iterable[StudyRow]) -> dict[str, StudyRow]:
        """Return the rows of runs that the study declares, by name, in the order of the study.

        Raises `ConfigError` for a row whose settings are not those that the study declares now.
        """
        found = {row.name: row for row in rows}
        for run in self._study.runs:
            if run.name in found and found[run.name].settings != self._commands.digest(run):
                raise ConfigError(
                    f"{self._study.path}: {run.name} has a row of other settings; rename the run, "
                    f"or remove the row from the file of results and {self._row_file(run)}"
                )
        return {run.name: found[run.name] for run in self._study.runs if run.name in found}

    def run_all(self, wanted: Sequence[DeclaredRun], done: Collection[str]) -> list[str]:
        """Run all of `wanted` that are not `done`; return the names of those that failed."""
        self._commands.check_files()
        waiting = [run for run in wanted if run.name not in done]
        self._log(f"{len(wanted) - len(waiting)} of {len(wanted)} runs are done")
        failed: list[str] = []
        running: dict[Future[StudyRow], DeclaredRun] = {}
        progress = _Progress(
            self._commands, jobs=self._jobs, done=len(wanted) - len(waiting), total=len(wanted)
        )
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
                    progress.began(run)
                    running[pool.submit(self.run_one, run)] = run
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run = running.pop(future)
                    progress.ended(run)
                    if error := future.exception():
                        stopped = self._launcher.stopping
                        self._log(f"{run.name}: {'stopped' if stopped else _told(error)}")
                        failed.append(run.name)
                        continue
                    rest = progress.after([*waiting, *running.values()])
                    self._log(f"{run.name}: {describe(future.result())}; {rest}")
        return failed

    def _ready(
        self, waiting: Sequence[DeclaredRun], running: Iterable[DeclaredRun]
    ) -> list[DeclaredRun]:
        """Return the next runs to start, in order, as far as there is room for their ranks."""
        busy = sum(min(run.ranks, self._jobs) for run in running)
        found: list[DeclaredRun] = []
        for run in waiting:
            busy += min(run.ranks, self._jobs)
            if busy > self._jobs:
                break
            found.append(run)
        return found

    def run_one(self, run: DeclaredRun) -> StudyRow:
        """Make a run, unless it has been made, and write its row.

        Raises:
            ConfigError: A start failed, or the run folder holds a run of other settings; the
                message names the exit code and the file of the output.
        """
        if run.fork is not None:
            self._make_checkpoint(self._study.base(run), run.fork.step, console=self._console(run))
        with self._lock(run) as lock:
            if self._row_file(run).is_file():  # another process made it in the meantime
                return self.checked([self._own_row(self._row_file(run))])[run.name]
            self._claim(run)
            for step in self._commands.fork_steps(run):
                self._make_checkpoint_locked(run, step, lock, self._console(run))
            code = 0 if self._is_finished(run) else self._start(run, lock)
            if code not in (0, NumericsError.exit_code):
                raise ConfigError(f"exit code {code}; see {self._console(run)}")
            if code == 0 and not self._is_finished(run):
                raise ConfigError(f"left before its last step; see {self._console(run)}")
            row = self._row(run, code, {} if code else self._scores(run, lock))
            write_row(self._row_file(run), row)
            return row

    def _make_checkpoint(self, base: DeclaredRun, step: int, *, console: Path) -> None:
        """Make the checkpoint of a base that a fork loads, unless it exists.

        While another thread or process makes the base, a fork waits for its checkpoint alone.
        """
        made = self._commands.checkpoint(base, step).is_dir
        with self._lock(base, unless=made) as lock:
            if made():
                self._check_settings(base)
                return
            self._claim(base)
            for earlier in self._commands.fork_steps(base):
                if earlier <= step:
                    self._make_checkpoint_locked(base, earlier, lock, console)

    def _make_checkpoint_locked(
        self, base: DeclaredRun, step: int, lock: int, console: Path
    ) -> None:
        if self._commands.checkpoint(base, step).is_dir():
            return
        code = self._start(base, lock, until=step, console=console)
        if code or not self._commands.checkpoint(base, step).is_dir():
            reason = f"exit code {code}" if code else "it is past this step; remove its run folder"
            raise ConfigError(f"no checkpoint of {base.name} after step {step}: {reason}")

    def _start(
        self, run: DeclaredRun, lock: int, *, until: int | None = None, console: Path | None = None
    ) -> int:
        """Start a run, to its end or `until` a step; return the exit code."""
        console = console or self._console(run)
        console.parent.mkdir(parents=True, exist_ok=True)
        return self._launcher(
            self._commands.flags(run, until=until),
            ranks=run.ranks,
            folder=self._commands.folder(run),
            console=console,
            lock=lock,
        )

    @contextmanager
    def _lock(
        self, run: DeclaredRun, *, unless: Callable[[], bool] = lambda: False
    ) -> Iterator[int]:
        """Hold the lock of a run folder, and yield its file descriptor; wait while others do.

        As soon as `unless` returns True there is no need of the lock, which is then not held.
        """
        path = self._work / "locks" / run.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            logged = False
            while not unless():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._launcher.stopping:
                        raise ConfigError(f"{run.name} is in use") from None
                    if not logged:
                        self._log(f"{run.name}: in use; waits")
                    logged = True
                    time.sleep(POLL_SECONDS)
            yield file.fileno()

    def _claim(self, run: DeclaredRun) -> None:
        """Note the settings of a run folder before anything is in it."""
        self._check_settings(run)
        self._settings_file(run).parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._settings_file(run), self._commands.digest(run) + "\n")

    def _check_settings(self, run: DeclaredRun) -> None:
        """Raise `ConfigError` if the run folder holds a run of other settings."""
        path, folder = self._settings_file(run), self._commands.folder(run)
        known = path.read_text(encoding="utf-8").strip() if path.is_file() else None
        if folder.is_dir() and known != self._commands.digest(run):
            raise ConfigError(
                f"{folder} holds a run of other settings; rename the run, or remove the folder"
            )

    def _is_finished(self, run: DeclaredRun) -> bool:
        status = read_status(self._commands.folder(run))
        steps = self._commands.steps(run)
        return status is not None and status.state == "done" and status.iteration == steps

    def _scores(self, run: DeclaredRun, lock: int) -> dict[str, float]:
        folder, console = self._commands.folder(run), self._console(run)
        found: dict[str, float] = {}
        for score in self._study.scores:
            file = self._commands.file_of(score)
            found[score.name] = self._launcher.evaluate(
                score, file, folder, step=self._commands.steps(run), console=console, lock=lock
            )
        return found

    def _row(self, run: DeclaredRun, code: int, scores: Mapping[str, float]) -> StudyRow:
        return row_of(
            self._commands.folder(run),
            name=run.name,
            group=run.group,
            seed=run.seed,
            ranks=run.ranks,
            data_parallel=self._commands.data_parallel(run),
            settings=self._commands.digest(run),
            exit_code=code,
            first_step=1 if run.fork is None else run.fork.step + 1,
            clip=self._commands.config(run).optimizer.clip_grad,
            scores=scores,
            flags=self._commands.declared(run),
            cores=len(os.sched_getaffinity(0)),
        )

    def _own_row(self, path: Path) -> StudyRow:
        """Return the row in the file of a run; raise `ConfigError` if it has no such row."""
        rows = read_rows(path)
        if [row.name for row in rows] != [path.stem]:
            raise ConfigError(f"{path}: must hold the row of {path.stem} alone; remove the file")
        return rows[0]

    def _row_file(self, run: DeclaredRun) -> Path:
        return self._work / "rows" / f"{run.name}.json"

    def _settings_file(self, run: DeclaredRun) -> Path:
        return self._work / "settings" / run.name

    def _console(self, run: DeclaredRun) -> Path:
        return self._work / "console" / f"{run.name}.txt"


class _Progress:
    """Counts finished runs and estimates the time of the rest.

    Work is counted in steps, of each rank for itself. A running run does not tell its step, so that
    it is taken to be as fast as the runs that have ended: their work over the time for which they
    held their places, of which there are `jobs`.
    """

    def __init__(self, commands: Commands, *, jobs: int, done: int, total: int) -> None:
        self._commands, self._jobs, self._done, self._total = commands, jobs, done, total
        self._began = time.monotonic()
        self._began_at: dict[str, float] = {}
        self._left: dict[str, float] = {}
        self._work = 0.0
        self._held = 0.0

    def began(self, run: DeclaredRun) -> None:
        """Note when a run starts, and the work that earlier starts left of it."""
        self._began_at[run.name], self._left[run.name] = time.monotonic(), self._left_of(run)

    def ended(self, run: DeclaredRun) -> None:
        """Add the work of a run that has ended, whether it finished or failed."""
        # A start that fails at once may leave no step in status.json.
        self._work += max(0, self._left.pop(run.name) - self._left_of(run))
        self._held += self._held_by(run)

    def after(self, rest: Sequence[DeclaredRun]) -> str:
        """Return progress after a finished run: how many are done, and how long `rest` may take."""
        self._done += 1
        count = f"{self._done} of {self._total}"
        if not rest or self._work <= 0:
            return count
        running = [run for run in rest if run.name in self._left]
        waiting = [run for run in rest if run.name not in self._left]
        rate = self._work / self._held
        partly = sum(min(self._left[run.name], rate * self._held_by(run)) for run in running)
        ahead = sum(self._left_of(run) for run in waiting)
        ahead += sum(self._left[run.name] for run in running) - partly
        seconds = (time.monotonic() - self._began) * ahead / (self._work + partly)
        return f"{count}, about {duration(seconds)} left"

    def _held_by(self, run: DeclaredRun) -> float:
        """Return the seconds since the start of a run, times the places that it holds."""
        return (time.monotonic() - self._began_at[run.name]) * min(run.ranks, self._jobs)

    def _left_of(self, run: DeclaredRun) -> float:
        """Return the work that is left of a run that is not running."""
        status = read_status(self._commands.folder(run))
        made = 0 if status is None or status.iteration is None else status.iteration
        fork = 0 if run.fork is None else run.fork.step
        return (self._commands.steps(run) - max(made, fork)) * run.ranks


def _told(error: BaseException) -> str:
    """Return an error in one line, with its class if nothing expects it."""
    if isinstance(error, SparsetronError | OSError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())


def describe(row: StudyRow) -> str:
    """Return the result of a run in words."""
    if row.valid_loss is None:
        return f"ended at step {row.steps} with exit code {row.exit_code}"
    return f"validation loss {row.valid_loss:.4f}, {row.seconds:.0f} s"
