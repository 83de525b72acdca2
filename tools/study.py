"""Run a study, a declared set of runs, and compare them by loss, bytes, time and memory.

    python tools/study.py STUDY.yaml                        runs what has no result yet
    python tools/study.py STUDY.yaml --list                 the runs, and which are done
    python tools/study.py STUDY.yaml --slurm --partition=P  the same as Slurm job arrays
    python tools/study.py STUDY.yaml --report --out FOLDER  tables, pictures and study.html

Each run is started by scripts/launch.sh in WORK/runs; a finished run leaves one row. Ctrl-C or
SIGTERM makes running ones save and leave, and the same command goes on: it skips what has a row and
resumes what was interrupted. A failed run is reported and does not stop the others; --only RUN
makes it alone. Rows are collected in RESULTS, into which --list, --report and tasks of an array do
not write. With --text-folder TEXT a tokenizer and data sets are made first. With --slurm, flags
that this tool does not know are those of sbatch. docs/studies.md describes the file.

Exit code 0; 1 if a run failed or is left; 2 for wrong usage or a wrong file, 3 if files cannot be
read or written.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config.fields import nearest, whole_number  # noqa: E402
from megatron.errors import ConfigError, DataError, SparsetronError  # noqa: E402
from tools.bench.common.page_files import RESULTS as VALUES  # noqa: E402
from tools.studies import array  # noqa: E402
from tools.studies.declaration import DeclaredRun, DeclaredStudy, read_study  # noqa: E402
from tools.studies.execution import Execution, Launcher, is_array_task  # noqa: E402
from tools.studies.page import report_of, write_report  # noqa: E402
from tools.studies.rows import StudyRow, adding_to, read_rows, write_rows  # noqa: E402
from tools.studies.text_data import prepare  # noqa: E402

EXIT_FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    options, sbatch = _arguments(arguments)
    try:
        return _main(options, sbatch)
    except SparsetronError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return DataError.exit_code


def _main(options: argparse.Namespace, sbatch: Sequence[str]) -> int:
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: must be at least 1")
    if options.against is not None and not options.report:
        raise ConfigError("--against: compares reports; give --report")
    if sbatch and not options.slurm:
        raise ConfigError(f"{sbatch[0]}: no such flag; sbatch's flags need --slurm")
    study = read_study(options.study)
    work = options.work or Path("runs") / options.study.stem
    results = options.results or work / "results.jsonl"
    launcher = Launcher(study, jobs=options.jobs)
    execution = Execution(
        study, work, data=options.data, jobs=options.jobs, launcher=launcher, log=_log
    )
    wanted = _wanted(study, options.only)
    # The tasks of an array would all write one file.
    writes = not (options.list or options.report or is_array_task())
    _check_results(results, write=writes)
    if options.report:
        _check_out(options.out or work, results, options.against)
    rows = _collect(execution, results, write=writes)
    done = [row.name for row in rows]
    if options.list:
        for run in wanted:
            print(f"{run.name:40} {'done' if run.name in done else ''}".rstrip())
        return 0
    if options.report:
        return _report(study, rows, options.out or work, options.against, runs=work / "runs")
    if options.text_folder is not None:
        if study.vocabulary is None:
            raise ConfigError(f"--text-folder: {study.path} has no vocabulary to train on it")
        prepare(options.text_folder, options.data, vocabulary=study.vocabulary)
    if options.slurm:
        runs = [run for run in wanted if run.name not in done]
        return _submit(runs, options, work, sbatch)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: launcher.stop())
    failed = execution.run_all(wanted, done)
    _collect(execution, results, write=writes)
    if failed:
        _log(f"no result: {', '.join(failed)}; the same command tries again, --only RUN one alone")
    return EXIT_FAILED if failed else 0


def _wanted(study: DeclaredStudy, only: Sequence[str] | None) -> list[DeclaredRun]:
    names = [run.name for run in study.runs]
    for name in only or ():
        if name not in names:
            raise ConfigError(f"--only {name}: no such run{nearest(name, names)}; see --list")
    return [run for run in study.runs if not only or run.name in only]


def _check_results(results: Path, *, write: bool) -> None:
    """Refuse a file of results that cannot be used, before hours of training."""
    try:
        if results.exists() and not (results.is_file() and os.access(results, os.R_OK)):
            raise ConfigError(f"--results: {results} is no file that can be read; give another")
        if write:
            with adding_to(results):
                if not os.access(results.parent, os.W_OK | os.X_OK):
                    raise ConfigError(
                        f"--results: {results.parent} cannot be written; give another"
                    )
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"--results: {results}: lies in a file; give a folder") from None
    except OSError as error:
        raise ConfigError(f"--results: {results}: {error.strerror}; give another file") from None


def _check_out(out: Path, *rows: Path | None) -> None:
    """Refuse a folder of the report in which its values would replace a file of rows."""
    for file in rows:
        if file is not None and file.resolve() == (out / VALUES).resolve():
            raise ConfigError(f"--out {out}: the report would replace {file}; give another folder")


def _collect(execution: Execution, results: Path, *, write: bool) -> list[StudyRow]:
    """Return the rows of declared runs, from the work folder and the file of results.

    With `write`, those that the file lacks are added to it. Rows of runs that the study no longer
    declares stay in the file.
    """
    made = execution.done
    with adding_to(results) if write else nullcontext():
        earlier = read_rows(results)
        known = {row.name: row for row in earlier}
        new = [row for name, row in made.items() if name not in known]
        if other := [name for name, row in made.items() if known.get(name, row) != row]:
            _log(f"{results} keeps its own rows of runs made again: {', '.join(other)}")
        found = execution.checked([*earlier, *new])
        if new and write:
            others = [row for row in earlier if row.name not in found]
            write_rows(results, [*found.values(), *others])
    return list(found.values())


def _report(
    study: DeclaredStudy, rows: Sequence[StudyRow], out: Path, against: Path | None, *, runs: Path
) -> int:
    if not rows:
        raise ConfigError(f"{study.path}: no run has a result yet; start without --report")
    if against is not None and not against.is_file():
        raise ConfigError(f"--against {against}: no such file; name a file of rows of this study")
    report = report_of(study, rows, against)
    if against is not None and not report.repeated:
        raise ConfigError(f"--against {against}: has no row of the same runs and settings")
    for path in write_report(report, out, runs):
        print(path)
    return 0


def _submit(
    runs: Sequence[DeclaredRun], options: argparse.Namespace, work: Path, sbatch: Sequence[str]
) -> int:
    if not runs:
        _log("all runs are done")
        return 0
    command = array.own_command(
        [str(options.study.resolve()), "--work", str(work.resolve())]
        + ["--data", str(options.data.resolve())]
    )
    jobs = array.submit(runs, command, work=work, jobs=options.jobs, flags=sbatch)
    _log(f"submitted {len(runs)} runs as jobs {', '.join(jobs)}; --report reads what is done")
    return 0


def _log(line: str) -> None:
    print(f"study.py: {line}", flush=True)


def _arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="study.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("study", type=Path, metavar="STUDY.yaml", help="the declared runs")
    add("--work", type=Path, help="folder of runs and rows (default: runs/<name of the study>)")
    add("--data", type=Path, default=Path("data"), help="{data} in flags (default: data)")
    add("--text-folder", type=Path, help="train*, valid*: make a tokenizer and data sets in DATA")
    add("--results", type=Path, help="file of collected rows (default: WORK/results.jsonl)")
    add("--out", type=Path, help="folder of the report (default: WORK)")
    add("--only", nargs="+", metavar="RUN", help="make these runs alone")
    add(
        "--jobs",
        type=whole_number,
        default=1,
        help="processes at a time, or tasks of a Slurm array",
    )
    add("--against", type=Path, metavar="ROWS", help="--report: compare with rows made elsewhere")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--list", action="store_true", help="list the runs and mark finished ones")
    mode.add_argument("--report", action="store_true", help="write tables and pictures")
    mode.add_argument("--slurm", action="store_true", help="submit Slurm job arrays")
    return parser.parse_known_args(arguments)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
