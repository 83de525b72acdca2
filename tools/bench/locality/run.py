"""Do the same entries stay on top? Figure 1 of the Radius paper, from a run.

    python -m tools.bench.locality.run RUN [--at STEP] [--steps 50] [--top 0.01 0.1] [--out FOLDER]
    python -m tools.bench.locality.run [...] -- FLAGS OF pretrain_gpt.py
    python -m tools.bench.locality.run --kept RUN [RUN ...]

Goes on from a checkpoint of a dense run (the newest unless --at) for some steps, in a run folder of
its own that is thrown away; or trains what FLAGS say. At each step the entries of every weight
matrix with the largest |gradient|, and those with the largest |update| (what Radius selects by),
are marked, k = ceil(top x n) of each; how often each entry was marked is the figure. `--kept`
adds what Radius runs recorded: the share of their index that each new selection kept. Writes
README.md, results.json and, with matplotlib, figure.png to FOLDER.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, SparsetronError
from megatron.metrics.logger import JSONL
from megatron.pretrain import leave
from tools.bench.common.rows import records
from tools.bench.locality.report import KeptShare, LocalityCurve, write_report

REPO = Path(__file__).resolve().parents[3]

KINDS = {".mlp.": "MLP", ".attention.": "attention", "embedding": "embedding"}
"""Kinds of layers, by a part of the logical name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options, flags = _arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.run is not None:
            flags = flags_of(options.run, at=options.at)
        kept = [kept_of(folder) for folder in options.kept]
        curves, facts = _watched(flags, options) if flags else ([], {})
        if not curves and not kept:
            raise ConfigError("nothing to look at; give RUN, --kept, or flags after --")
        write_report(options.out, curves, kept, facts, log=print)
    except SparsetronError as error:
        print(f"locality: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _watched(
    flags: Sequence[str], options: argparse.Namespace
) -> tuple[list[LocalityCurve], dict[str, Any]]:
    from tools.bench.locality.watch import watch

    with tempfile.TemporaryDirectory() as folder, _quiet(Path(folder) / "console"):
        given = [*flags, "--run-dir", str(Path(folder) / "run")]
        return watch(given, steps=options.steps, tops=options.top, kinds=KINDS)


def flags_of(run: Path, *, at: int | None) -> list[str]:
    """Return flags that continue from a checkpoint of a run, with its configuration."""
    config = run / "config.yaml"
    if not config.is_file():
        raise ConfigError(f"{run}: holds no config.yaml; give the folder of a run (--run-dir)")
    step = [] if at is None else ["--ckpt-step", str(at)]
    return ["--config", str(config), "--load", str(run), *step]


def kept_of(run: Path) -> KeptShare:
    """Return the records of a Radius run's selections.

    Raises `ConfigError` for a run without selections.
    """
    steps = [r for r in records(run / JSONL) if r.get("index_kept") is not None]
    if not steps:
        raise ConfigError(f"--kept: {run} recorded no index_kept; give a run of Radius")
    return KeptShare(
        name=run.resolve().name,
        shares=tuple((step["iteration"], float(step["index_kept"])) for step in steps),
    )


@contextlib.contextmanager
def _quiet(console: Path):
    """Send the trainer's output to a file."""
    with open(console, "w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
        yield


def _arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    mine, flags = list(arguments), []
    if "--" in mine:
        cut = mine.index("--")
        mine, flags = mine[:cut], mine[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.locality.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", nargs="?", type=Path, metavar="RUN", help="folder of a dense run")
    add("--at", type=int, metavar="STEP", help="checkpoint to start from (default: the newest)")
    add("--steps", type=int, default=50, help="steps that are watched")
    add("--top", type=float, nargs="+", default=[0.01, 0.1], help="shares of each matrix")
    add("--kept", type=Path, nargs="+", default=[], metavar="RUN", help="folders of Radius runs")
    add(
        "--out", type=Path, default=REPO / "tools" / "bench" / "locality", help="folder to write to"
    )
    options = parser.parse_args(mine)
    if options.run is not None and flags:
        parser.error("give RUN, or flags after --, not both")
    if options.steps < 2 or not all(0 < top < 1 for top in options.top):
        parser.error("--steps wants at least 2, --top shares between 0 and 1")
    return options, flags


if __name__ == "__main__":
    leave(main())
