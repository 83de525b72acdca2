"""Train WRN-28-2 on CIFAR-10's images as Sohoni et al. do, for fewer epochs, and write the page.

    python -m tools.bench.image_accuracy.run --data FOLDER --work WORK     run what is missing
    python -m tools.bench.image_accuracy.run --work WORK --out OUT         write the page alone
    python -m tools.bench.image_accuracy.run --flags 30 --data FOLDER      the flags of one run

The tool makes one run after another, or those of --only. An interrupted run resumes from its last
checkpoint, and a finished one is left alone. The page has the epochs that each run has reached.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.status import read_status
from tools.bench.image_accuracy.page import row_of, write
from tools.bench.image_accuracy.settings import REPO, TABLES, ImageRun

EPOCHS = 5
NONZEROS = (100, 30)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    runs = [
        ImageRun(nonzeros=nonzeros, epochs=options.epochs, seed=seed)
        for seed in options.seeds
        for nonzeros in options.only
    ]
    if options.flags:
        for run in runs:
            flags = run.flags(data=options.data or "FOLDER", run_dir=options.work / run.name)
            print(shlex.join(["python", "pretrain_vision.py", *flags]))
        return 0
    failed = 0
    if options.data is not None:
        failed = sum(train(run, data=options.data, work=options.work) != 0 for run in runs)
    rows = [row_of(run, options.work / run.name) for run in runs]
    write(options.out, [row for row in rows if row is not None])
    return 1 if failed else 0


def train(run: ImageRun, *, data: str, work: Path) -> int:
    """Start or resume a run, and return its exit code; 0 if it was finished before."""
    folder = work / run.name
    if _is_finished(folder):
        return 0
    print(f"{folder}", flush=True)
    command = [sys.executable, str(REPO / "pretrain_vision.py")]
    return subprocess.run([*command, *run.flags(data=data, run_dir=folder)], cwd=REPO).returncode


def _is_finished(folder: Path) -> bool:
    status = read_status(folder)
    return status is not None and status.state == "done"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.image_accuracy.run",
        description="Accuracy of WRN-28-2 on CIFAR-10's images, dense and sparse.",
    )
    add = parser.add_argument
    add("--data", default=None, help="folder of the images (none: start no run)")
    add("--work", type=Path, default=Path("runs/image_accuracy"), help="folder of run folders")
    add("--out", type=Path, default=None, help="folder for README.md, results.json and figure.png")
    add("--epochs", type=int, default=EPOCHS, help="length of a run")
    add("--seeds", type=int, nargs="+", default=[1], help="seeds")
    add(
        "--only",
        type=int,
        nargs="+",
        default=list(NONZEROS),
        choices=sorted(TABLES["sparse"]),
        metavar="PER_CENT",
        help="per cent of nonzeros of the runs (100: dense)",
    )
    add("--flags", action="store_true", help="print the command of each run and start nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
