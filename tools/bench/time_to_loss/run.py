"""The loss of a gradient path over time, on slow networks.

    python -m tools.bench.time_to_loss.run --out FOLDER      as root; ten minutes, 4 ranks
    python -m tools.bench.time_to_loss.run --rates none      the loopback alone, no root

A path may send fewer bytes per step but need more steps to the same loss. Losses by step are those
of the convergence study, of its first seed (`tools/bench/convergence/results.jsonl`). The time of a
step of each path is measured here on four ranks, as in `gradient_path/run.py` with emulated
computation, since the study's baselines use four ranks. Writes README.md, results.json and
figure.png.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, SparsetronError
from megatron.report.charts import PALETTE
from megatron.report.drawing import smooth
from tools.bench.common.emulated import Emulation
from tools.bench.common.figures import plain_axes, save
from tools.bench.common.methods import with_computing
from tools.bench.common.netlab import Network
from tools.bench.common.page_files import write_page
from tools.bench.convergence.plot import SMOOTHED
from tools.bench.convergence.rows import WINDOWS, read_rows
from tools.bench.convergence.rows import Row as Trained
from tools.bench.convergence.study import SEEDS, StudyPlan
from tools.bench.gradient_path.rows import EMULATED, TARGET_RATE, GradientPathRow, GradientPathTable
from tools.bench.gradient_path.run import INTERVAL, check_network, measure

REPO = Path(__file__).resolve().parents[3]

DENSE = "dense"
GROUPS = {
    DENSE: "dense",
    "radius-0.4": "radius_0.4",
    "radius-0.1": "radius_0.1",
    "topk-0.1": "topk_0.1",
    "powersgd-4": "powersgd_4",
    "radius-0.4-rolling": "rolling_0.4-update",
    "radius-0.1-rolling": "rolling_0.1-update",
}
"""Groups of the convergence study by the name of the method here."""
RANKS = 4
RESULTS = REPO / "tools" / "bench" / "convergence" / "results.jsonl"


@dataclass(frozen=True, kw_only=True)
class LossCourse:
    """A run over time.

    `step` is the median seconds of a step that is no resample. `seconds` is the time of the whole
    run, and `loss` its smoothed training loss at the end. `points` are (seconds, smoothed training
    loss). `dense_then` is the smoothed loss of the dense run at the time when this run is over.
    """

    method: str
    step: float
    seconds: float
    loss: float
    dense_then: float
    points: Sequence[tuple[float, float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    networks = [Network(ranks=RANKS, rate=rate) for rate in options.rates]
    try:
        if options.rounds < 2:
            raise ConfigError(f"--rounds {options.rounds}: must be at least 2")
        for network in networks:
            check_network(network)
        trained = runs_of(read_rows(options.results))
        found = {
            str(network): courses(trained, steps_on(network, trained, options))
            for network in networks
        }
    except SparsetronError as error:
        print(f"time_to_loss: {error}", file=sys.stderr)
        return 2
    print(text := as_markdown(found, trained))
    write_page(
        options.out,
        text=text,
        values={name: [asdict(each) for each in rows] for name, rows in found.items()},
        draw=partial(draw, found=found),
        indent=None,
    )
    return 0


def runs_of(rows: Sequence[Trained]) -> dict[str, Trained]:
    """Return the study's run of each method. Raises `ConfigError` if one is missing or failed."""
    found: dict[str, Trained] = {}
    for name, group in GROUPS.items():
        here = [row for row in rows if (row["group"], row["seed"]) == (group, SEEDS[0])]
        if not here or here[0]["valid_loss"] is None:
            raise ConfigError(
                f"--results: no finished run {group!r} of seed {SEEDS[0]}; "
                "tools.bench.convergence.run makes it"
            )
        found[name] = here[0]
    return found


def steps_on(
    network: Network, trained: Mapping[str, Trained], options: argparse.Namespace
) -> dict[str, GradientPathRow]:
    """Measure the seconds of a step of each method.

    The time of a resample does not depend on the interval, so a short interval is used. The bytes
    of a rolling schedule do, so it uses the study's interval.
    """
    rolling = [name for name in GROUPS if name.endswith("rolling")]
    (interval,) = {trained[name]["interval"] for name in rolling}
    plain = [name for name in GROUPS if name not in rolling]

    def table(names: Sequence[str], interval: int) -> GradientPathTable:
        return measure(
            with_computing(names),
            network,
            EMULATED,
            rounds=options.rounds,
            interval=interval,
            smoke=options.smoke,
        )

    tables = table(plain, INTERVAL), table(rolling, interval)
    return {row.method: row for found in tables for row in found.rows if row.method in GROUPS}


def courses(
    trained: Mapping[str, Trained], steps: Mapping[str, GradientPathRow]
) -> list[LossCourse]:
    """Return each run over time, in the order of `GROUPS`."""
    dense = steps[DENSE].median
    times = {
        name: [seconds_until(step, row, steps[name], dense) for step, _ in row["curve"]]
        for name, row in trained.items()
    }
    losses = {name: [loss for _, loss in row["curve"]] for name, row in trained.items()}
    found: list[LossCourse] = []
    for name, seconds in times.items():
        # Smoothed like the end of a run, which has no later points.
        then = [
            loss for t, loss in zip(times[DENSE], losses[DENSE], strict=True) if t <= seconds[-1]
        ]
        smoothed = smooth(losses[name], SMOOTHED)
        found.append(
            LossCourse(
                method=name,
                step=steps[name].median,
                seconds=seconds[-1],
                loss=smoothed[-1],
                dense_then=smooth(then, SMOOTHED)[-1],
                points=list(zip(seconds, smoothed, strict=True)),
            )
        )
    return found


def seconds_until(step: int, run: Trained, row: GradientPathRow, dense: float) -> float:
    """Return the seconds of the first `step` steps of a run.

    Steps up to the fork are dense. After it, each step whose number is a multiple of `interval` is
    a resample if the method has resamples.
    """
    if run["start"] is None:
        return step * dense
    fork = min(step, StudyPlan(**run["plan"]).start_step(run["start"]))
    own = step - fork
    if row.resample is None:
        return fork * dense + own * row.median
    resamples = step // run["interval"] - fork // run["interval"]
    return fork * dense + (own - resamples) * row.median + resamples * row.resample


def as_markdown(found: Mapping[str, Sequence[LossCourse]], trained: Mapping[str, Trained]) -> str:
    """Return the page."""
    lines = [*_note(trained["radius-0.4"]), ""]
    lines += ["![Training loss by time](figure.png)", ""]
    head = (
        "step, ms | run / dense's | training loss | dense's by then | less that | validation loss"
    )
    for network, rows in found.items():
        dense = next(row for row in rows if row.method == DENSE)
        lines += [f"## {network}", "", f"| method | {head} |", "|---|" + "---:|" * 6]
        for row in rows:
            cells = [
                f"{1e3 * row.step:.0f}",
                f"{row.seconds / dense.seconds:.2f}",
                f"{row.loss:.3f}",
                f"{row.dense_then:.3f}",
                f"{row.loss - row.dense_then:+.3f}",
                f"{trained[row.method]['valid_loss']:.3f}",
            ]
            lines.append(f"| {row.method} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _note(run: Trained) -> list[str]:
    """Return the note on the numbers, including those of a Radius run of the study."""
    emulation = Emulation()
    computing = f"{1e3 * (emulation.forward + emulation.backward):.0f} ms"
    return textwrap.wrap(
        "Losses: the first seed of [convergence](../convergence/README.md), by step; paths take "
        f"over from the dense run after {run['start']:.0%} of the steps. Time: a step of {RANKS} "
        f"ranks with emulated computing ({computing}; the model is that of [gradient_path]"
        f"(../gradient_path/README.md)), where one of {run['interval']} steps is a resample, as in "
        f"those runs. Training loss is smoothed over {SMOOTHED / WINDOWS:.0%} of the run. A path "
        "that takes less time is over when the dense run's learning rate is still high: to be "
        "below what dense has by then takes less than to be as good as a dense run of that length "
        "would be.",
        width=100,
    )


def draw(path: Path, *, found: Mapping[str, Sequence[LossCourse]]) -> bool:
    """Draw the losses from the fork on, a panel for each network. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(5.5 * len(found), 4.5), dpi=130, layout="constrained")
    for place, (network, rows) in enumerate(found.items(), 1):
        axes: Any = figure.add_subplot(1, len(found), place)
        colors = iter(PALETTE)
        for row in rows:
            dense = row.method == DENSE
            color, line = ("#6b7280", "--") if dense else (next(colors), "-")
            minutes = [then / 60 for then, _ in row.points]
            losses = [loss for _, loss in row.points]
            axes.plot(minutes, losses, line, color=color, label=row.method, linewidth=1.6)
            axes.plot(minutes[-1:], losses[-1:], "o", color=color, markersize=4)
        # Before the fork all runs are the same, and the curve is steep.
        later = [loss for row in rows for _, loss in row.points[len(row.points) // 5 :]]
        axes.set_ylim(min(later) - 0.05, max(later) + 0.05)
        axes.set_title(network, loc="left", fontsize=11)
        axes.set_xlabel("minutes")
        axes.set_ylabel("training loss")
        plain_axes(axes)
        axes.legend(frameon=False, fontsize=9)
    save(figure, path)
    return True


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.time_to_loss.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    rates = [TARGET_RATE, "200mbit"]
    add("--rates", nargs="+", default=rates, help="of each link, as tc writes them; none: loopback")
    add("--rounds", type=int, default=8, help="measured steps of each method")
    add("--results", type=Path, default=RESULTS, help="the convergence study's runs")
    add("--out", type=Path, default=None, help="folder for the page")
    add("--smoke", action="store_true", help="a tiny model: does the tool work?")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
