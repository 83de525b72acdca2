"""All-gathers and all-to-alls over gloo: messages between all ranks, and gloo's collectives.

    python -m tools.bench.exchange.run --out tools/bench/exchange     as root; two minutes
    python -m tools.bench.exchange.run --rates none                   on the loopback alone

Two and four ranks, each in a network namespace behind a link of the given rate, exchange fp32 rows.
The ways take turns. Writes README.md and results.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.errors import ConfigError, SparsetronError
from tools.bench.common.netlab import NO_LIMIT, Network, result_of
from tools.bench.common.page_files import table, write_page
from tools.bench.exchange.rank import BROADCASTS, GATHER, GLOO_GATHER, GLOO_TO_ALL, TO_ALL
from tools.bench.gradient_path.run import check_network

WORLDS = (2, 4)
ROWS = {NO_LIMIT: 2_000_000, "1gbit": 1_000_000, "200mbit": 200_000, "50mbit": 50_000}
"""fp32 values that a rank sends to each other rank, by rate."""
PEERS = {BROADCASTS: GATHER, GLOO_GATHER: GATHER, GLOO_TO_ALL: TO_ALL}
"""What each way is compared with."""
Seconds = Mapping[str, Sequence[float]]
"""Seconds of each round, by way."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        if options.rounds < 1:
            raise ConfigError(f"--rounds {options.rounds}: must be at least 1")
        for rate in options.rates:
            if rate not in ROWS:
                raise ConfigError(f"--rates {rate}: must be one of {', '.join(ROWS)}")
        networks = [Network(ranks=n, rate=rate) for rate in options.rates for n in WORLDS]
        for network in networks:
            check_network(network)
        load = f"{os.getloadavg()[0]:.1f}"
        found = {str(network): measure(network, rounds=options.rounds) for network in networks}
    except SparsetronError as error:
        print(f"exchange: {error}", file=sys.stderr)
        return error.exit_code
    print(text := as_markdown(found, load=load))
    write_page(options.out, text=text, values={"load at start": load, "networks": found})
    return 0


def measure(network: Network, *, rounds: int) -> Seconds:
    """Return the seconds of rank 0 on a network."""
    settings = {"row": ROWS[network.rate], "rounds": rounds}
    return result_of(network, ("-m", "tools.bench.exchange.rank"), settings)


def as_markdown(found: Mapping[str, Seconds], *, load: str) -> str:
    """Return the page; `load` is the machine's at the start."""
    note = (
        "Milliseconds until the slowest rank has all rows, medians of rounds in which the ways "
        "take turns. Ratio: median over the rounds of a way's time over that of messages between "
        "all ranks, which the columns all-gather and all-to-all have. All ranks share the cores of "
        f"one machine, whose load was {load} at the start."
    )
    names = (GATHER, BROADCASTS, GLOO_GATHER, TO_ALL, GLOO_TO_ALL)
    heads = ["network", *(f"{name}{', ratio' if name in PEERS else ', ms'}" for name in names)]
    lines = [
        [network, *(_cell(name, seconds) for name in names)] for network, seconds in found.items()
    ]
    return "\n".join([*textwrap.wrap(note, width=100), "", *table(heads, lines), ""])


def _cell(name: str, seconds: Seconds) -> str:
    if name not in PEERS:
        return f"{1e3 * statistics.median(seconds[name]):.1f}"
    pairs = zip(seconds[name], seconds[PEERS[name]], strict=True)
    return f"{statistics.median(mine / peer for mine, peer in pairs):.2f}"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.exchange.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rates", nargs="+", default=tuple(ROWS), help="of the link of each rank")
    add("--rounds", type=int, default=15, help="measured rounds")
    add("--out", type=Path, metavar="FOLDER", help="where README.md and results.json go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
