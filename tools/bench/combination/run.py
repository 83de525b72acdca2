"""The combination study of Sohoni et al. 2019: sparsity x precision x microbatch x strategy.

    python -m tools.bench.combination.run --data FOLDER      train what has no row, then as below
    python -m tools.bench.combination.run --report           count memory, write page and figure
    python -m tools.bench.combination.run --list             list the settings and the runs

Memory of every declared setting is counted, by the report's accounting and as planned for the flags
of a run. A small network is trained, one run after another. FOLDER holds CIFAR-10's images
(docs/vision.md). A finished run is appended to RESULTS as one line. A later start skips finished
runs and resumes an interrupted one. Ctrl-C or SIGTERM makes the running one save and end. Exit code
1 if a run failed; --only makes it again alone.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError, SparsetronError
from tools.bench.combination.page import write
from tools.bench.combination.settings import figures
from tools.bench.combination.training import runs, train
from tools.bench.common.rows import ROWS, read_rows
from tools.bench.common.training_runs import ScriptProcesses

FOLDER = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        return _main(options)
    except SparsetronError as error:
        print(f"combination: {error}", file=sys.stderr)
        return error.exit_code


def _main(options: argparse.Namespace) -> int:
    if unknown := set(options.only or ()) - {run.name for run in runs()}:
        raise ConfigError(f"--only: {', '.join(sorted(unknown))}: no such run; see --list")
    wanted = [run for run in runs() if not options.only or run.name in options.only]
    if options.list:
        for title, group in figures().items():
            print(f"{title}: {len(group)} settings", *(each.name for each in group), sep="\n  ")
        done = {row["name"] for row in read_rows(options.results)}
        print("runs:")
        for run in wanted:
            print(f"  {run.name:48} {'done' if run.name in done else ''}".rstrip())
        return 0
    failed: list[str] = []
    if not options.report:
        if options.data is None:
            raise ConfigError("--data: the folder of the images is missing; give it, or --report")
        processes = ScriptProcesses(threads=options.threads, script="pretrain_vision.py")
        signal.signal(signal.SIGTERM, lambda *_: processes.stop())
        signal.signal(signal.SIGINT, lambda *_: processes.stop())
        failed = train(
            wanted,
            data=options.data,
            work=options.work,
            results=options.results,
            runner=processes,
            log=lambda line: print(line, flush=True),
        )
    write(options.out, read_rows(options.results))
    return 1 if failed else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.combination.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder of the images")
    add("--work", type=Path, default=Path("runs/combination"), help="folder of the runs")
    add("--results", type=Path, default=FOLDER / ROWS, help="file of results")
    add("--out", type=Path, default=FOLDER, help="folder of the page")
    add("--only", nargs="+", metavar="RUN", help="names of the runs to make; default: all")
    add("--threads", type=int, default=1, help="threads of a run")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--list", action="store_true", help="list the settings and the runs")
    mode.add_argument("--report", action="store_true", help="start no run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
