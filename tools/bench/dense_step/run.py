"""Tokens per second of the dense path on CPUs, as ratios to what others do with the same model.

    python -m tools.bench.dense_step.run [--only one|ddp] [--dtype fp32 bf16] [--out FOLDER]

`one`: our whole training step on one process of two threads against Hugging Face GPT-2 in a plain
PyTorch loop. `ddp`: two gloo ranks of one thread each, against torch's DistributedDataParallel
around the same model. Both by default, in both dtypes. Writes README.md and results.json to
FOLDER. Exit code 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tools.bench.common.contenders import (
    Batches,
    DdpLoop,
    HuggingFaceLoop,
    Ours,
    Shape,
    Silent,
    quiet,
)
from tools.bench.common.phases import LOGGING, Phases
from tools.bench.common.side_by_side import (
    TimedComparison,
    interleave,
    ratio_of,
    write_report,
)

ONE_TARGET = {"bf16": 1.25, "fp32": 1.2}
DDP_TARGET, BUCKET_VIEW_TARGET = 1.0, 0.98
LOGGING_TARGET = 0.01
SMOKE = Shape(layers=1, hidden=32, heads=2, sequence=32, vocabulary=128, batch=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    shape = SMOKE if options.smoke else Shape(batch=options.batch)
    shape = dataclasses.replace(shape, more_flags=tuple(options.flags.split()))
    comparisons: list[TimedComparison] = []
    for part in [options.only] if options.only else ["one", "ddp"]:
        for dtype in options.dtype:
            with tempfile.TemporaryDirectory() as folder:
                measure = one_process if part == "one" else two_ranks
                found = measure(shape, dtype=dtype, rounds=options.rounds, folder=Path(folder))
            print(found.as_markdown(), flush=True)
            comparisons.append(found)
    if options.out is not None:
        write_report(options.out, comparisons, _facts(shape))
    missed = [r for c in comparisons for r in c.ratios if not r.met]
    return 1 if missed and not options.smoke else 0


def one_process(shape: Shape, *, dtype: str, rounds: int, folder: Path) -> TimedComparison:
    """Compare our step with Hugging Face GPT-2, two threads, and split our step's time."""
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    with quiet(folder / "console"):
        ours = Ours(shape.flags(dtype=dtype), groups, folder / "run")
        theirs = HuggingFaceLoop(shape, dtype=dtype, batches=Batches(ours.trainer))
        timings, seconds = interleave(
            [ours, theirs, Silent(ours)],
            rounds=rounds,
            warm_up=min(3, rounds),
            tokens=shape.batch * shape.sequence,
        )
        phases = profile(ours, rounds=max(2, rounds // 2))
        ours.metrics.close()
    logging = phases[LOGGING] / sum(phases.values())
    verdict = "met" if logging < LOGGING_TARGET else "MISSED"
    return TimedComparison(
        title=f"One process, {dtype}, {torch.get_num_threads()} threads",
        note=_note(dtype)
        + f" Logging every step takes {logging:.2%} of a step (target below 1 %: {verdict}).",
        timings=timings,
        ratios=[
            ratio_of(seconds, ours.name, theirs.name, target=ONE_TARGET[dtype]),
            ratio_of(seconds, ours.name, Silent(ours).name),
        ],
        phases=phases,
    )


def two_ranks(shape: Shape, *, dtype: str, rounds: int, folder: Path) -> TimedComparison:
    """Compare our step with DDP on two gloo ranks; the slower rank counts."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=_serve, args=(rank, shape, dtype, rounds, folder, answers))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"a rank failed: exit codes {[process.exitcode for process in ranks]}")
    timings, seconds, phases = answers.get()
    return TimedComparison(
        title=f"Two gloo ranks, {dtype}, one thread each",
        note=_note(dtype)
        + (" Gradients are summed in bf16 on both sides." if dtype == "bf16" else ""),
        timings=timings,
        ratios=[
            ratio_of(seconds, "ours", "DDP", target=DDP_TARGET),
            ratio_of(seconds, "ours", "DDP (gradient_as_bucket_view)", target=BUCKET_VIEW_TARGET),
        ],
        phases=phases,
    )


def _serve(rank: int, shape: Shape, dtype: str, rounds: int, folder: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    meeting = (folder / "store").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=2, pp=1), rank=rank)
    extra = ["--grad-reduce-in-bf16"] if dtype == "bf16" else []
    flags = shape.flags(dtype=dtype, ranks=2, extra=extra)
    with quiet(folder / f"console-{rank}"):
        ours = Ours(flags, groups, folder / "run")
        batches = Batches(ours.trainer)
        others = [
            DdpLoop(flags, dtype=dtype, batches=batches, bucket_view=view) for view in (False, True)
        ]
        timings, seconds = interleave(
            [ours, *others],
            rounds=rounds,
            warm_up=min(3, rounds),
            tokens=2 * shape.batch * shape.sequence,
            slowest=_slowest,
            before_step=groups.world.barrier,
        )
        phases = profile(ours, rounds=max(2, rounds // 2))
        ours.metrics.close()
    if rank == 0:
        answers.put((timings, seconds, phases))
    dist.barrier()
    dist.destroy_process_group()


def profile(ours: Ours, *, rounds: int) -> dict[str, float]:
    """Return the seconds of a step by phase, mean over `rounds` steps."""
    phases = Phases(ours.trainer)
    for _ in range(rounds):
        phases.start()
        ours.step()
        phases.stop()
    phases.remove()
    return phases.means()


def _slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def _note(dtype: str) -> str:
    if dtype == "fp32":
        return "fp32 throughout on both sides."
    return (
        "bf16 parameters on both sides; ours also keeps fp32 master weights and moments, theirs "
        "has bf16 moments and no master weights."
    )


def _facts(shape: Shape) -> dict[str, Any]:
    return {
        "shape": f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, sequence "
        f"{shape.sequence}, vocabulary {shape.vocabulary}, batch {shape.batch} a rank",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.dense_step.run",
        description="Tokens/s of the dense path beside others' on CPUs.",
    )
    add = parser.add_argument
    add("--only", choices=["one", "ddp"], help="what to measure (default: both)")
    add("--dtype", nargs="+", choices=["fp32", "bf16"], default=["bf16", "fp32"])
    add("--rounds", type=int, default=15, help="measured steps of each contender")
    add("--batch", type=int, default=Shape.batch, help="sequences of one rank's step")
    add("--flags", default="", help="more flags for our trainer, in one string")
    add("--out", type=Path, default=None, help="folder for README.md and results.json")
    add("--smoke", action="store_true", help="a tiny model: does the tool work?")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
