"""How near Radius' kernels come to what the memory of a GPU can do, beside the usual torch code.

    python tools/bench/radius_kernels.py [--out FOLDER] [--shapes 355m 2b] [--smoke]

Each pass goes over all matrices of a model, bucket by bucket. The bytes that it cannot do without,
by the time it takes, over the rate of a plain copy of the same buckets: the aim is 75 %. Beside it
the same in plain torch: boolean masks, int64 positions, `torch.topk`. Results: FOLDER/radius.json,
and a table, also in FOLDER/radius.md. `--smoke`: tiny, on the CPU where there is no GPU, where the
kernels' place is taken by their reference.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from megatron.data_parallel.interface import Reduced  # noqa: E402
from megatron.optimizer.rules import AdamW, Hyper  # noqa: E402
from megatron.sparse.selection import select_largest  # noqa: E402
from radius.bitmap import BitmapIndex  # noqa: E402

AIM = 0.75
VOCABULARY, BUCKET = 50304, 40_000_000
"""Bucket: entries, about as many as a reduction needs to be busy."""
MODELS = {"355m": (24, 1024), "2b": (24, 2560)}
RULE, HYPER = AdamW(beta1=0.9, beta2=0.95, eps=1e-8), Hyper(t=10, lr=1e-4, weight_decay=0.1)
SECTOR = 8
"""fp32 entries that a GPU's memory gives at least."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    options = _arguments(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("error: no CUDA device is seen; --smoke runs on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = {name: bucket_lengths(*MODELS[name]) for name in options.shapes}
    if options.smoke:
        shapes = {"smoke": [20_000, 7_777]}
    rounds = 2 if options.smoke else options.rounds
    report = measure(
        shapes, options.densities, device=device, rounds=rounds, peers=not options.no_peers
    )
    options.out.mkdir(parents=True, exist_ok=True)
    text = table(report)
    (options.out / "radius.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (options.out / "radius.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def bucket_lengths(layers: int, hidden: int) -> list[int]:
    """Entries of the buckets that hold the matrices of a GPT with so many layers of this width."""
    lengths = [VOCABULARY * hidden]
    left = 12 * hidden * hidden * layers
    while left > 0:
        lengths.append(min(left, BUCKET))
        left -= BUCKET
    return lengths


def measure(
    shapes: dict[str, list[int]],
    densities: Sequence[float],
    *,
    device: torch.device,
    rounds: int,
    peers: bool = True,
) -> dict[str, Any]:
    """Time every pass of every model and density; seconds are medians over rounds in which ours and
    the peer take turns."""
    rows: list[dict[str, Any]] = []
    copy_rates = {}
    for shape, lengths in shapes.items():
        torch.manual_seed(0)
        states = [_States(length, device) for length in lengths]
        entries = sum(lengths)
        (seconds,) = _times([lambda states=states: _copy(states)], device=device, rounds=rounds)
        copy_rates[shape] = 8 * entries / seconds
        for density in densities:
            buckets = [_Bucket(state, density, peers=peers) for state in states]
            for one in PASSES:
                runs = [lambda one=one, buckets=buckets: _each(one.ours, buckets)]
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


def table(report: dict[str, Any]) -> str:
    """The report as markdown."""
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


class _States:
    """What an optimizer and an engine keep for a bucket."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.grad, self.update = (torch.randn(length, device=device) for _ in range(2))
        self.weight, self.mean = (torch.randn(length, device=device) for _ in range(2))
        self.square = torch.rand(length, device=device)
        self.scratch = torch.empty(length, device=device)


class _Bucket:
    """A bucket with its sent entries in our form and, for `peers`, in torch's."""

    def __init__(self, states: _States, density: float, *, peers: bool) -> None:
        self.states = states
        length, device = states.grad.numel(), states.grad.device
        self.k = int(density * length)
        self.index = BitmapIndex(length, device)
        self.index.choose(0, select_largest(states.update, self.k))
        self.values = torch.randn(self.k, device=device)
        self.counts = torch.full((self.k,), 20.0, device=device)
        if peers:
            self.mask = torch.zeros(length, dtype=torch.bool, device=device)
            self.positions = torch.empty(self.k, dtype=torch.int64, device=device)
            self.index.gather(torch.arange(length, device=device), self.positions)
            self.mask.index_fill_(0, self.positions, True)
            self.index.gather(states.update, self.values)
            assert torch.equal(self.values, states.update[self.mask]), "ours gathers something else"

    def gather(self) -> None:
        self.index.gather(self.states.grad, self.values)

    def gather_by_mask(self) -> None:
        self.values = self.states.grad[self.mask]

    def take(self) -> None:
        self.index.take(self.states.grad, self.values, scale=0.5)

    def take_by_mask(self) -> None:
        self.values = self.states.grad[self.mask].mul_(0.5)
        self.states.grad.masked_fill_(self.mask, 0.0)

    def expand(self) -> None:
        self.index._kernels.expand(self.index.bits, self.values, self.states.scratch)

    def expand_by_positions(self) -> None:
        self.states.scratch.zero_().index_copy_(0, self.positions, self.values)

    def adamw(self) -> None:
        self._apply(Reduced(values=self.values, index=self.index))

    def adamw_by_positions(self) -> None:
        self.expand_by_positions()
        states = self.states
        RULE.apply(states.weight, states.scratch, (states.mean, states.square), HYPER)

    def adamw_frozen(self) -> None:
        rest = Reduced(values=self.values, index=self.index, rest="frozen", gathered=self.counts)
        self._apply(rest)

    def adamw_frozen_by_positions(self) -> None:
        flats = (self.states.weight, self.states.mean, self.states.square)
        held = [flat.index_select(0, self.positions) for flat in flats]
        RULE.apply(held[0], self.values.clone(), held[1:], HYPER, self.counts)
        for flat, mine in zip(flats, held, strict=True):
            flat.index_copy_(0, self.positions, mine)

    def select(self) -> None:
        self.index.choose(0, select_largest(self.states.update, self.k))

    def select_by_topk(self) -> None:
        found = torch.topk(self.states.update.abs(), self.k, sorted=False).indices
        self.mask.zero_().index_fill_(0, found, True)

    def _apply(self, reduced: Reduced) -> None:
        states, moments = self.states, (self.states.mean, self.states.square)
        self.index.apply(RULE, reduced, states.weight, moments, HYPER, factor=0.5)


@dataclass(frozen=True)
class Pass:
    """Something done to every bucket. `bytes_for_entry(density)`: what must be read and written for
    each entry of the bucket, in whole sectors where only some entries are needed."""

    name: str
    bytes_for_entry: Callable[[float], float]
    ours: Callable[[_Bucket], None]
    peer: str
    theirs: Callable[[_Bucket], None]


def _met(density: float) -> float:
    """Part of the sectors that hold a chosen entry, were these strewn at random."""
    return 1.0 - (1.0 - density) ** SECTOR


_BITS = 1 / 8
PASSES = [
    Pass(
        "gather",
        lambda d: 4 * _met(d) + 4 * d + _BITS,
        _Bucket.gather,
        "g[mask]",
        _Bucket.gather_by_mask,
    ),
    Pass(
        "gather, scale, clear",
        lambda d: 8 * _met(d) + 4 * d + _BITS,
        _Bucket.take,
        "g[mask] * s, masked_fill_",
        _Bucket.take_by_mask,
    ),
    Pass(
        "expand",
        lambda d: 4 + 4 * d + _BITS,
        _Bucket.expand,
        "zero_, index_copy_",
        _Bucket.expand_by_positions,
    ),
    Pass(
        "AdamW from compact values",
        lambda d: 24 + 4 * d + _BITS,
        _Bucket.adamw,
        "zero_, index_copy_, fused AdamW",
        _Bucket.adamw_by_positions,
    ),
    Pass(
        "AdamW, rest frozen, counted",
        lambda d: 24 * _met(d) + 8 * d + _BITS,
        _Bucket.adamw_frozen,
        "index_select, fused AdamW, index_copy_",
        _Bucket.adamw_frozen_by_positions,
    ),
    Pass(
        "selection (3 readings)",
        lambda d: 12 + _BITS,
        _Bucket.select,
        "abs, topk, index_fill_",
        _Bucket.select_by_topk,
    ),
]


def _each(action: Callable[[_Bucket], None], buckets: Sequence[_Bucket]) -> None:
    for bucket in buckets:
        action(bucket)


def _copy(states: Sequence[_States]) -> None:
    for state in states:
        state.scratch.copy_(state.weight)


def _times(runs: Sequence[Callable[[], None]], *, device: torch.device, rounds: int) -> list[float]:
    """Median seconds of each, taking turns, after a turn that compiles."""
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


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="radius_kernels.py", description="Radius' kernels beside a copy and plain torch."
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu-bench"), help="folder for radius.json, radius.md")
    add("--shapes", nargs="+", default=list(MODELS), choices=list(MODELS), help="models")
    add("--densities", nargs="+", type=float, default=[0.4, 0.1], help="parts that are sent")
    add("--rounds", type=int, default=9, help="measured rounds")
    add("--no-peers", action="store_true", help="leave out plain torch, which takes most memory")
    add("--smoke", action="store_true", help="tiny, on the CPU if need be")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
