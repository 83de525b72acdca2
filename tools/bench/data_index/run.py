"""Time and memory of ordering a large corpus, with generated document lengths; nothing is read.

python -m tools.bench.data_index.run [--documents N] [--epochs E] [--draws D] [--parts K]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from megatron.data.blended_dataset import blend_order, number_draws
from megatron.data.gpt_dataset import build_order, plan_epochs

Result = TypeVar("Result")


def peak_mib() -> float:
    """Return the peak resident size of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(what: str, action: Callable[[], Result]) -> Result:
    """Run a function and print seconds and the growth of peak resident memory."""
    before, start = peak_mib(), time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    print(f"{what}: {seconds:.2f} s, peak memory {before:.0f} -> {peak_mib():.0f} MiB", flush=True)
    return result


def main() -> None:
    """Parse the sizes, build both kinds of order, print."""
    parser = argparse.ArgumentParser(description="Time and memory of ordering a corpus.")
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--mean-length", type=int, default=500)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--draws", type=int, default=10_000_000)
    parser.add_argument("--parts", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 2 * options.mean_length, options.documents, dtype=np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    samples = (options.epochs * tokens - 1) // options.seq_length
    plan = plan_epochs(tokens, sequence_length=options.seq_length, num_samples=samples)
    order = measured(
        f"order of {options.documents} documents, {plan.epochs} epochs, {plan.samples} samples",
        lambda: build_order(lengths, range(options.documents), plan=plan, seed=1234),
    )
    print(f"  result {sum(array.nbytes for array in vars(order).values()) / 2**20:.0f} MiB")
    shares = rng.random(options.parts)
    weights = (shares / shares.sum()).tolist()
    drawn = measured(
        f"blend of {options.draws} draws from {options.parts} parts",
        lambda: blend_order(weights, options.draws),
    )
    measured("numbering of the draws", lambda: number_draws(drawn, options.parts))


if __name__ == "__main__":
    main()
