"""Measure how long an AdamW update of coded states takes, against one of fp32 states.

    python -m tools.bench.low_memory.update_cost [--entries N]

One thread updates chunks of `CPU_CODED_CHUNK` entries of states in all formats in turn, with dense
fp32 gradients. Each format's time is the least of several rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from megatron.optimizer.chunks import CPU_CODED_CHUNK
from megatron.optimizer.coded_update import GradChunk, update_chunk
from megatron.optimizer.rounding import RandomBits
from megatron.optimizer.state_formats import StateFormats, StateVector, vector_of, write_all
from megatron.optimizer.update_rules import AdamW, Hyper

ROUNDS = 7
RULE = AdamW(beta1=0.9, beta2=0.999, eps=1e-8)
FORMATS = {
    "fp32": StateFormats(),
    "bf16": StateFormats(main=torch.bfloat16, exp_avg="bf16", exp_avg_sq="bf16"),
    "bf16, int8 moments": StateFormats(main=torch.bfloat16, exp_avg="int8", exp_avg_sq="int8"),
    "fp16": StateFormats(main=torch.float16, exp_avg="fp16", exp_avg_sq="fp16"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of ns per entry and of ratios to fp32; return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--entries", type=int, default=16 * CPU_CODED_CHUNK, help="Entries.")
    entries = parser.parse_args(arguments).entries
    torch.set_num_threads(1)
    states = {name: _states(formats, entries) for name, formats in FORMATS.items()}
    grad = torch.randn(entries)
    # Formats take turns, so that a load on the machine slows all of them.
    seconds = [
        {name: _update(each, grad, t) for name, each in states.items()}
        for t in range(1, 1 + ROUNDS)
    ]
    least = {name: min(each[name] for each in seconds) for name in states}
    print("| states | ns an entry | times fp32 |\n|---|---:|---:|")
    for name, each in least.items():
        print(f"| {name} | {each / entries * 1e9:.1f} | {each / least['fp32']:.0f} |")
    return 0


def _states(formats: StateFormats, entries: int) -> list[StateVector]:
    param = torch.empty(1, 1, dtype=formats.main)
    kinds = [formats.of_main(param), *formats.of_moments(param, RULE.moments)]
    return [
        vector_of(each, entries, lambda n, dtype: torch.zeros(n, dtype=dtype)) for each in kinds
    ]


def _update(states: Sequence[StateVector], grad: torch.Tensor, t: int) -> float:
    """Return the seconds of one update of all entries."""
    hyper, start = Hyper(t=t, lr=1e-3, weight_decay=0.1), time.perf_counter()
    for first in range(0, grad.numel(), CPU_CODED_CHUNK):
        past = min(first + CPU_CODED_CHUNK, grad.numel())
        held = [state.cut(first, past) for state in states]
        read = [state.read() for state in held]
        update_chunk(RULE, read, GradChunk(grad[first:past]), hyper)
        positions = torch.arange(first, past, dtype=torch.int32)
        write_all(held, read, RandomBits(1, t, "weight", positions))
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
