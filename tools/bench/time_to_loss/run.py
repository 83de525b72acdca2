"""Does a gradient path reach a lower loss than a dense run of the same time?

    python -m tools.bench.time_to_loss.run --data FOLDER --out FOLDER     as root; 30 minutes
    python -m tools.bench.time_to_loss.run --data FOLDER --rates none     loopback, no root

Losses are those of `tools/bench/loss_by_bytes`. The step of each of its paths is timed here with
the same program, model and batch: `pretrain_gpt.py` on four ranks, each in a network namespace of
its own whose link has the given rate. A path that takes less time than dense bf16 is
compared with a dense run that is as much shorter. FOLDER of --data is that of the study. Writes
README.md, results.json and figure.png.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, SparsetronError
from megatron.report.charts import PALETTE
from megatron.report.runs import read_run
from tools.bench.common.figures import plain_axes, save
from tools.bench.common.netlab import NO_LIMIT, Network, run
from tools.bench.common.page_files import write_page
from tools.bench.gradient_path.run import check_network
from tools.bench.time_to_loss.iso_time import DenseLosses, IsoTime, compare
from tools.studies.commands import Commands
from tools.studies.declaration import DeclaredRun, DeclaredStudy, read_study
from tools.studies.rows import StudyRow, read_rows
from tools.studies.statistics import losses_of

REPO = Path(__file__).resolve().parents[3]
STUDY = REPO / "tools" / "bench" / "loss_by_bytes"

DENSE, DENSE_BF16, SHORTER = "dense", "dense_bf16", "dense_steps_"
RING = "dense_bf16-ring"
"""Dense with 16-bit gradients, which gloo averages along its ring: timed, without a loss."""
RANKS = 4
RATES = ("1gbit", "200mbit", "50mbit")
WARM_UP = 4
"""Steps before the measured ones; of Radius an interval, after which it draws its first index."""
PERIOD = 20
"""Measured steps: a whole interval of every path that has one."""

Seconds = Mapping[str, float]
"""Mean seconds of a step by group."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    networks = [Network(ranks=RANKS, rate=rate) for rate in options.rates]
    try:
        if options.period < 1:
            raise ConfigError(f"--period {options.period}: must be at least 1")
        for network in networks:
            check_network(network)
        study, rows = read_study(options.study), read_rows(options.results)
        dense = DenseLosses(rows, dense=DENSE, shorter=SHORTER)
        paths = timed_paths(study, rows)
        if DENSE_BF16 not in {path.group for path in paths}:
            raise ConfigError(
                f"--results: no finished run of {DENSE_BF16}; tools/study.py makes it"
            )
        plain = next(path for path in paths if path.group == DENSE)
        flags = {**plain.flags, "grad-reduce-in-bf16": True}
        ring = replace(plain, group=RING, flags=flags)
        found: dict[str, list[IsoTime]] = {}
        for network in networks:
            steps = steps_on(network, study, [ring, *paths], options.data, period=options.period)
            # Dense sends 16 bits either way; a user would take the faster one.
            dense_step = min(steps[DENSE_BF16], steps[RING])
            found[str(network)] = [
                compare(
                    path.group,
                    losses_of(row for row in rows if row.group == path.group),
                    dense,
                    before=0 if path.fork is None else path.fork.step,
                    step=steps[path.group],
                    dense_step=dense_step,
                )
                for path in paths
            ]
    except SparsetronError as error:
        print(f"time_to_loss: {error}", file=sys.stderr)
        return error.exit_code
    print(text := as_markdown(found, dense))
    write_page(
        options.out,
        text=text,
        values={name: [asdict(each) for each in rows] for name, rows in found.items()},
        draw=partial(draw, found=found, dense=dense),
    )
    return 0


def timed_paths(study: DeclaredStudy, rows: Sequence[StudyRow]) -> list[DeclaredRun]:
    """Return a run of each group that has a loss, without the shorter dense runs."""
    known = {row.group for row in rows if row.valid_loss is not None}
    first = {run.group: run for run in reversed(study.runs)}
    return [
        first[group] for group in study.groups if group in known and not group.startswith(SHORTER)
    ]


def timed(
    study: DeclaredStudy, path: DeclaredRun, folder: Path, data: Path, *, period: int
) -> list[str]:
    """Return the flags of a short run on `RANKS` ranks, which begins with the path's `warm_up`."""
    flags = dict(path.flags)
    if "radius-start-iter" in flags:  # where losses were forked
        flags["radius-start-iter"] = warm_up(path)
    flags |= {"train-iters": warm_up(path) + period, "eval-iters": 0, "log-interval": 1}
    run = replace(path, ranks=RANKS, fork=None, flags=flags, tokens=None)
    return Commands(replace(study, runs=(run,)), folder, data).flags(run)


def warm_up(path: DeclaredRun) -> int:
    """Return the number of steps before the measured ones."""
    interval = path.flags.get("radius-interval", WARM_UP)
    assert isinstance(interval, int)
    return interval


def steps_on(
    network: Network, study: DeclaredStudy, paths: Sequence[DeclaredRun], data: Path, *, period: int
) -> Seconds:
    """Return the mean seconds of a step of each path on a network, after those of `warm_up`."""
    found: dict[str, float] = {}
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            flags = timed(study, path, Path(folder), data, period=period)
            command = [str(REPO / "pretrain_gpt.py"), *flags]
            if code := run(network.command(command, folder=Path(folder))):
                raise ConfigError(f"{path.group} on {network}: a rank failed with exit code {code}")
            seconds = read_run(Path(folder) / path.name).steps["step_seconds"][warm_up(path) :]
        found[path.group] = statistics.fmean(seconds)
        print(f"{network}: {path.group}: {1e3 * found[path.group]:.0f} ms", flush=True)
    return found


def as_markdown(found: Mapping[str, Sequence[IsoTime]], dense: DenseLosses) -> str:
    """Return the page."""
    lines = [*_note(dense), "", "![Loss at the end of runs of equal time](figure.png)", ""]
    head = "seeds | step, ms | / dense bf16 | loss | dense steps | dense loss | path less dense | "
    for network, rows in found.items():
        lines += [f"## {network}", "", f"| path | {head}error | |", f"|---|{'---:|' * 8}---|"]
        for row in sorted(rows, key=lambda row: row.step):
            cells = [
                str(len(row.seeds)),
                f"{1e3 * row.step:.0f}",
                f"{row.share:.2f}",
                f"{row.loss:.4f}",
                f"{row.dense_steps:.0f}",
                f"{row.dense_loss:.4f}",
                f"{row.difference:+.4f}",
                "" if row.error is None else f"{row.error:.4f}",
                row.verdict if row.group not in (DENSE, DENSE_BF16) else "",
            ]
            lines.append(f"| {row.group} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _note(dense: DenseLosses) -> list[str]:
    return textwrap.wrap(
        f"Losses: validation losses of [loss_by_bytes](../loss_by_bytes/README.md) after "
        f"{dense.steps} steps, mean over seeds. Step: `pretrain_gpt.py` with the flags of those "
        f"runs on {RANKS} ranks, one thread each, mean of {PERIOD} steps, an interval of every "
        "path that has one. Ranks share the cores of one machine, so that computing takes longer "
        "than on machines of their own and hides some of what a path saves. Dense bf16: the faster "
        "of `--grad-wire bf16` and `--grad-reduce-in-bf16`. Dense steps: the length of a dense "
        "bf16 run that takes as long as the path's run, whose steps "
        f"before the fork are dense, at most {dense.steps}. Dense loss: that of a dense run of "
        "this length with a schedule of its own, interpolated between runs of "
        f"{', '.join(map(str, dense.lengths))} steps, same seeds; they ran on one rank, without a "
        "wire. A path pays if its loss is lower at the level of 5 % (Student's t of the "
        "differences over seeds); neither the timing's nor the interpolation's error is in it.",
        width=100,
    )


def draw(path: Path, *, found: Mapping[str, Sequence[IsoTime]], dense: DenseLosses) -> bool:
    """Draw the paths and the dense runs by time, a panel for each network.

    Returns False if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(4.4 * len(found) + 1.5, 4.8), dpi=130, layout="constrained")
    curve = [dense.mean(steps) for steps in dense.lengths]
    for place, (network, rows) in enumerate(found.items(), 1):
        axes: Any = figure.add_subplot(1, len(found), place)
        axes.plot(dense.lengths, curve, "-", color="#6b7280", label="dense, schedule ended")
        for number, row in enumerate(row for row in rows if row.group not in (DENSE, DENSE_BF16)):
            color, marker = PALETTE[number % len(PALETTE)], "os^D"[number // len(PALETTE)]
            axes.plot([row.length], [row.loss], marker, color=color, label=row.group)
        axes.set_xscale("log")
        axes.set_title(network, loc="left", fontsize=11)
        axes.set_xlabel("time, in steps of dense bf16")
        axes.set_ylabel("validation loss")
        plain_axes(axes)
        if place == len(found):
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)
    return True


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.time_to_loss.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rates", nargs="+", default=RATES, help=f"of each link; {NO_LIMIT}: the loopback")
    add("--study", type=Path, default=STUDY / "study.yaml", help="the study of the losses")
    add("--results", type=Path, default=STUDY / "results.jsonl", help="its rows")
    add("--data", type=Path, default=Path("data"), help="its data")
    add("--period", type=int, default=PERIOD, help="measured steps of each path")
    add("--out", type=Path, default=None, help="folder for the page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
