"""A fully connected layer with nine tenths of its weights pruned: dense kernels or sparse ones.

    python -m tools.bench.sparse_linear.run [--out FOLDER] [--dtype fp32 bf16] [--sizes 128 ...]

Figure 1 of the SAMO paper: 576 tokens through square weights, dense with the zeros filled in
against the sparse kernels that torch has: CSR (MKL on a CPU, cuSPARSE on a GPU) and, on a GPU, two
of four (cuSPARSELt or CUTLASS). Forward, and where a library has it backward: gradients of the
input and of those weights that exist. On a CUDA device if there is one and --device does not say
otherwise. Writes README.md, results.json and figure.png to FOLDER; `--smoke` is tiny and measures
nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tools.bench.sparse_linear.kernels import (
    DENSE,
    DTYPES,
    Kernel,
    Operands,
    check,
    kernels,
)
from tools.bench.sparse_linear.report import Absence, Report, SparseLinearRow, write

TOKENS, SPARSITY = 576, 0.9
SMOKE_SIZES, SMOKE_TOKENS = (16, 48), 24
SIZES = (128, 256, 512, 1024, 2048, 4096)
TURN_SECONDS = 0.02
"""Minimum duration of one turn of a kernel, by repetition, since the clock is coarse."""
MOST_REPEATS = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.threads:
        torch.set_num_threads(options.threads)
    dtypes = options.dtype or (["fp16", "bf16"] if device.type == "cuda" else ["fp32", "bf16"])
    tokens = SMOKE_TOKENS if options.smoke else TOKENS
    report = Report(facts=_facts(device, tokens))
    for dtype in dtypes:
        for size in SMOKE_SIZES if options.smoke else options.sizes:
            measure(
                report,
                size,
                dtype=dtype,
                device=device,
                tokens=tokens,
                rounds=2 if options.smoke else options.rounds,
                turn_seconds=0.0 if options.smoke else TURN_SECONDS,
            )
        print(report.as_markdown(dtype), flush=True)
    if options.out is not None:
        write(options.out, report)
    return 0


def measure(
    report: Report,
    size: int,
    *,
    dtype: str,
    device: torch.device,
    tokens: int,
    rounds: int,
    turn_seconds: float,
) -> None:
    """Measure one layer, and add its rows and absences to the report.

    Medians are over rounds in which all kernels take turns; ratios are to the dense kernel of the
    same round.
    """
    operands = Operands.draw(size, tokens=tokens, sparsity=SPARSITY, dtype=dtype, device=device)
    for one_pass in ("forward", "backward"):
        running: list[_Timed] = []
        for kernel in kernels(operands, one_pass):
            if reason := kernel.missing or check(kernel, operands):
                report.absences.append(Absence(dtype, one_pass, kernel.name, size, reason))
            else:
                running.append(_Timed.of(kernel, device, turn_seconds))
        seconds = _take_turns(running, rounds)
        dense = seconds[DENSE]
        for name, mine in seconds.items():
            ratios = [own / other for own, other in zip(mine, dense, strict=True)]
            report.rows.append(
                SparseLinearRow(
                    dtype=dtype,
                    size=size,
                    one_pass=one_pass,
                    kernel=name,
                    seconds=statistics.median(mine),
                    least_seconds=min(mine),
                    ratio=statistics.median(ratios),
                )
            )


@dataclass(frozen=True)
class _Timed:
    """A kernel that runs `repeats` times in each of its turns."""

    name: str
    run: Callable[[], object]
    repeats: int
    device: torch.device

    @classmethod
    def of(cls, kernel: Kernel, device: torch.device, turn_seconds: float) -> _Timed:
        once = cls(kernel.name, kernel.run, 1, device)
        least = min(once.turn() for _ in range(3))
        repeats = min(MOST_REPEATS, max(1, math.ceil(turn_seconds / least)))
        return cls(kernel.name, kernel.run, repeats, device)

    def turn(self) -> float:
        """Return the seconds of one run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        began = perf_counter()
        for _ in range(self.repeats):
            self.run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (perf_counter() - began) / self.repeats


def _take_turns(running: Sequence[_Timed], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {kernel.name: [] for kernel in running}
    for number in range(1 + rounds):
        first = number % len(running)
        for kernel in [*running[first:], *running[:first]]:
            took = kernel.turn()
            if number > 0:
                seconds[kernel.name].append(took)
    return seconds


def _facts(device: torch.device, tokens: int) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_cuda else f"cpu, {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f}",
        "tokens": tokens,
        "sparsity": SPARSITY,
    }


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.sparse_linear.run",
        description="Dense against sparse kernels for a pruned layer.",
    )
    add = parser.add_argument
    add("--out", type=Path, default=None, help="folder for README.md, results.json and figure.png")
    add("--dtype", nargs="+", choices=list(DTYPES), help="default: fp32 bf16; CUDA: fp16 bf16")
    add("--sizes", nargs="+", type=int, default=SIZES, help="rows and columns of the weights")
    add("--rounds", type=int, default=15, help="measured turns of each kernel")
    add("--threads", type=int, default=None, help="of torch (default: as torch decides)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    add("--smoke", action="store_true", help="tiny layers: does the tool work?")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
