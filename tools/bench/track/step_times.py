"""Step times and bytes of the entries of a tier, on emulated networks.

    python -m tools.bench.track.step_times --data DATA     as root, on an idle machine

Every entry is `pretrain_gpt.py` with the model and batch of the tier on four ranks, each in a
network namespace of its own whose link has the given rate. Entries take turns, so that other load
on the machine falls on all of them. A rank's interface counts the bytes of a step, as the
difference of a long run and a short one. Writes step_times.json, of which
`tools.bench.track.leaderboard` makes the times of whole runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.errors import ConfigError, SparsetronError
from megatron.report.runs import RunData, read_run
from megatron.status import replace_text
from tools.bench.common.netlab import NO_LIMIT, Network, run
from tools.bench.gradient_path.run import check_network
from tools.bench.nodes.run import sent_by_a_node
from tools.studies.commands import Commands
from tools.studies.declaration import DeclaredRun, DeclaredStudy, read_study

REPO = Path(__file__).resolve().parents[3]
TIER = Path(__file__).with_name("tier_s.yaml")
FILE = Path(__file__).with_name("step_times.json")
RATES = (NO_LIMIT, "1gbit", "200mbit", "50mbit")
WARM_UP, PERIOD = 2, 20
"""Steps before the measured ones, and measured steps: a whole interval of every entry."""
START = "-start-iter"
"""End of the flags that delay a path, which timing does not wait for."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """An entry on one network: median seconds of a step, and the bytes that a rank sends in it.

    `reported` is what the run says, `counted` what the interface counts, None on the loopback,
    which ranks share.
    """

    entry: str
    seconds: float
    reported: float
    counted: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        if options.rounds < 1:
            raise ConfigError(f"--rounds {options.rounds}: must be at least 1")
        study = read_study(options.tier)
        entries = {run.group: run for run in reversed(study.runs)}
        for name in options.entries or ():
            if name not in entries:
                raise ConfigError(f"--entries {name}: must be one of {', '.join(study.groups)}")
        chosen = [entries[name] for name in options.entries or study.groups]
        networks = {rate: Network(ranks=chosen[0].ranks, rate=rate) for rate in options.rates}
        for network in networks.values():
            check_network(network)
        load = f"{os.getloadavg()[0]:.1f}"
        found = {
            rate: [
                asdict(each)
                for each in measure(study, chosen, network, options.data, rounds=options.rounds)
            ]
            for rate, network in networks.items()
        }
    except SparsetronError as error:
        print(f"step_times: {error}", file=sys.stderr)
        return error.exit_code
    replace_text(
        options.out, json.dumps({"load at start": load, "networks": found}, indent=1) + "\n"
    )
    return 0


def measure(
    study: DeclaredStudy,
    entries: Sequence[DeclaredRun],
    network: Network,
    data: Path,
    *,
    rounds: int,
) -> list[StepTime]:
    """Measure the entries in turns."""
    seconds: dict[str, list[float]] = {entry.group: [] for entry in entries}
    reported: dict[str, float] = {}
    counted: dict[str, float | None] = {}
    for number in range(rounds):
        for entry in entries:
            name, before = entry.group, warm_up(entry)
            found, sent = train(study, entry, network, data, steps=before + PERIOD)
            seconds[name] += found.steps["step_seconds"][before:]
            if number == 0:  # bytes do not depend on the round
                reported[name] = statistics.fmean(found.steps["bytes_sent"][before:])
                _, earlier = train(study, entry, network, data, steps=before)
                counted[name] = None
                if sent is not None and earlier is not None:
                    counted[name] = (sent - earlier) / PERIOD
            median = 1e3 * statistics.median(seconds[name])
            print(f"{network}: {name}: {median:.0f} ms", flush=True)
    return [
        StepTime(
            entry=entry.group,
            seconds=statistics.median(seconds[entry.group]),
            reported=reported[entry.group],
            counted=counted[entry.group],
        )
        for entry in entries
    ]


def warm_up(entry: DeclaredRun) -> int:
    """Return the steps before the measured ones; Radius draws its first index in the last."""
    return entry.flags.get("radius-interval", WARM_UP) + 1  # type: ignore[operator]


def train(
    study: DeclaredStudy, entry: DeclaredRun, network: Network, data: Path, *, steps: int
) -> tuple[RunData, float | None]:
    """Train an entry for `steps` steps; return its run, and the bytes that a rank sent in all."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "network"
        flags = {**entry.flags, "train-iters": steps, "eval-iters": 0, "log-interval": 1}
        flags |= {name: WARM_UP for name in flags if name.endswith(START)}
        short = replace(entry, fork=None, flags=flags, tokens=None)
        commands = Commands(replace(study, runs=(short,)), Path(folder), data)
        command = [str(REPO / "pretrain_gpt.py"), *commands.flags(short)]
        if code := run(network.command(command, folder=out)):
            raise ConfigError(f"{entry.group} on {network}: a rank failed with exit code {code}")
        counters = out / "counters.json"
        sent = None
        if counters.is_file():
            sent = sent_by_a_node(json.loads(counters.read_text(encoding="utf-8")))
        return read_run(commands.folder(short)), sent


def start_of(entry: DeclaredRun) -> int:
    """Return the steps before the path of an entry begins."""
    starts = [value for name, value in entry.flags.items() if name.endswith(START)]
    return max((value for value in starts if isinstance(value, int)), default=0)


def read_times(path: Path) -> Mapping[str, Mapping[str, StepTime]]:
    """Return step times by rate and entry; none without a file."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))["networks"]
    return {
        rate: {each["entry"]: StepTime(**each) for each in entries}
        for rate, entries in content.items()
    }


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
