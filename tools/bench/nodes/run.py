"""What does averaging within a node first save between nodes?

    python -m tools.bench.nodes.run --out tools/bench/nodes      as root; ten minutes

Four ranks on two nodes, each of which is a network namespace: ranks of a node reach each other
through its loopback, those of two nodes through links of the given rate. Every row is
`pretrain_gpt.py` with its flags; `nodes` in a name is `--dp-inner-size 2`. The bytes that a node
sends in a step are counted by its interface, as the difference of a long and a short run. Writes
README.md and results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.errors import ConfigError, SparsetronError
from megatron.report.runs import RunData, read_run
from tools.bench.common.netlab import NO_LIMIT, InterfaceCounters, Network, run
from tools.bench.common.page_files import write_page
from tools.bench.gradient_path.run import check_network

REPO = Path(__file__).resolve().parents[3]
RANKS, NODE_RANKS = 4, 2
RATES = ("800mbit", "200mbit")
STEPS = 20
"""Steps that are measured: those of a long run beyond a short one."""
FLAGS = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"),
    *("--seq-length", "128", "--vocab-size", "8192", "--mock-data", "--micro-batch-size", "1"),
    *("--global-batch-size", "4", "--lr", "1e-3", "--eval-iters", "0", "--log-interval", "1"),
    *("--bf16", "--check-weight-hash-across-dp-replicas-interval", "none"),
)
"""The model of tools/bench/loss_by_bytes, whose steps do not depend on its text."""
NODES = ("--dp-inner-size", str(NODE_RANKS))
SIXTEEN = ("--grad-reduce-in-bf16",)
INTERVAL = 30
RADIUS = (
    *("--grad-path", "radius", "--radius-density", "0.4"),
    *("--radius-start-iter", "1", "--radius-interval", str(INTERVAL)),
)
SAMO = ("--grad-path", "samo", "--samo-sparsity", "0.9", "--samo-pruning", "random")
ROWS: Mapping[str, tuple[str, ...]] = {
    "dense-bf16": SIXTEEN,
    "dense-bf16-nodes": (*SIXTEEN, *NODES),
    "dense-int4": ("--grad-wire", "int4"),
    "radius-0.4-bf16": (*RADIUS, *SIXTEEN),
    "radius-0.4-bf16-nodes": (*RADIUS, *SIXTEEN, *NODES),
    "samo-0.9-bf16": (*SAMO, *SIXTEEN),
    "samo-0.9-bf16-nodes": (*SAMO, *SIXTEEN, *NODES),
    "powersgd-4": ("--grad-path", "powersgd", "--powersgd-rank", "4"),
}
DENSE = "dense-bf16"


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """A row on one network: median seconds of a step, and what is sent in it.

    `reported` are the bytes that a rank reports to have sent to all ranks, `counted` those that the
    interface of a node has sent, mean of the nodes.
    """

    name: str
    seconds: float
    reported: float
    counted: float

    @property
    def flat(self) -> str:
        """Name of the row that does not average within a node first."""
        return self.name.removesuffix("-nodes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        for flag in ("steps", "rounds"):
            if getattr(options, flag) < 1:
                raise ConfigError(f"--{flag} {getattr(options, flag)}: must be at least 1")
        if NO_LIMIT in options.rates:
            raise ConfigError(f"--rates {NO_LIMIT}: nodes need links between them; give a rate")
        networks = [
            Network(ranks=RANKS, rate=rate, node_ranks=NODE_RANKS) for rate in options.rates
        ]
        for network in networks:
            check_network(network)
        load = f"{os.getloadavg()[0]:.1f}"
        found = {
            str(network): measure(options.rows, network, steps=options.steps, rounds=options.rounds)
            for network in networks
        }
    except SparsetronError as error:
        print(f"nodes: {error}", file=sys.stderr)
        return error.exit_code
    print(text := as_markdown(found, load=load))
    values = {network: [asdict(row) for row in rows] for network, rows in found.items()}
    write_page(options.out, text=text, values={"load at start": load, "networks": values})
    return 0


def measure(names: Sequence[str], network: Network, *, steps: int, rounds: int) -> list[NodeRow]:
    """Measure rows in turns, so that other load on the machine falls on all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    reported: dict[str, float] = {}
    counted: dict[str, float] = {}
    for number in range(rounds):
        for name in names:
            before = steps_before(name)
            found, sent = train(name, network, before + steps)
            seconds[name] += found.steps["step_seconds"][before:]
            if number == 0:  # bytes do not depend on the round
                _, sent_before = train(name, network, before)
                reported[name] = statistics.fmean(found.steps["bytes_sent"][before:])
                counted[name] = (sent - sent_before) / steps
            print(f"{network}: {name}: {1e3 * statistics.median(seconds[name]):.0f} ms", flush=True)
    return [
        NodeRow(
            name=name,
            seconds=statistics.median(seconds[name]),
            reported=reported[name],
            counted=counted[name],
        )
        for name in names
    ]


def steps_before(name: str) -> int:
    """Return the steps before the measured ones; Radius draws its first index in the last."""
    return INTERVAL + 1 if "radius" in name else 6


def train(name: str, network: Network, steps: int) -> tuple[RunData, float]:
    """Train a row for `steps` steps; return its run, and the bytes that a node sent in all."""
    with tempfile.TemporaryDirectory() as folder:
        out, run_dir = Path(folder) / "network", Path(folder) / "run"
        flags = [*FLAGS, *ROWS[name], "--train-iters", str(steps), "--run-dir", str(run_dir)]
        command = network.command([str(REPO / "pretrain_gpt.py"), *flags], folder=out)
        if code := run(command):
            raise ConfigError(f"{name} on {network}: a rank failed with exit code {code}")
        counters = json.loads((out / "counters.json").read_text(encoding="utf-8"))
        return read_run(run_dir), sent_by_a_node(counters)


def sent_by_a_node(counters: Mapping[str, Sequence[Mapping[str, int]]]) -> float:
    """Return the payload that netlab.sh counted, mean of the nodes, in bytes."""

    def wires(when: str) -> list[InterfaceCounters]:
        return [InterfaceCounters(each["bytes"], each["packets"]) for each in counters[when]]

    pairs = zip(wires("after"), wires("before"), strict=True)
    return statistics.fmean(after.payload_since(before) for after, before in pairs)


def expected(row: NodeRow, rows: Sequence[NodeRow]) -> float | None:
    """Return the bytes that a node should send in a step; None for a path that is no all-reduce.

    Along the ring of all ranks one rank of each node sends to another node, what it reports. After
    the mean within a node, a ring of the nodes averages the shards of its ranks: 2 (m - 1) / m of
    the vector, with m nodes.
    """
    flat = next((other for other in rows if other.name == row.flat), None)
    if flat is None or row.flat in ("dense-int4", "powersgd-4"):
        return None
    if flat is row:
        return row.reported
    nodes = RANKS // NODE_RANKS
    vector = flat.reported / (2 * (RANKS - 1) / RANKS)
    return 2 * (nodes - 1) / nodes * vector


def as_markdown(found: Mapping[str, Sequence[NodeRow]], *, load: str) -> str:
    """Return the page; `load` is the machine's at the start."""
    note = (
        "Step: median over all rounds of the steps after the first ones, of the program itself; "
        f"all ranks share the cores of one machine, whose load was {load} at the start. MB sent: "
        "by the interface of a node in a step, mean of both nodes. Expected: along a ring of all "
        "ranks what one rank sends, after the mean within a node 2 (m - 1) / m of the vector for m "
        "nodes. / dense-bf16: over the step of the first row."
    )
    lines = [*textwrap.wrap(note, width=100), ""]
    for network, rows in found.items():
        dense = next((row.seconds for row in rows if row.name == DENSE), None)
        lines += [f"## {network}", ""]
        lines += ["| row | step, ms | / dense-bf16 | MB sent | expected | counted / expected |"]
        lines += ["|---|---:|---:|---:|---:|---:|"]
        for row in rows:
            wanted = expected(row, rows)
            cells = [
                f"{1e3 * row.seconds:.0f}",
                "" if dense is None else f"{row.seconds / dense:.2f}",
                f"{row.counted / 1e6:.2f}",
                "" if wanted is None else f"{wanted / 1e6:.2f}",
                "" if wanted is None else f"{row.counted / wanted:.3f}",
            ]
            lines.append(f"| {row.name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.nodes.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rates", nargs="+", default=RATES, help="of the link of each node, as tc writes them")
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="rows to measure")
    add("--rounds", type=int, default=3, help="runs of each row, which take turns")
    add("--steps", type=int, default=STEPS, help="measured steps of each row")
    add("--out", type=Path, default=None, help="folder for the page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
