"""Write the report of a run; for several runs also compare their losses.

    python tools/report.py RUN
    python tools/report.py RUN OTHER_RUN --assert-equal

Exit codes: 0 done; 1 with --assert-equal if losses differ; 2 if a folder is not a run or cannot be
written.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.closed_pipe import end_with_reader
from megatron.errors import ConfigError, SparsetronError
from megatron.metrics.logger import JSONL
from megatron.report import RunData, compare, read_run, write_comparison, write_report

EXIT_DIFFERENT = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    options = _parser().parse_args(argv)
    try:
        return _report(options)
    except SparsetronError as error:
        print(f"report.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"report.py: {error}", file=sys.stderr)
        return ConfigError.exit_code


def _report(options: argparse.Namespace) -> int:
    if options.assert_equal and len(options.runs) < 2:
        raise ConfigError("--assert-equal: compares runs; give two or more run folders")
    if not (math.isfinite(options.tolerance) and options.tolerance >= 0):
        raise ConfigError(f"--tolerance: {options.tolerance}; must be a finite number, at least 0")
    runs = [read_run(folder) for folder in options.runs]
    for run in runs:
        _tell_unreadable(run)
    try:
        _write(runs, options.output)
    except OSError as error:
        where = options.output or error.filename
        raise ConfigError(
            f"{where}: cannot be written ({error.strerror}); name a folder that can: --output"
        ) from error
    all_equal = True
    for run in runs[1:]:
        found = compare(runs[0], run, tolerance=options.tolerance)
        all_equal = all_equal and found.equal
        print(f"{runs[0].folder} and {run.folder}: {found.describe()}")
    return 0 if all_equal or not options.assert_equal else EXIT_DIFFERENT


def _tell_unreadable(run: RunData) -> None:
    count, path = run.unreadable_lines, run.folder / JSONL
    if count and not (run.iterations or any(run.evaluations.values())):
        raise ConfigError(
            f"{path}: none of its {count} lines can be read; it is no record of a run"
        )
    if count:
        _log(f"{path}: {count} unreadable lines are left out")


def _write(runs: Sequence[RunData], output: str | None) -> None:
    """Write the reports and, for several runs, the comparison.

    For several runs and an `output`, which holds a single page, only the comparison is written.
    """
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
    if output is None or len(runs) == 1:
        for run in runs:
            print(write_report(run.folder, output=output, log=_log))
    if len(runs) > 1:
        print(write_comparison(runs, output or runs[0].folder))


def _log(text: str) -> None:
    print(f"report.py: {text}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False, prog="report.py"
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder (--run-dir)")
    parser.add_argument(
        "--assert-equal",
        action="store_true",
        help="exit 1 unless all runs have the same steps with the same losses as the first",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="largest difference of losses that counts as equal (0 = every last bit)",
    )
    parser.add_argument(
        "--output",
        help="folder of what is written: of several runs the comparison alone (none = the reports "
        "go into their runs, the comparison into the first)",
    )
    return parser


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
