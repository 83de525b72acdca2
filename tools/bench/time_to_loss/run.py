"""Does a gradient path reach a lower loss than a dense run of the same time?

    python -m tools.bench.time_to_loss.run --text-folder TEXT --out FOLDER     as root; 30 minutes
    python -m tools.bench.time_to_loss.run --text-folder TEXT --rates none     loopback, no root

Losses are those of `tools.bench.loss_by_bytes`. The step of each of its paths is timed here with
the same program, model and batch: `pretrain_gpt.py` on four ranks, each in a network namespace of
its own whose link has the given rate. A path that takes less time than dense over a bf16 wire is
compared with a dense run that is as much shorter. Writes README.md, results.json and figure.png.
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
from megatron.metrics.logger import JSONL
from megatron.report.charts import PALETTE
from tools.bench.common.figures import plain_axes, save
from tools.bench.common.netlab import NO_LIMIT, Network, run
from tools.bench.common.page_files import write_page
from tools.bench.convergence.groups import title_of
from tools.bench.convergence.measure import step_seconds
from tools.bench.convergence.rows import read_rows
from tools.bench.convergence.run import prepare
from tools.bench.convergence.study import DENSE, StudyRun, flags_of
from tools.bench.gradient_path.run import check_network
from tools.bench.loss_by_bytes.study import INTERVAL, LENGTHS, PLAN, SEEDS, SHORTER, of_seed
from tools.bench.time_to_loss.iso_time import IsoTime, compare, losses_of

REPO = Path(__file__).resolve().parents[3]

DENSE_BF16 = "dense_bf16"
RANKS = 4
RATES = ("1gbit", "200mbit", "50mbit")
WARM_UP = 4
"""Steps before the measured ones, which are a whole interval of every path that has one."""
RESULTS = REPO / "tools" / "bench" / "loss_by_bytes" / "results.jsonl"

Seconds = Mapping[str, float]
"""Mean seconds of a step by group."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    networks = [Network(ranks=RANKS, rate=rate) for rate in options.rates]
    try:
        for network in networks:
            check_network(network)
        losses = losses_of(read_rows(options.results, PLAN))
        paths = [path for path in _paths() if path.group in losses]
        data = prepare(options.text_folder, options.work / "data")
        found: dict[str, list[IsoTime]] = {}
        for network in networks:
            steps = steps_on(network, paths, data, period=options.period)
            found[str(network)] = [
                compare(path.group, losses, step=steps[path.group], dense_step=steps[DENSE_BF16])
                for path in paths
            ]
    except SparsetronError as error:
        print(f"time_to_loss: {error}", file=sys.stderr)
        return error.exit_code
    print(text := as_markdown(found))
    write_page(
        options.out,
        text=text,
        values={name: [asdict(each) for each in rows] for name, rows in found.items()},
        draw=partial(draw, found=found, losses=losses),
    )
    return 0


def _paths() -> list[StudyRun]:
    """Return the runs of one seed whose steps are timed."""
    return [run for run in of_seed(SEEDS[0]) if not run.group.startswith(SHORTER)]


def steps_on(network: Network, paths: Sequence[StudyRun], data: Path, *, period: int) -> Seconds:
    """Return the mean seconds of a step of each path on a network, in steps after `WARM_UP`."""
    found: dict[str, float] = {}
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            # A resampled index starts with the first step, instead of where losses were forked.
            own = replace(path, ranks=RANKS, start=None, interval=None, steps=WARM_UP + period)
            flags = [*flags_of(own, PLAN, data=data, runs_dir=Path(folder)), "--eval-iters", "0"]
            flags += ["--log-interval", "1", "--lr-warmup-iters", "0"]
            if path.interval is not None:
                flags += ["--radius-interval", str(INTERVAL)]
            command = [str(REPO / "pretrain_gpt.py"), *flags]
            if code := run(network.command(command, folder=Path(folder))):
                raise ConfigError(f"{path.group} on {network}: a rank failed with exit code {code}")
            seconds = step_seconds(Path(folder) / own.name / JSONL)[WARM_UP:]
        found[path.group] = statistics.fmean(seconds)
        print(f"{network}: {path.group}: {1e3 * found[path.group]:.0f} ms", flush=True)
    return found


def as_markdown(found: Mapping[str, Sequence[IsoTime]]) -> str:
    """Return the page."""
    lines = [*_note(), "", "![Loss at the end of runs of equal time](figure.png)", ""]
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
            lines.append(f"| {title_of(row.group)} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _note() -> list[str]:
    lengths = ", ".join(map(str, LENGTHS))
    return textwrap.wrap(
        f"Losses: validation losses of [loss_by_bytes](../loss_by_bytes/README.md) after "
        f"{PLAN.steps} steps, mean over its seeds. Step: `pretrain_gpt.py` with the flags of those "
        f"runs on {RANKS} ranks, one thread each, mean of {INTERVAL} steps, an interval of every "
        "path that has one. Ranks share the cores of one machine, so that computing takes longer "
        "than on machines of their own and hides some of what a path saves; this favours dense. "
        "Dense steps: the length of a dense run over a bf16 wire that takes as long as the path's "
        f"run, of which the first 20 % are dense, at most {PLAN.steps}. Dense loss: that of a "
        "dense run of this length with its own schedule, interpolated between "
        f"{lengths} and {PLAN.steps} steps, same seeds. A path pays if its loss is lower by more "
        "than two standard errors of the difference over seeds.",
        width=100,
    )


def draw(
    path: Path,
    *,
    found: Mapping[str, Sequence[IsoTime]],
    losses: Mapping[str, Mapping[int, float]],
) -> bool:
    """Draw the paths and the dense runs by time, a panel for each network.

    Returns False if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(5.5 * len(found), 4.8), dpi=130, layout="constrained")
    lengths = [*LENGTHS, PLAN.steps]
    names = [f"{SHORTER}{length}" for length in LENGTHS] + [DENSE]
    dense = [statistics.fmean(losses[name].values()) for name in names]
    for place, (network, rows) in enumerate(found.items(), 1):
        axes: Any = figure.add_subplot(1, len(found), place)
        axes.plot(lengths, dense, "-", color="#6b7280", label="dense bf16, schedule ended")
        for number, row in enumerate(row for row in rows if row.group not in (DENSE, DENSE_BF16)):
            color, marker = PALETTE[number % len(PALETTE)], "os^D"[number // len(PALETTE)]
            length = PLAN.steps * (0.2 + 0.8 * row.share)
            axes.plot([length], [row.loss], marker, color=color, label=title_of(row.group))
        axes.set_xscale("log")
        axes.set_title(network, loc="left", fontsize=11)
        axes.set_xlabel("time, in steps of dense bf16")
        axes.set_ylabel("validation loss")
        plain_axes(axes)
        if place == len(found):
            axes.legend(frameon=False, fontsize=7)
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
    add("--text-folder", type=Path, default=Path("data/wikipedia"), help="default: %(default)s")
    add("--work", type=Path, default=Path("runs/convergence"), help="folder of prepared data")
    add("--results", type=Path, default=RESULTS, help="rows of tools.bench.loss_by_bytes")
    add("--period", type=int, default=INTERVAL, help="measured steps of each path")
    add("--out", type=Path, default=None, help="folder for the page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
