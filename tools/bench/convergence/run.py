"""Measure what a gradient path costs in validation loss: a declared set of runs and its report.

    python -m tools.bench.convergence.run --text-folder TEXT --jobs 2      run what has no result
    python -m tools.bench.convergence.run --report                         write tables and plots
    python -m tools.bench.convergence.run --text-folder TEXT --measure     estimate the total time
    python -m tools.bench.convergence.run --list                           list the runs

The model is a GPT of 4 layers x 256. TEXT holds `train*` and `valid*` files that
`tools/preprocess_data.py` reads; a tokenizer with 8192 entries is trained on the first. Most runs
are forked from a dense run. A finished run is appended to RESULTS as one line. A later start skips
finished runs and resumes interrupted ones, also those that another study has finished in WORK.
Ctrl-C or SIGTERM makes the running ones save and end. Exit code 1 if a run failed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path

from megatron.errors import ConfigError, NumericsError, SparsetronError
from megatron.status import read_status
from tools.bench.convergence.finished import is_finished
from tools.bench.convergence.measure import measure
from tools.bench.convergence.model import VOCABULARY
from tools.bench.convergence.radius_page import RADIUS
from tools.bench.convergence.report import Study, write_report
from tools.bench.convergence.rows import append_row, read_rows, row_of
from tools.bench.convergence.study import (
    StudyPlan,
    StudyRun,
    dense_of,
    flags_of,
    stages,
    trunk_stages,
)
from tools.studies.text_data import prepare

REPO = Path(__file__).resolve().parents[3]

BENCH = REPO / "tools" / "bench"
ROWS = "results.jsonl"

Runner = Callable[[Sequence[str], int, Path], int]
"""Runs an entry script on a number of ranks, with output to a file; returns the code."""


class Processes:
    """A `Runner` that starts processes, `threads` threads in each, and can end them all."""

    def __init__(self, *, threads: int, script: str = "pretrain_gpt.py") -> None:
        self._threads, self._script = threads, script
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.stopping = False

    def __call__(self, flags: Sequence[str], ranks: int, console: Path) -> int:
        launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone"]
        launcher += [] if ranks == 1 else ["--nproc-per-node", str(ranks)]
        command = ["env", f"OMP_NUM_THREADS={self._threads}", sys.executable, *launcher]
        with open(console, "ab") as stream:
            with self._lock:
                if self.stopping:
                    return 130
                process = subprocess.Popen(
                    [*command, str(REPO / self._script), *flags],
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches them once, from `stop`
                )
                self._running.add(process)
            code = process.wait()
        with self._lock:
            self._running.discard(process)
        return code

    def stop(self) -> None:
        """Make every running process save and leave, and start no other."""
        with self._lock:
            self.stopping = True
            for process in self._running:
                process.send_signal(signal.SIGTERM)


def main(
    arguments: Sequence[str] | None = None,
    study: Study = RADIUS,
    description: str | None = __doc__,
) -> int:
    """Run `study` and return the exit code; `description` is the text of `--help`."""
    options = _arguments(arguments, study, description)
    try:
        return _main(options, study)
    except SparsetronError as error:
        print(f"{study.folder}: {error}", file=sys.stderr)
        return error.exit_code


def _main(options: argparse.Namespace, study: Study) -> int:
    plan = StudyPlan(
        steps=options.steps,
        tokens=options.tokens,
        sequence=options.sequence,
        valid_tokens=options.valid_tokens,
        dtype=options.dtype,
    )
    runs, results = study.runs, options.results or BENCH / study.folder / ROWS
    wanted = [run for run in runs if not options.only or run.name in options.only]
    if unknown := set(options.only or ()) - {run.name for run in runs}:
        raise ConfigError(f"--only: {', '.join(sorted(unknown))}: no such run; see --list")
    if options.list:
        done = {row["name"] for row in read_rows(results, plan)}
        for run in wanted:
            print(f"{run.name:42} {'done' if run.name in done else ''}".rstrip())
        return 0
    if options.report:
        write_report(results, options.out or BENCH / study.folder, study, log=_log)
        return 0
    processes = Processes(threads=options.threads)
    signal.signal(signal.SIGTERM, lambda *_: processes.stop())
    signal.signal(signal.SIGINT, lambda *_: processes.stop())
    data = prepare(options.text_folder, options.work / "data", vocabulary=VOCABULARY)
    if options.measure:
        measure(runs, plan, data=data, work=options.work, jobs=options.jobs, runner=processes)
        return 0
    failed = run_all(
        wanted,
        plan,
        data=data,
        work=options.work,
        results=results,
        jobs=options.jobs,
        runner=processes,
    )
    return 1 if failed else 0


def run_all(
    wanted: Sequence[StudyRun],
    plan: StudyPlan,
    *,
    data: Path,
    work: Path,
    results: Path,
    jobs: int,
    runner: Runner,
) -> list[str]:
    """Run everything without a result, at most `jobs` at once, in order, after their dense runs.

    A row is appended when a run has ended, also when its numbers went wrong (exit code 5). Returns
    the names of runs that failed or could not run; when the runner is `stopping`, these are all
    that have not started.
    """
    done = {row["name"] for row in read_rows(results, plan)}
    waiting = [run for run in wanted if run.name not in done]
    failed: list[str] = []
    running: dict[Future[int], StudyRun] = {}
    (work / "console").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            if getattr(runner, "stopping", False) and waiting:
                _log(f"stopped: {len(waiting)} runs are left for another start")
                failed += [run.name for run in waiting]
                waiting = []
                continue
            for run in _ready(waiting, done, running.values(), jobs):
                waiting.remove(run)
                _log(f"{run.name}: starts")
                future = pool.submit(run_one, run, plan, data=data, work=work, runner=runner)
                running[future] = run
            if not running:
                names = [run.name for run in waiting]
                _log(f"left out, since their dense run is missing: {', '.join(names)}")
                return failed + names
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                try:
                    code = future.result()
                except ConfigError as error:
                    _log(f"{run.name}: {error}")
                    failed.append(run.name)
                    continue
                if code not in (0, NumericsError.exit_code):
                    _log(f"{run.name}: exit code {code}; see {work / 'console' / run.name}.txt")
                    failed.append(run.name)
                    continue
                row = row_of(run, plan, work / "runs" / run.name, exit_code=code)
                append_row(results, row)
                done.add(run.name)
                _log(f"{run.name}: {_told(row)}")
    return failed


def _ready(
    waiting: Sequence[StudyRun], done: set[str], running: Iterable[StudyRun], jobs: int
) -> list[StudyRun]:
    """Return the next runs to start. A run of several ranks gets the whole machine."""
    busy = sum(min(run.ranks, jobs) for run in running)
    found: list[StudyRun] = []
    for run in waiting:
        if run.start is None or dense_of(run).name in done:
            busy += min(run.ranks, jobs)
            if busy > jobs:
                break
            found.append(run)
    return found


def run_one(run: StudyRun, plan: StudyPlan, *, data: Path, work: Path, runner: Runner) -> int:
    """Run all remaining starts of a run; return the last exit code, 0 if none remained."""
    folder = work / "runs"
    flags = flags_of(run, plan, data=data, runs_dir=folder)
    if is_finished(folder / run.name, flags, run.ranks):
        _log(f"{run.name}: was finished before")
        return 0
    lacking = [(dense_of(run), f) for f in trunk_stages(run, plan, data=data, runs_dir=folder)]
    own = [(run, flags) for flags in stages(run, plan, data=data, runs_dir=folder)]
    for each, flags in chain(lacking, own):
        code = runner(flags, each.ranks, work / "console" / f"{run.name}.txt")
        if code:
            # torchrun turns every code into 1; the run folder has the original code.
            status = read_status(folder / each.name) if each.ranks > 1 else None
            return status.exit_code or code if status is not None else code
    return 0


def _told(row: dict) -> str:
    if row["valid_loss"] is None:
        return f"ended at step {row['last_step']}, exit code {row['exit_code']}"
    return f"validation loss {row['valid_loss']:.4f}, {row['seconds']:.0f} s"


def _log(line: str) -> None:
    print(line, flush=True)


def _arguments(
    arguments: Sequence[str] | None, study: Study, description: str | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.bench.{study.folder}.run",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--text-folder", type=Path, default=Path("data/wikipedia"), help="default: %(default)s")
    add(
        "--work",
        type=Path,
        default=Path("runs/convergence"),
        help="folder of the prepared data and of the runs",
    )
    add("--results", type=Path, help="file of results; default: the study's")
    add("--out", type=Path, help="folder of the report; default: the study's")
    add("--only", nargs="+", metavar="RUN", help="names of the runs to make; default: all")
    add("--jobs", type=int, default=1, help="number of runs in parallel")
    add("--threads", type=int, default=1, help="threads per rank")
    add(
        "--steps",
        type=int,
        default=StudyPlan.steps,
        help="steps of a run; intervals and starts scale with it",
    )
    add("--tokens", type=int, default=StudyPlan.tokens, help="tokens per step")
    add("--sequence", type=int, default=StudyPlan.sequence, help="tokens per sequence")
    add("--valid-tokens", type=int, default=StudyPlan.valid_tokens, help="tokens of an evaluation")
    add(
        "--dtype",
        choices=["bf16", "fp32"],
        default=StudyPlan.dtype,
        help="dtype of parameters; gradients are summed in fp32",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--list", action="store_true", help="list the runs and mark finished ones")
    mode.add_argument(
        "--measure", action="store_true", help="time a dense run and estimate the total"
    )
    mode.add_argument("--report", action="store_true", help="write tables and plots of the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
