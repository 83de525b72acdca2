"""The cost and saving of states in host memory on CPUs, as ratios measured in one run.

    python -m tools.bench.offload.run [--only states|coarsening] [--out FOLDER]   some minutes
    python -m tools.bench.offload.run --smoke                                     a tiny model

`states`: training steps of GPT-2 small (124M parameters) in bf16 with states on the device and in
host memory, by turns: seconds of a step and of what follows its backward, and the bytes of the
tensors that are on the device. A CPU's device memory is its host memory, so of a GPU only the bytes
can be told here; what is timed is the copying there and back.

`coarsening`: two gloo ranks, gradients that are there at once, summed up in chunks of k buckets
while earlier ones are updated (Fig. 8 of the AxoNN paper): seconds from the first sum to the last
update, beside all sums first. Buckets and model are a quarter of the paper's bsize and of 124M, so
that there are as many buckets and all k fit into memory at once. `--rate`: over a network of that
rate instead of the loopback, which needs `netlab.sh`'s rights. Writes README.md and results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from megatron.optimizer.cpu_offload import OffloadedOptimizer
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tools.bench.common.contenders import Ours, Shape, quiet
from tools.bench.common.netlab import NO_LIMIT, Network, run
from tools.bench.common.page_files import write_page
from tools.bench.common.side_by_side import interleave, ratio_of
from tools.bench.common.tensors import bytes_of
from tools.bench.offload.rank import APART

RANK = ("-m", "tools.bench.offload.rank")
SMALL = Shape(layers=12, hidden=768, heads=12, sequence=256, vocabulary=50257, batch=1)
SMOKE = Shape(layers=1, hidden=64, heads=2, sequence=32, vocabulary=128, batch=2)
RESIDENT, OFFLOADED = "on the device", "in host memory"
BUCKET_SIZE, COARSENING = 4_000_000, 4


@dataclass(frozen=True, kw_only=True)
class States:
    """A step with states in one place: median seconds of the step, and of its part after backward.

    `device` and `host` are bytes on the device and in host memory. `buffers` are those bytes on the
    device that are neither parameters nor gradients.
    """

    name: str
    step: float
    update: float
    device: int
    buffers: int
    host: int


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """A number of buckets per all-reduce, or `APART`.

    `seconds` is a median, and `ratio` the median over rounds of the speed divided by `APART`'s.
    """

    k: str
    seconds: float
    ratio: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    report: dict[str, Any] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    lines = [
        f"{report['cores']} cores, load {report['load']} at the start; bf16, AdamW.",
    ]
    if options.only in (None, "states"):
        rows, ratios = states(SMOKE if options.smoke else SMALL, options)
        report["states"] = {"rows": [asdict(row) for row in rows], "ratios": ratios}
        lines += ["", *_states_table(rows, ratios)]
    if options.only in (None, "coarsening"):
        chunks = coarsening(options)
        report["coarsening"] = [asdict(row) for row in chunks]
        lines += ["", *_chunks_table(chunks, options.rate)]
    text = "\n".join(lines) + "\n"
    print(text)
    write_page(options.out, text=text, values=report)
    return 0


# ---- one process: states on the device and in host memory ----------------------------------------


class WatchedMemory(Ours):
    """Our trainer, with a stopwatch on the part after backward: means, norm, optimizer."""

    def __init__(self, flags: Sequence[str], groups: ProcessGroups, run_dir: Path, name: str):
        super().__init__(flags, groups, run_dir, name=name)
        self.updates: list[float] = []
        self._took = 0.0
        for owner, verb in (
            (self.trainer.engine, "finish"),
            (self.trainer.optimizer, "step"),
            (self.trainer.engine, "commit"),
        ):
            setattr(owner, verb, self._timed(getattr(owner, verb)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._took += perf_counter() - began

        return timed

    def step(self) -> float:
        self._took = 0.0
        loss = super().step()
        self.updates.append(self._took)
        return loss

    def bytes(self) -> tuple[int, int, int]:
        """Return the bytes on the device, of its other tensors, and in host memory.

        Other tensors are neither parameters nor gradients.
        """
        optimizer, engine = self.trainer.optimizer, self.trainer.engine
        leaves = [leaf for info in engine.infos.values() for leaf in info.leaves]
        model = sum(bytes_of([*leaves, *(bucket.grad for bucket in engine.buckets)]).values())
        if isinstance(optimizer, OffloadedOptimizer):
            return model + optimizer.device_bytes, optimizer.device_bytes, optimizer.host_bytes
        flats = [t for s in optimizer.states for t in (s.master, *s.moments)]
        own = sum(bytes_of([*flats, optimizer._scratch]).values())
        return model + own, own, 0


def states(shape: Shape, options: argparse.Namespace) -> tuple[list[States], dict[str, float]]:
    """Measure steps with states on the device and in host memory.

    Returns rows and ratios: of the seconds of a step and an update in host memory to those on the
    device, and of the bytes on the device, resident to offloaded.
    """
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    size = 1024 if options.smoke else BUCKET_SIZE
    extra = {
        RESIDENT: ["--ddp-bucket-size", str(COARSENING * size)],
        OFFLOADED: ["--optimizer-cpu-offload", "--offload-bucket-size", str(size)],
    }
    with tempfile.TemporaryDirectory() as folder, quiet(Path(folder) / "console"):
        contenders = [
            WatchedMemory(
                shape.flags(dtype="bf16", extra=["--grad-reduce-in-bf16", *more]),
                groups,
                Path(folder) / name.replace(" ", "-"),
                name,
            )
            for name, more in extra.items()
        ]
        timings, seconds = interleave(
            contenders, rounds=options.rounds, warm_up=1, tokens=shape.batch * shape.sequence
        )
        for one in contenders:
            one.metrics.close()
    first, second = timings
    assert first.last_loss == second.last_loss, "both make the same bits"
    rows = []
    for one, timing in zip(contenders, timings, strict=True):
        device, buffers, host = one.bytes()
        rows.append(
            States(
                name=one.name,
                step=timing.median_seconds,
                update=median(one.updates[1:]),
                device=device,
                buffers=buffers,
                host=host,
            )
        )
    updates = {one.name: one.updates[1:] for one in contenders}
    return rows, {
        "step": ratio_of(seconds, RESIDENT, OFFLOADED).ratio,
        "update": ratio_of(updates, RESIDENT, OFFLOADED).ratio,
        "device bytes": rows[0].device / rows[1].device,
    }


def _states_table(rows: Sequence[States], ratios: dict[str, float]) -> list[str]:
    lines = [
        "| states | step, ms | after backward, ms | on the device, MB | of which buffers, states | "
        "in host memory, MB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        sizes = " | ".join(f"{x / 1e6:.1f}" for x in (row.device, row.buffers, row.host))
        lines.append(f"| {row.name} | {1e3 * row.step:.1f} | {1e3 * row.update:.1f} | {sizes} |")
    told = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    return [
        *lines,
        "",
        f"In host memory over on the device, medians of the rounds: step and update; on the device "
        f"over in host memory: bytes. {told}.",
    ]


# ---- two ranks: chunks of k buckets -------------------------------------------------------------


def coarsening(options: argparse.Namespace) -> list[Chunks]:
    """Time sums and updates of two ranks for each k, and with all sums first."""
    side, matrices = (64, 16) if options.smoke else (512, 120)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "coarsening": options.coarsening,
            "rounds": options.rounds,
            "side": side,
            "matrices": matrices,
            "bucket_size": 4 * side * side,
            "folder": folder,
        }
        network = Network(ranks=2, rate=options.rate)
        program = [*RANK, json.dumps(settings)]
        if code := run(network.command(program, folder=Path(folder))):
            raise SystemExit(f"a rank failed with exit code {code}")
        found = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    return [
        Chunks(k=k, seconds=median(took), ratio=ratio_of(found, k, APART).ratio)
        for k, took in found.items()
    ]


def _chunks_table(rows: Sequence[Chunks], rate: str) -> list[str]:
    lines = [
        f"Two gloo ranks, rate limit {rate}; speed over all sums first (in chunks of 4 buckets).",
        "",
        "| k | sums and updates, ms | speed |",
        "|---|---:|---:|",
    ]
    return [*lines, *(f"| {row.k} | {1e3 * row.seconds:.1f} | {row.ratio:.3f} |" for row in rows)]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.offload.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", choices=["states", "coarsening"], help="what to measure (default: both)")
    add("--coarsening", nargs="+", type=int, default=[1, 2, 4, 8], help="buckets of a sum")
    add("--rounds", type=int, default=9, help="measured steps of each")
    add("--rate", default=NO_LIMIT, help="of the ranks' network, as tc writes it")
    add("--out", type=Path, default=None, help="folder for the report")
    add("--smoke", action="store_true", help="a tiny model")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
