"""Training steps in 16 bit beside fp32 on this CPU, with and without products widened to fp32.

    python -m tools.bench.precision.run [--rounds 9] [--out FOLDER]        five minutes, one thread

The same GPT takes whole training steps in fp32, in bf16 and in fp16. On a CPU that does not
multiply 16-bit operands, bf16 and fp16 also run by torch's own 16-bit kernels, which
`megatron.processor` avoids. Contenders take turns, so that other work on the machine slows all of
them. Writes a page and its numbers to FOLDER, named for the CPU's instruction set (avx2.md,
avx2.json).
Exit code 1 if a bf16 step takes more than 1.3 times as long as one in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.errors import ConfigError, SparsetronError
from megatron.model import causal_attention
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.processor import (
    multiplies_natively,
    processor_model,
    vector_instructions,
)
from megatron.tensor_parallel import products
from tools.bench.common.contenders import Ours, Shape, quiet
from tools.bench.common.side_by_side import (
    TimedComparison,
    interleave,
    ratio_of,
    write_report,
)

TARGET = 1 / 1.3
"""Minimum of tokens/s of a bf16 step over tokens/s of an fp32 step."""
SHAPE = Shape(layers=4, hidden=256, heads=4, sequence=256, vocabulary=4096, batch=4)
SMOKE = Shape(layers=1, hidden=32, heads=2, sequence=32, vocabulary=128, batch=2)
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Unwidened:
    """A contender whose steps use the CPU's own 16-bit kernels."""

    def __init__(self, ours: Ours) -> None:
        self.name = f"{ours.name}, not widened"
        self._ours = ours

    def step(self) -> float:
        """Run a step of the same trainer."""
        with _unwidened():
            return self._ours.step()


@contextlib.contextmanager
def _unwidened() -> Iterator[None]:
    with (
        mock.patch.object(products, "must_widen", lambda dtype, device: False),
        mock.patch.object(causal_attention, "blocked_attention_serves", lambda query: False),
    ):
        yield


def measure(shape: Shape, *, rounds: int, folder: Path) -> TimedComparison:
    """Time one process of one thread in each dtype."""
    torch.set_num_threads(1)
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    with quiet(folder / "console"):
        ours = [_ours(shape, name, groups, folder) for name in ("fp32", *HALF)]
        slow = [Unwidened(each) for each in ours if not multiplies_natively(_dtype(each.name))]
        timings, seconds = interleave(
            [*ours, *slow],
            rounds=rounds,
            warm_up=1,
            tokens=shape.batch * shape.sequence,
        )
        for each in ours:
            each.metrics.close()
    ratios = [
        ratio_of(seconds, name, "fp32", target=TARGET if name == "bf16" else None) for name in HALF
    ]
    ratios += [ratio_of(seconds, name.partition(",")[0], name) for name in (s.name for s in slow)]
    return TimedComparison(
        title="One process, one thread",
        note="16-bit runs keep fp32 master weights and moments.",
        timings=timings,
        ratios=ratios,
        phases={},
    )


def _ours(shape: Shape, name: str, groups: ProcessGroups, folder: Path) -> Ours:
    extra = [] if name == "fp32" else [f"--{name}", "--initial-loss-scale", "65536"]
    flags = shape.flags(dtype="fp32", extra=extra if name == "fp16" else extra[:1])
    return Ours(flags, groups, folder / name, name=name)


def _dtype(name: str) -> torch.dtype:
    return HALF.get(name, torch.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each (9)")
    parser.add_argument("--out", type=Path, help="folder for the page and its .json")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: does the tool work?")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: must be at least 1")
    shape = SMOKE if options.smoke else SHAPE
    load = f"{os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory() as folder:
        found = measure(shape, rounds=options.rounds, folder=Path(folder))
    print(found.as_markdown())
    if options.out is not None:
        write_report(
            options.out,
            [found],
            _facts(shape, load),
            part=vector_instructions().lower(),
        )
    return 1 if not options.smoke and not all(ratio.met for ratio in found.ratios) else 0


def _facts(shape: Shape, load: str) -> dict[str, Any]:
    return {
        "CPU": f"{processor_model()}, {vector_instructions()}",
        "shape": f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, sequence "
        f"{shape.sequence}, vocabulary {shape.vocabulary}, batch {shape.batch}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": load,
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SparsetronError as error:
        print(f"precision: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
