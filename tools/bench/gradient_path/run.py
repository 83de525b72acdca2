"""The cost of each gradient path on networks of several rates, beside torch's DDP.

    python -m tools.bench.gradient_path.run [--out FOLDER]   everything, 40 minutes; as root
    python -m tools.bench.gradient_path.run --quick          800 Mbit/s, two ranks, two rounds
    python -m tools.bench.gradient_path.run --rates none     the loopback alone, without root
    python -m tools.bench.gradient_path.run --set samo       a pruned network's rows, half an hour
    python -m tools.bench.gradient_path.run --set wire       values in 16, 8 and 4 bits
    python -m tools.bench.gradient_path.run --set samo-vision     those of pruned image networks
    python -m tools.bench.gradient_path.run --cost           what a sparse step costs at 124M; with
                                                             --set samo, a pruned network's
    python -m tools.bench.gradient_path.run --again FOLDER --rates 1gbit --worlds 2 --out FOLDER
                                                             one network of a report, once more

One process a rank takes a step of every method in turn, so that whatever else the machine does
falls on all alike. Two protocols: `emulated` computing sleeps (150 ms forward, 300 ms backward, 8
buckets, 11.47M parameters), so that ranks that share cores do not slow each other down; `real`
trains a GPT (6 layers, hidden 384, vocabulary 2048, 512 tokens a rank, one thread a rank). With
`--set samo-vision` both take VGG-19 and wide_resnet101, methods one after another: computing that
sleeps 0.5 + 1.0 s and 1.5 times as long, or 64 x 64 images. Writes README.md, results.json and
figure.png to FOLDER; `--cost` writes cost.md and cost.json. Exit code 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config import parse, resolve
from megatron.errors import ConfigError
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.common.methods import DEFAULT, SAMO, SAMO_VISION, WIRE, method, with_computing
from tools.bench.common.netlab import NO_LIMIT, Network, run, why_not
from tools.bench.gradient_path.report import as_markdown, memory_as_markdown, read, write
from tools.bench.gradient_path.rows import EMULATED, REAL, TARGET_RATE, GradientPathTable, table
from tools.bench.gradient_path.targets import targets
from tools.planner.replay.image_networks import NAMES

RANK = ("-m", "tools.bench.gradient_path.rank")
VISION = "samo-vision"
SETS = {"radius": DEFAULT, "samo": SAMO, "wire": WIRE, VISION: SAMO_VISION}
"""The methods of each set of rows."""
IMAGES = (1, 8)
"""Images of a rank's step, as the paper's GPUs have at most and at the fewest of them."""
WARM_UP = 1
INTERVAL = 4
"""Radius's T, such that one of the seven turns of a default run is a resample."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    # An interruption, also from a job system, must run the cleanup.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if options.cost and options.set == VISION:
            raise ConfigError(f"--cost: not measured of --set {VISION}; leave one of them out")
        if options.cost:
            from tools.bench.gradient_path.cost import STUDIES, measure_cost

            study = STUDIES[options.set]
            for dtype in options.dtype:
                _check_methods(study.methods[dtype])
            return measure_cost(
                study, options.dtype, rounds=options.rounds, out=options.out, smoke=options.smoke
            )
        return compare(options)
    except ConfigError as error:
        print(f"gradient_path: {error}", file=sys.stderr)
        return 2


def compare(options: argparse.Namespace) -> int:
    """Measure all methods on all networks, write the page, and return the exit code."""
    for name, least in (("rounds", 2), ("interval", 2), ("worlds", 2), ("images", 1)):
        value = getattr(options, name)
        smallest = min(value) if isinstance(value, list) else value
        if smallest < least:
            raise ConfigError(f"--{name} {smallest}: must be at least {least}")
    default = SETS[options.set]
    names = with_computing(options.methods or default)
    _check_methods(names)
    networks = _networks(options)
    tables: list[GradientPathTable] = []
    memory, facts = None, _facts()
    if options.again is not None:
        tables, memory, facts = read(options.again)
        if options.smoke:
            raise ConfigError("--again with --smoke: a tiny model belongs to no report; drop one")
        if any({row.method for row in table.rows} != set(names) for table in tables):
            raise ConfigError("--again: the report has other methods; give --methods all of them")
    order = {table.title: number for number, table in enumerate(tables)}
    began = time.monotonic()
    if options.memory and memory is None:
        memory = _memory(names, smoke=options.smoke)
    for network in networks:
        for protocol, settings in _kinds(options):
            found = measure(
                names,
                network,
                protocol,
                rounds=options.rounds,
                interval=options.interval,
                smoke=options.smoke,
                **settings,
            )
            if found.title in order:
                tables[order[found.title]] = found
                told = f"{found.title} at load {os.getloadavg()[0]:.1f}"
                facts["measured again"] = " | ".join(
                    filter(None, [facts.get("measured again"), told])
                )
            else:
                tables.append(found)
            print(as_markdown(found), flush=True)
            if options.again is None:
                facts["minutes"] = f"{(time.monotonic() - began) / 60:.1f}"
            if options.out is not None:  # after each table, so that no measurement is ever lost
                write(options.out, tables, memory, facts)
    print(memory_as_markdown(memory) if memory else "")
    reached = targets(tables)
    print("\n".join(map(str, reached)))
    return 1 if not all(target.met for target in reached) and not options.smoke else 0


def _networks(options: argparse.Namespace) -> list[Network]:
    """Return each number of ranks at each rate; the loopback only for the fewest ranks."""
    networks = [
        Network(ranks=ranks, rate=rate, delay="0ms" if rate == NO_LIMIT else options.delay)
        for ranks in options.worlds
        for rate in options.rates
        if rate != NO_LIMIT or ranks == min(options.worlds)
    ]
    for network in networks:
        check_network(network)
    return networks


def _kinds(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return each protocol, with settings of `measure`.

    For image networks these are each network and, under the real protocol, each batch.
    """
    if options.set != VISION:
        return [(protocol, {}) for protocol in options.protocols]
    return [
        (protocol, {"image_network": name, "images": count})
        for name in options.networks
        for protocol in options.protocols
        for count in (options.images if protocol == REAL else [0])
    ]


def check_network(network: Network) -> None:
    """Raise `ConfigError` for a network that is not available here."""
    if (reason := why_not(network)) is not None:
        raise ConfigError(f"--rates {network.rate}: {reason}; --rates none needs no netlab")


def measure(
    names: Sequence[str],
    network: Network,
    protocol: str,
    *,
    rounds: int,
    interval: int,
    smoke: bool = False,
    image_network: str | None = None,
    images: int = 0,
) -> GradientPathTable:
    """Measure these methods on one network, with a process for each rank, and return the table.

    `names` must contain the rows that send nothing. `image_network` is trained in place of the GPT,
    with `images` images on each rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "protocol": protocol,
            "methods": names,
            "rounds": rounds,
            # Contenders that are built one at a time are warm after their head start.
            "warm_up": 0 if image_network else WARM_UP,
            "interval": interval,
            "folder": folder,
            "interface": network.interface,
            "smoke": smoke,
            "network": image_network,
            "images": images,
        }
        command = network.command([*RANK, json.dumps(settings)], folder=Path(folder))
        if code := run(command):
            raise SystemExit(f"{network}: a rank failed with exit code {code}")
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    return table(result, network)


def _memory(names: Sequence[str], *, smoke: bool) -> dict[str, float]:
    from tools.bench.common.emulated import Emulation
    from tools.bench.gradient_path.contenders import SMOKE_EMULATION
    from tools.bench.gradient_path.memory import peak_memory

    return peak_memory(names, SMOKE_EMULATION if smoke else Emulation())


def _check_methods(names: Sequence[str]) -> None:
    """Raise `ConfigError` for an unknown method, or for flags that our trainer refuses."""
    least = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --mock-data"
    for name in names:
        flags = [*least.split(), "--micro-batch-size", "1", "--train-iters", "1000"]
        resolve(parse([*flags, "--lr", "1e-3", *method(name).flags], paths=GRADIENT_PATHS), 1)


def _facts() -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "torch": version("torch"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load at start": f"{os.getloadavg()[0]:.1f}",
    }


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.gradient_path.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--set", choices=list(SETS), default="radius", help="rows, targets of --cost, report's name"
    )
    add("--methods", nargs="+", help="other rows than the set's; see tools/bench/common/methods.py")
    add("--rounds", type=int, help=f"measured steps of each method (6; of {VISION} 3)")
    add("--interval", type=int, default=INTERVAL, help="Radius's T, which rolling rows flush by")
    add("--rates", nargs="+", help="of each link, as tc writes them; none: loopback")
    add("--delay", default="0ms", help="of each link, one way")
    add("--worlds", nargs="+", type=int, default=[2, 4], help="numbers of ranks")
    both = [EMULATED, REAL]
    add("--protocols", nargs="+", choices=both, default=both, help="kinds of computing")
    add("--networks", nargs="+", choices=NAMES, default=list(NAMES), help=f"of {VISION}")
    add("--images", nargs="+", type=int, default=list(IMAGES), help=f"of {VISION}: of a rank")
    add("--no-memory", dest="memory", action="store_false", help="leave out peak memory")
    add("--quick", action="store_true", help="two ranks at 800 Mbit/s, two rounds, no memory")
    add("--cost", action="store_true", help="a sparse step's own work at 124M parameters")
    add("--dtype", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"], help="of --cost")
    add("--out", type=Path, default=None, help="folder for the report")
    add("--again", type=Path, help="folder of a report whose other tables and memory are kept")
    add("--smoke", action="store_true", help="a tiny model: does the tool work?")
    options = parser.parse_args(arguments)
    limited = ["1gbit", TARGET_RATE, "200mbit"]
    options.rates = options.rates or (limited if options.set == VISION else [NO_LIMIT, *limited])
    if options.rounds is None:
        options.rounds = 3 if options.set == VISION else 6
    options.memory = options.memory and options.set != VISION  # tools.bench.samo_memory has it
    if options.quick:
        options.rates, options.worlds, options.rounds = [TARGET_RATE], [2], 2
        options.memory = False
    return options


if __name__ == "__main__":
    sys.exit(main())
