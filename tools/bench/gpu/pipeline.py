"""Check that a pipeline over two GPUs does not deadlock and has the losses of one GPU.

    python -m tools.bench.gpu.pipeline [--out FOLDER] [--smoke]              a minute

A GPT is trained for 20 steps in fp32 on one GPU, then on two: with 1F1B, with the interleaved
schedule, and with 1F1B over a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1). A run without
a step for 110 seconds counts as deadlocked: NCCL's kernels occupy a device until their peer
arrives, so an order of sends and receives that works with gloo can block two GPUs forever. The
output is a table of median step times and losses, also in FOLDER/pipeline.json. Where there is one
GPU, both stages share it (`launching.py`). `--smoke`: tiny, over gloo on the CPU.

Exit code 1 if a run deadlocks, fails, or has other losses than one GPU; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from megatron.report import RunData, read_run
from megatron.report.comparison import compare
from tools.bench.gpu.launching import kill, start, wait

SECONDS = 110
"""Seconds without a step after which a run counts as deadlocked."""
TOLERANCE = 1e-3
"""Largest difference of two losses in nats, since sums are in another order.

In bf16 the losses of this model part after ten steps.
"""
MODEL = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
SMOKE = "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16"
COMMON = (
    "--mock-data --vocab-size 512 --train-iters 20 --micro-batch-size 2 --global-batch-size 16 "
    "--attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --log-interval 1 --eval-iters 0 "
    "--compile false"
)
PIPELINE = "--pipeline-model-parallel-size 2"


@dataclass(frozen=True)
class QueueCase:
    """A run on `ranks` GPUs, with more flags and environment variables."""

    name: str
    ranks: int
    flags: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


CASES = (
    QueueCase("one GPU", 1),
    QueueCase("1F1B", 2, PIPELINE),
    QueueCase("interleaved", 2, f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"),
    QueueCase("1F1B, one queue", 2, PIPELINE, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for pipeline.json")
    parser.add_argument("--smoke", action="store_true", help="a tiny model over gloo on the CPU")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("error: no CUDA device is seen; --smoke runs on the CPU", file=sys.stderr)
        return 2
    # A signal that ends this tool, as from `timeout`, must end the ranks, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results: dict[str, str] = {}
    first: RunData | None = None
    print(f"{'run':<16} {'median step':>12}  losses")
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            run_folder = Path(folder) / str(number)
            found = problem(case, run_folder, first, smoke=options.smoke)
            pace = "-"
            if (run_folder / "metrics.jsonl").exists():
                run = read_run(run_folder)
                first = first or run
                pace = f"{1000 * median(run.steps['step_seconds'][2:] or [float('nan')]):.1f} ms"
            results[case.name] = found or "as on one GPU"
            print(f"{case.name:<16} {pace:>12}  {results[case.name]}", flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "pipeline.json").write_text(json.dumps(results) + "\n", encoding="utf-8")
    return 1 if any(text != "as on one GPU" for text in results.values()) else 0


def problem(case: QueueCase, folder: Path, first: RunData | None, *, smoke: bool) -> str:
    """Run a case; return its problem in comparison with the `first` run, or ""."""
    flags = f"{SMOKE if smoke else MODEL} {COMMON} {case.flags} --run-dir {folder}"
    log = folder.with_suffix(".log")
    ranks = start(flags, case.ranks, log, on_cpu=smoke, environment=case.environment)
    try:
        codes = wait(ranks, folder / "metrics.jsonl", SECONDS)
    finally:
        kill(ranks)
    if codes is None:
        return f"stands still: no step in {SECONDS} s"
    if any(codes):
        print(log.read_text(encoding="utf-8")[-3000:], file=sys.stderr)
        return f"failed with exit codes {codes}"
    if first is None:
        return ""
    compared = compare(first, read_run(folder), tolerance=TOLERANCE)
    return "" if compared.equal else compared.describe()


if __name__ == "__main__":
    sys.exit(main())
