"""Check gradient paths and grids of several ranks on GPUs against the same ranks on CPUs.

    python -m tools.bench.gpu.ranks [CASE...] [--out FOLDER] [--jobs 4] [--smoke]

Each case trains a small GPT over NCCL and, at the same time, on CPUs over gloo. The weights of
replicas are compared bit by bit after every step, and the losses of both runs must agree. Ranks
share a GPU where there are too few (`launching.py`). The output is a table, also in
FOLDER/ranks.json. `--smoke`: both runs are on CPUs.

Exit code 1 if a run stands still, fails, or has other losses than on CPUs; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import torch

from megatron.report import read_run
from tools.bench.gpu.launching import kill, start, wait

PLACES = ("gpu", "cpu")
SECONDS = 100
"""Seconds without a step after which a run counts as deadlocked."""
COMMON = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1000 "
    "--mock-data --micro-batch-size 1 --global-batch-size 12 --train-iters 12 --lr 1e-3 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --log-interval 1 --compile false "
    "--check-weight-hash-across-dp-replicas-interval 1"
)
BUCKETS = "--ddp-bucket-size 400000"
RADIUS = "--radius-interval 3 --radius-start-iter 1"
SAMO = "--samo-sparsity 0.8 --samo-pruning random"
SHARDED = "--use-distributed-optimizer --overlap-param-gather"
TENSORS, STAGES = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
FEW = "--num-layers 2 --global-batch-size 4 --train-iters 6"
"""For few collectives, in each of which ranks that share a GPU wait for their turns."""
SCALED = "--fp16 --initial-loss-scale 65536 --accumulate-allreduce-grads-in-fp32"


@dataclass(frozen=True)
class RanksCase:
    """A run on `ranks` ranks; its losses must be within `tolerance` nats of those on CPUs.

    It is left out where there are fewer than `fewest_gpus`.
    """

    ranks: int
    flags: str = ""
    tolerance: float = 2e-3
    by_mpi: bool = False
    fewest_gpus: int = 1


CASES = {
    "dense": RanksCase(2),
    "dense-bf16": RanksCase(2, "--bf16", 3e-2),
    "dense-4": RanksCase(4, "--bf16", 3e-2),
    "compiled": RanksCase(2, "--compile", 2e-3),
    "sharded": RanksCase(2, SHARDED),
    "sharded-hybrid": RanksCase(4, f"{SHARDED} --dp-inner-size 2"),
    "offload": RanksCase(2, "--bf16 --optimizer-cpu-offload --offload-bucket-size 65536", 3e-2),
    "int8": RanksCase(2, "--grad-wire int8", 1e-2),
    "int4": RanksCase(4, "--grad-wire int4", 3e-2),
    "radius": RanksCase(2, f"--grad-path radius {RADIUS}", 1e-2),
    "radius-rolling-bf16-wire": RanksCase(
        4, f"--grad-path radius {RADIUS} --radius-schedule rolling --grad-wire bf16", 1e-2
    ),
    "radius-sharded": RanksCase(2, f"--grad-path radius {RADIUS} {SHARDED}", 1e-2),
    "samo-dsr": RanksCase(2, f"--bf16 --grad-path samo {SAMO} --dsr-interval 2", 3e-2),
    "samo-offload": RanksCase(2, f"--bf16 --grad-path samo {SAMO} --optimizer-cpu-offload", 3e-2),
    "samo+radius": RanksCase(2, f"{SCALED} --grad-path samo+radius {SAMO} {RADIUS}", 3e-2),
    "topk": RanksCase(2, "--grad-path topk", 1e-2),
    "powersgd": RanksCase(2, "--grad-path powersgd", 1e-2),
    "lowrank+sparse": RanksCase(2, "--grad-path lowrank+sparse", 1e-2),
    "roundrobin": RanksCase(2, "--grad-path roundrobin --roundrobin-interval 2"),
    "demo": RanksCase(2, "--grad-path demo --demo-sign false", 3e-2),
    "diloco": RanksCase(
        2, "--grad-path diloco --local-steps 3 --check-weight-hash-across-dp-replicas-interval 3"
    ),
    "1f1b": RanksCase(2, STAGES),
    "interleaved": RanksCase(2, f"{STAGES} --num-layers-per-virtual-pipeline-stage 1"),
    "message-driven": RanksCase(2, f"{STAGES} --pipeline-schedule message-driven", by_mpi=True),
    "tied-embedding": RanksCase(6, f"{STAGES} {FEW} --global-batch-size 3"),
    "tensors": RanksCase(2, f"{TENSORS} {FEW}"),
    "sequence-bf16": RanksCase(2, f"--bf16 {TENSORS} --sequence-parallel {FEW}", 3e-2),
    "all-dimensions": RanksCase(
        8,
        f"{TENSORS} {STAGES} {FEW} --train-iters 3 --sequence-parallel --grad-path radius "
        "--radius-interval 2 --radius-start-iter 0",
        1e-2,
        fewest_gpus=2,  # ranks that share one take 41 s for a step
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, help="folder for ranks.json")
    parser.add_argument("--jobs", type=int, default=4, help="cases that run at a time")
    parser.add_argument("--smoke", action="store_true", help="both runs on CPUs")
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; one of {', '.join(CASES)}")
    if not options.smoke and not torch.cuda.is_available():
        print("error: no CUDA device is seen; --smoke runs on the CPU", file=sys.stderr)
        return 2
    # A signal that ends this tool, as from `timeout`, must end the ranks, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    gpus = torch.cuda.device_count()
    names = []
    for name in options.cases or CASES:
        if options.smoke or CASES[name].fewest_gpus <= gpus:
            names.append(name)
        else:
            print(f"{name}: left out, needs {CASES[name].fewest_gpus} GPUs")
    results: dict[str, dict[str, Any]] = {}
    stopping, pool = Event(), ThreadPoolExecutor(options.jobs)
    print(f"{'case':<26}{'ranks':>6}{'ms a step':>11}  losses", flush=True)
    with tempfile.TemporaryDirectory() as folder:

        def work(name: str) -> dict[str, Any]:
            return run(CASES[name], Path(folder) / name, smoke=options.smoke, stopping=stopping)

        try:
            for name, found in zip(names, pool.map(work, names), strict=True):
                results[name] = found
                print(f"{name:<26}{found['ranks']:>6}{found['ms']:>11.1f}  {found['verdict']}")
                sys.stdout.flush()
                if options.out is not None:
                    _write(options.out, results)
        finally:
            stopping.set()
            pool.shutdown(cancel_futures=True)
    return 1 if any(not found["right"] for found in results.values()) else 0


def _write(folder: Path, results: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1) + "\n"
    (folder / "ranks.json").write_text(text, encoding="utf-8")


def run(
    case: RanksCase, folder: Path, *, smoke: bool, stopping: Event | None = None
) -> dict[str, Any]:
    """Train on GPUs and on CPUs; return the verdict, and milliseconds of a step on GPUs."""
    folder.mkdir()
    started: dict[str, list[subprocess.Popen[bytes]]] = {}
    found: dict[str, Any] = {"ranks": case.ranks, "ms": math.nan, "right": False}
    bucket = "" if "offload" in case.flags else BUCKETS
    try:
        for place in PLACES:
            started[place] = start(
                f"{COMMON} {bucket} {case.flags} --run-dir {folder / place}",
                case.ranks,
                folder / f"{place}.log",
                on_cpu=smoke or place == "cpu",
                by_mpi=case.by_mpi,
                environment={"OMP_NUM_THREADS": "1"},
            )
        for place, ranks in started.items():
            codes = wait(ranks, folder / place / "metrics.jsonl", SECONDS, stopping)
            if codes is None or any(codes):
                print(
                    (folder / f"{place}.log").read_text(encoding="utf-8")[-4000:], file=sys.stderr
                )
                said = f"no step in {SECONDS} s" if codes is None else f"exit codes {codes}"
                return found | {"verdict": f"{place}: {said}"}
    except OSError as error:
        return found | {"verdict": f"cannot start: {error}"}
    finally:
        for ranks in started.values():
            kill(ranks)
    mine, wanted = (read_run(folder / place).steps for place in PLACES)
    found["ms"] = 1000 * median(mine["step_seconds"][2:] or [math.nan])
    return found | judge(mine["loss"], wanted["loss"], case.tolerance)


def judge(mine: Sequence[float], wanted: Sequence[float], tolerance: float) -> dict[str, Any]:
    """Compare the losses of all steps; a loss that is no number differs."""
    gaps = [abs(a - b) for a, b in zip(mine, wanted, strict=False)]
    right = len(mine) == len(wanted) and all(gap <= tolerance for gap in gaps)
    said = "as on CPUs" if right else "DIFFERENT"
    text = f"{said}: at most {max(gaps):.2g} apart, {mine[-1]:.4f} against {wanted[-1]:.4f}"
    return {"largest difference": max(gaps), "right": right, "verdict": text}


if __name__ == "__main__":
    sys.exit(main())
