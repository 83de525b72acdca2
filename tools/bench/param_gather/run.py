"""What does gathering parameters during the next forward pass save?

    python -m tools.bench.param_gather.run --out tools/bench/param_gather    as root; five minutes

Two ranks, each in a network namespace behind a link of the given rate, train the same model with
ZeRO-1, without and with `--overlap-param-gather`. Both take turns in blocks of steps of one process
a rank, and end with the same losses. Writes README.md and results.json.
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
from tools.bench.common.netlab import Network, result_of
from tools.bench.common.page_files import write_page
from tools.bench.gradient_path.run import check_network

RANKS = 2
RATES = ("1gbit", "200mbit")
FLAGS = (
    *("--num-layers", "6", "--hidden-size", "256", "--num-attention-heads", "4"),
    *("--seq-length", "128", "--vocab-size", "4096", "--mock-data", "--micro-batch-size", "4"),
    *("--global-batch-size", "8", "--train-iters", "1000", "--lr", "1e-3", "--eval-iters", "0"),
    *("--check-weight-hash-across-dp-replicas-interval", "none", "--log-interval", "1000"),
    *("--use-distributed-optimizer", "--ddp-bucket-size", "1000000"),
)
"""A GPT with 5.8 million parameters in eight buckets; fp32, which is fast on any CPU."""
PLAIN, OVERLAPPED = "after the update", "during the next forward"
ROWS: Mapping[str, tuple[str, ...]] = {
    PLAIN: FLAGS,
    OVERLAPPED: (*FLAGS, "--overlap-param-gather"),
}
Blocks = Mapping[str, Sequence[Mapping[str, float]]]
"""The milliseconds of each block by column, for each row."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        for flag in ("steps", "blocks"):
            if getattr(options, flag) < 1:
                raise ConfigError(f"--{flag} {getattr(options, flag)}: must be at least 1")
        networks = [Network(ranks=RANKS, rate=rate) for rate in options.rates]
        for network in networks:
            check_network(network)
        load = f"{os.getloadavg()[0]:.1f}"
        found = {
            str(network): measure(network, steps=options.steps, blocks=options.blocks)
            for network in networks
        }
    except SparsetronError as error:
        print(f"param_gather: {error}", file=sys.stderr)
        return error.exit_code
    print(text := as_markdown(found, load=load))
    write_page(options.out, text=text, values={"load at start": load, "networks": found})
    return 0


def measure(network: Network, *, steps: int, blocks: int) -> Blocks:
    """Return the blocks of rank 0 on a network."""
    settings = {"rows": ROWS, "steps": steps, "blocks": blocks}
    return result_of(network, ("-m", "tools.bench.param_gather.rank"), settings)


def as_markdown(found: Mapping[str, Blocks], *, load: str) -> str:
    """Return the page; `load` is the machine's at the start."""
    note = (
        "Milliseconds of a step of rank 0, medians of the blocks' means. Gradients: what the step "
        "waits for after backward, with the norm. Gather: waiting for updated values and writing "
        "them to the parameters, where the program does so; forward is without it. Ratio: median "
        "over the blocks of the step over that of the row without overlap, in the same turn. Both "
        f"ranks share the cores of one machine, whose load was {load} at the start."
    )
    lines = [*textwrap.wrap(note, width=100), ""]
    for network, blocks in found.items():
        columns = list(blocks[PLAIN][0])
        lines += [f"## {network}", ""]
        lines += [f"| parameters are gathered | {' | '.join(columns)} | ratio |"]
        lines += [f"|---|{'---:|' * len(columns)}---:|"]
        for name, each in blocks.items():
            cells = [f"{statistics.median(one[column] for one in each):.0f}" for column in columns]
            ratio = statistics.median(
                mine["step"] / plain["step"]
                for mine, plain in zip(each, blocks[PLAIN], strict=True)
            )
            lines.append(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |")
        lines.append("")
    return "\n".join(lines)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.param_gather.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rates", nargs="+", default=RATES, help="of the link of each rank, as tc writes them")
    add("--blocks", type=int, default=6, help="measured blocks of each row, which take turns")
    add("--steps", type=int, default=4, help="measured steps of a block, after one that is not")
    add("--out", type=Path, metavar="FOLDER", help="where README.md and results.json go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
