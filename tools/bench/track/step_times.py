"""Step times and bytes of the entries of a tier, on emulated networks.

    python -m tools.bench.track.step_times --data DATA     as root, on an idle machine

Every entry is `pretrain_gpt.py` with the model and batch of the tier on four ranks, each in a
network namespace of its own whose link has the given rate. Entries take turns, so that other load
on the machine falls on all of them. A rank's interface counts the bytes of a step, as the
difference of a long run and a short one. Dense steps before a path begins are rows of their own.
Adds the rows to step_times.json, of which `tools.bench.track.leaderboard` makes the times of runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, SparsetronError
from megatron.report.runs import RunData, read_run
from megatron.status import replace_text
from tools.bench.common.netlab import NO_LIMIT, Network, run
from tools.bench.gradient_path.run import check_network
from tools.bench.nodes.run import sent_by_a_node
from tools.bench.track.rules import START, check_entries, cycle_of, start_of, wire_of
from tools.studies.commands import Commands
from tools.studies.declaration import DeclaredRun, DeclaredStudy, read_study

REPO = Path(__file__).resolve().parents[3]
TIER = Path(__file__).with_name("tier_s.yaml")
FILE = Path(__file__).with_name("step_times.json")
RATES = (NO_LIMIT, "1gbit", "200mbit", "50mbit")
WARM_UP, PERIOD = 3, 20
"""Steps before the measured ones, at least, and measured steps: whole cycles of every entry."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """An entry on one network: seconds of a step, and the bytes that a rank sends in it.

    `rounds` are means over `PERIOD` steps. `reported` is what the run says, `counted` what the
    interface counts, None on the loopback, which ranks share. `load` was the machine's at the
    start.
    """

    entry: str
    rounds: Sequence[float]
    reported: float
    counted: float | None
    load: float

    @property
    def seconds(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds)


@dataclass(frozen=True, kw_only=True)
class TimedRuns:
    """A long and a short run of an entry, which differ by the measured steps."""

    name: str
    study: DeclaredStudy
    before: int

    def train(self, network: Network, data: Path, *, steps: int) -> tuple[RunData, float | None]:
        """Train for `steps` steps; return the run, and the bytes that a rank sent in all."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "network"
            commands, short = self.commands(Path(folder), data, steps=steps)
            command = [str(REPO / "pretrain_gpt.py"), *commands.flags(short)]
            if code := run(network.command(command, folder=out)):
                raise ConfigError(f"{self.name} on {network}: a rank failed with exit code {code}")
            counters = out / "counters.json"
            sent = None
            if counters.is_file():
                sent = sent_by_a_node(json.loads(counters.read_text(encoding="utf-8")))
            return read_run(commands.folder(short)), sent

    def commands(self, folder: Path, data: Path, *, steps: int) -> tuple[Commands, DeclaredRun]:
        """Return a run of `steps` steps, and its commands."""
        (declared,) = self.study.runs
        flags = {**declared.flags, "train-iters": steps, "eval-iters": 0, "log-interval": 1}
        short = replace(declared, flags=flags, tokens=None)
        return Commands(replace(self.study, runs=(short,)), folder, data), short


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        if options.rounds < 1:
            raise ConfigError(f"--rounds {options.rounds}: must be at least 1")
        timed = timed_runs(read_study(options.tier), options.data, options.entries)
        (ranks,) = {each.study.runs[0].ranks for each in timed}
        networks = {rate: Network(ranks=ranks, rate=rate) for rate in options.rates}
        for network in networks.values():
            check_network(network)
        for rate, network in networks.items():
            found = measure(timed, network, options.data, rounds=options.rounds)
            add_times(options.out, rate, found)
    except SparsetronError as error:
        print(f"step_times: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def timed_runs(
    study: DeclaredStudy, data: Path, entries: Iterable[str] | None = None
) -> list[TimedRuns]:
    """Return what is timed: entries, and the dense steps before those that begin later.

    Raises `ConfigError` for an entry against the rules, or one that cannot be timed.
    """
    chosen = list(study.groups if entries is None else entries)
    for name in chosen:
        if name not in study.groups:
            raise ConfigError(f"--entries {name}: must be one of {', '.join(study.groups)}")
    commands = Commands(study, Path("runs"), data)
    check_entries(study, commands)
    first = {run.group: run for run in reversed(study.runs)}
    found: dict[str, TimedRuns] = {}
    for name in chosen:
        entry, config = first[name], commands.config(first[name])
        if PERIOD % cycle_of(config):
            raise ConfigError(
                f"{study.path}: runs.{name}: its steps repeat after {cycle_of(config)}, which must "
                f"divide the {PERIOD} measured steps"
            )
        found[name] = _timed(study, entry, before=max(WARM_UP, cycle_of(config) + 1))
        if start_of(config):
            wire = wire_of(config)
            flags = {k: v for k, v in first[study.baseline].flags.items() if k != "grad-wire"}
            flags |= {} if wire == "fp32" else {"grad-wire": wire}
            dense = replace(first[study.baseline], group=before_name(wire), flags=flags)
            found[dense.group] = _timed(study, dense, before=WARM_UP)
    for each in found.values():  # before hours of measuring
        each.commands(Path("runs"), data, steps=each.before + PERIOD)
        each.commands(Path("runs"), data, steps=each.before)
    return list(found.values())


def before_name(wire: str) -> str:
    """Return the name of the dense steps before a path begins."""
    return f"before_{wire}"


def _timed(study: DeclaredStudy, entry: DeclaredRun, *, before: int) -> TimedRuns:
    """Let a path begin at once, since timing does not wait for it."""
    delays = [name for name in entry.flags if name.replace("-", "_").endswith(START)]
    entry = replace(entry, flags={**entry.flags, **dict.fromkeys(delays, 1)})
    return TimedRuns(name=entry.group, study=replace(study, runs=(entry,)), before=before)


def measure(
    timed: Sequence[TimedRuns], network: Network, data: Path, *, rounds: int
) -> list[StepTime]:
    """Measure the entries in turns."""
    load = round(os.getloadavg()[0], 1)
    seconds: dict[str, list[float]] = {each.name: [] for each in timed}
    sent: dict[str, tuple[float, float | None]] = {}
    for number in range(rounds):
        for each in timed:
            run, total = each.train(network, data, steps=each.before + PERIOD)
            seconds[each.name].append(statistics.fmean(run.steps["step_seconds"][each.before :]))
            if number == 0:  # bytes do not depend on the round
                reported = statistics.fmean(run.steps["bytes_sent"][each.before :])
                counted = None
                if total is not None:
                    _, earlier = each.train(network, data, steps=each.before)
                    assert earlier is not None, "the same network counts again"
                    counted = (total - earlier) / PERIOD
                sent[each.name] = reported, counted
            print(f"{network}: {each.name}: {1e3 * seconds[each.name][-1]:.0f} ms", flush=True)
    return [
        StepTime(
            entry=name,
            rounds=seconds[name],
            reported=sent[name][0],
            counted=sent[name][1],
            load=load,
        )
        for name in sent
    ]


# ---- the file ------------------------------------------------------------------------------


def read_times(path: Path) -> dict[str, dict[str, StepTime]]:
    """Return step times by rate and entry; none without a file.

    Raises `ConfigError` for a file of something else.
    """
    if not path.is_file():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        return {
            rate: {each["entry"]: StepTime(**each) for each in entries}
            for rate, entries in content.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: no file of step times: {error!r}") from None


def add_times(path: Path, rate: str, found: Sequence[StepTime]) -> None:
    """Add the times of one rate to the file, in place of earlier ones of the same entries."""
    times = read_times(path)
    times[rate] = times.get(rate, {}) | {each.entry: each for each in found}
    content = {rate: [asdict(each) for each in by.values()] for rate, by in times.items()}
    replace_text(path, json.dumps(content, indent=1) + "\n")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.track.step_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tier", type=Path, default=TIER, help="the study that declares the entries")
    add("--data", type=Path, default=Path("data"), help="its data")
    add("--entries", nargs="+", metavar="ENTRY", help="measure these alone")
    add("--rates", nargs="+", default=RATES, help=f"of each link; {NO_LIMIT}: the loopback")
    add("--rounds", type=int, default=3, help="runs of each entry, which take turns")
    add("--out", type=Path, default=FILE, help="the file of results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
