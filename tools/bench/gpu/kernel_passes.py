"""Passes over all matrices of a model, compared with plain torch, for the GPU kernel benches.

A pass's minimum of bytes, divided by its time, is compared with the rate of a plain copy of the
same buckets; the target is 75 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

AIM = 0.75
VOCABULARY, BUCKET = 50304, 40_000_000
"""Entries of a bucket: about as many as a reduction needs to be busy."""
MODELS = {"355m": (24, 1024), "2b": (24, 2560)}
SECTOR = 32
"""Smallest transaction of a GPU's memory, in bytes."""
BITS = 1 / 8
"""Bytes of a bitmap per entry."""


@dataclass(frozen=True)
class KernelPass:
    """An operation on every bucket.

    `bytes_for_entry(density)` is the minimum of bytes read and written per entry of the bucket, in
    whole sectors if only some entries are needed. `theirs` does the same as described by `peer`.
    If `together`, `ours` takes a list of buckets, as training calls it.
    """

    name: str
    bytes_for_entry: Callable[[float], float]
    ours: Callable[[Any], None]
    peer: str
    theirs: Callable[[Any], None]
    together: bool = False

    def run(self, buckets: Sequence[Any]) -> None:
        """Do ours on every bucket."""
        if self.together:
            self.ours(buckets)
        else:
            _each(self.ours, buckets)


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """Passes and their data.

    `states(length, device)` makes the tensors of a bucket that do not depend on the density,
    `bucket(states, density, peers=...)` the others. `copy(states)` copies one tensor as long as the
    bucket, with `copied_bytes` per entry read and written. Result files are called `name`.
    """

    name: str
    what: str
    passes: Sequence[KernelPass]
    densities: Sequence[float]
    states: Callable[[int, torch.device], Any]
    bucket: Callable[..., Any]
    copy: Callable[[Any], None]
    copied_bytes: int

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the tool and return the exit code."""
        options = self._arguments(arguments)
        if not options.smoke and not torch.cuda.is_available():
            print("error: no CUDA device is seen; --smoke runs on the CPU", file=sys.stderr)
            return 2
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shapes = {name: bucket_lengths(*MODELS[name]) for name in options.shapes}
        if options.smoke:
            shapes = {"smoke": [20_000, 7_777]}
        rounds = 2 if options.smoke else options.rounds
        report = self.measure(
            shapes, options.densities, device=device, rounds=rounds, peers=not options.no_peers
        )
        options.out.mkdir(parents=True, exist_ok=True)
        text = table(report)
        as_json = json.dumps(report, indent=1) + "\n"
        (options.out / f"{self.name}.json").write_text(as_json, encoding="utf-8")
        (options.out / f"{self.name}.md").write_text(text + "\n", encoding="utf-8")
        print(text)
        return 0

    def measure(
        self,
        shapes: dict[str, list[int]],
        densities: Sequence[float],
        *,
        device: torch.device,
        rounds: int,
        peers: bool,
    ) -> dict[str, Any]:
        """Time every pass of every model and density, and return the report.

        Seconds are medians over rounds in which our kernel and its peer take turns.
        """
        rows: list[dict[str, Any]] = []
        copy_rates = {}
        for shape, lengths in shapes.items():
            torch.manual_seed(0)
            states = [self.states(length, device) for length in lengths]
            entries = sum(lengths)
            copies = [lambda states=states: _each(self.copy, states)]
            (seconds,) = _times(copies, device=device, rounds=rounds)
            copy_rates[shape] = self.copied_bytes * entries / seconds
            for density in densities:
                buckets = [self.bucket(state, density, peers=peers) for state in states]
                for one in self.passes:
                    runs = [lambda one=one, buckets=buckets: one.run(buckets)]
                    if peers:
                        runs.append(lambda one=one, buckets=buckets: _each(one.theirs, buckets))
                    seconds = _times(runs, device=device, rounds=rounds)
                    moved = one.bytes_for_entry(density) * entries
                    rows.append(
                        {
                            "shape": shape,
                            "entries": entries,
                            "density": density,
                            "pass": one.name,
                            "seconds": seconds[0],
                            "bytes": moved,
                            "of_copy": moved / seconds[0] / copy_rates[shape],
                            "peer": one.peer,
                            "peer_seconds": seconds[1] if peers else None,
                        }
                    )
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        return {
            "device": name,
            "torch": torch.__version__,
            "copy_bytes_per_second": copy_rates,
            "rows": rows,
        }

    def _arguments(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            prog=f"{self.name}_kernels.py",
            description=f"{self.what} beside a copy and plain torch.",
        )
        add = parser.add_argument
        files = f"folder for {self.name}.json, {self.name}.md"
        add("--out", type=Path, default=Path("gpu-bench"), help=files)
        add("--shapes", nargs="+", default=list(MODELS), choices=list(MODELS), help="models")
        add("--densities", nargs="+", type=float, default=self.densities, help="parts chosen")
        add("--rounds", type=int, default=9, help="measured rounds")
        add(
            "--no-peers", action="store_true", help="leave out plain torch, which takes most memory"
        )
        add("--smoke", action="store_true", help="tiny, on the CPU if need be")
        return parser.parse_args(arguments)


def bucket_lengths(layers: int, hidden: int) -> list[int]:
    """Return the lengths of the buckets that hold the matrices of a GPT of these dimensions."""
    lengths = [VOCABULARY * hidden]
    left = 12 * hidden * hidden * layers
    while left > 0:
        lengths.append(min(left, BUCKET))
        left -= BUCKET
    return lengths


def met(density: float, width: int) -> float:
    """Return the share of sectors with a selected entry, for randomly placed entries."""
    return 1.0 - (1.0 - density) ** (SECTOR // width)


def table(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    rates = report["copy_bytes_per_second"].items()
    lines = [
        f"{report['device']}, torch {report['torch']}; a copy moves "
        + ", ".join(f"{rate / 1e9:,.0f} GB/s ({shape})" for shape, rate in rates),
        "",
        f"| model | density | pass | ms | GB | of a copy's rate (aim {AIM:.0%}) | in torch | ms "
        "| times ours |",
        "|---|---:|---|---:|---:|---:|---|---:|---:|",
    ]
    for row in report["rows"]:
        verdict = "met" if row["of_copy"] >= AIM else "MISSED"
        peer = row["peer_seconds"]
        beside = f"{1e3 * peer:.2f} | {peer / row['seconds']:.1f}" if peer else " | "
        lines.append(
            f"| {row['shape']} | {row['density']} | {row['pass']} | {1e3 * row['seconds']:.2f} | "
            f"{row['bytes'] / 1e9:.2f} | {row['of_copy']:.0%} {verdict} | {row['peer']} | "
            f"{beside} |"
        )
    return "\n".join(lines)


def _each(action: Callable[[Any], None], buckets: Sequence[Any]) -> None:
    for bucket in buckets:
        action(bucket)


def _times(runs: Sequence[Callable[[], None]], *, device: torch.device, rounds: int) -> list[float]:
    """Return the median seconds of each function; they take turns, after a turn that compiles."""
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, mine in zip(runs, seconds, strict=True):
            mine.append(_time(run, device))
            if number == 0:
                mine.clear()
    return [statistics.median(mine) for mine in seconds]


def _time(run: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        began = perf_counter()
        run()
        return perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
