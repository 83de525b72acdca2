"""1F1B beside message-driven pipelines: whether they train alike, and how long ranks wait.

    python -m tools.bench.message_driven.run [--out FOLDER]      as root for slow links; 12 minutes
    python -m tools.bench.message_driven.run --rates none        without them
    python -m tools.bench.message_driven.run --smoke             does the tool work?
    python -m tools.bench.message_driven.run --redraw FOLDER     page and picture from its JSON

Ranks under mpiexec, one a stage, run every contender in turn, round by round: 1F1B over gloo as
runs without MPI have it, the same fixed order over MPI, so that transport and schedule are told
apart, also with a pause after each call of MPI, and message-driven at two limits. First a small GPT
trains under both schedules. Then layers are emulated (`tools/bench/pipeline`): passes that sleep,
alike on all stages, longer on one, or by a random factor that is the same for all contenders and on
paper. At a rate ranks are in network namespaces (`netlab.sh`), with messages of LINK_SHAPE. Writes
README.md, results.json and figure.png to FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.errors import SparsetronError
from tools.bench.common.netlab import NO_LIMIT, Network, run, why_not
from tools.bench.common.page_files import read_results, write_page
from tools.bench.message_driven.page import as_markdown
from tools.bench.message_driven.plot import panels_of, write_plot
from tools.bench.message_driven.rows import EmulationRow, rows_of
from tools.bench.message_driven.uneven_stage import PROFILES
from tools.bench.pipeline.run import BACKWARD, FORWARD, SHAPE

RANK = ("-m", "tools.bench.message_driven.rank")
LINK_SHAPE = (1, 128, 768)
"""Shape of an activation on slow links: it takes 16 ms at 200 Mbit/s, less than a pass.

Longer messages would keep links busy all the time, under any schedule.
"""
_SCALE = {False: 1.0, True: 0.05}
"""Factor of the length of the passes, by whether `--smoke` is given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        if options.redraw is not None:
            _write(read_results(options.redraw), options.redraw)
        else:
            _write(_measured(options), options.out)
    except SparsetronError as error:
        print(f"message_driven: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that the page shows."""
    found: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "passes": [_SCALE[options.smoke] * seconds for seconds in (FORWARD, BACKWARD)],
        "equality": {},
        "rows": [],
        "panels": {},
        "left_out": [],
    }
    loopback = [Network(ranks=stages) for stages in options.stages]
    links = [
        Network(ranks=max(options.stages), rate=rate, delay=options.delay)
        for rate in options.rates
        if rate != NO_LIMIT
    ]
    for network in [*loopback, *links]:
        if (reason := why_not(network)) is not None:
            print(f"left out: {network}: {reason}", flush=True)
            found["left_out"].append(f"{network}: {reason}")
            continue
        emulation = _emulation(network, options)
        result = _run(network, emulation, options)
        rows = rows_of(network, emulation, result["steps"])
        found["rows"] += rows
        if result["equality"] is not None:
            found["equality"][str(network.ranks)] = result["equality"]
        if network is loopback[-1]:
            found["panels"] = panels_of(result["steps"], min(options.microbatches))
        print(f"{network}: {len(rows)} rows", flush=True)
    return found


def _emulation(network: Network, options: argparse.Namespace) -> EmulationRow:
    on_links = network.rate != NO_LIMIT
    scale = _SCALE[options.smoke]
    return EmulationRow(
        forward=FORWARD * scale,
        backward=BACKWARD * scale,
        shape=(1, 8, 8) if options.smoke else LINK_SHAPE if on_links else SHAPE,
        profiles=PROFILES,
        microbatches=[max(options.microbatches)] if on_links else options.microbatches,
        rounds=options.rounds,
    )


def _run(network: Network, emulation: EmulationRow, options: argparse.Namespace) -> dict[str, Any]:
    """Run the emulation on the network, and return the results that rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        steps = options.steps if network.rate == NO_LIMIT else 0
        settings = {**vars(emulation), "steps": steps, "folder": folder}
        command = network.mpi_command([*RANK, json.dumps(settings)], folder=Path(folder))
        if code := run(command):
            raise SystemExit(f"{network}: a rank failed with exit code {code}")
        return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


def _write(found: dict[str, Any], folder: Path | None) -> None:
    def draw(path: Path) -> bool:
        return write_plot(path, found["panels"])

    print(text := as_markdown(found))
    write_page(folder, text=text, values=found, draw=draw, indent=None)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.message_driven.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--stages", nargs="+", type=int, default=[2, 4], help="numbers of stages; links: the most")
    add("--microbatches", nargs="+", type=int, default=[8, 16], help="of a step; links: the most")
    add("--rounds", type=int, default=5, help="measured steps of each")
    add("--steps", type=int, default=20, help="that a GPT trains under both schedules; 0: none")
    add("--rates", nargs="+", default=["1gbit", "200mbit"], help="of links, as tc writes them")
    add("--delay", default="0ms", help="of a link, one way, where the kernel can (sch_netem)")
    add("--out", type=Path, default=None, help="folder for the report")
    add("--redraw", type=Path, default=None, metavar="FOLDER", help="from the JSON that is there")
    add("--smoke", action="store_true", help="short sleeps, two stages, no links")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.stages, options.microbatches, options.rates = [2], [4], [NO_LIMIT]
        options.rounds, options.steps = 1, 2
    return options


if __name__ == "__main__":
    sys.exit(main())
