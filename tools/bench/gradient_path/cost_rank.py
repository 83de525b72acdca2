"""One rank of the cost benchmark: steps of each method in turn, with stopwatches.

Started once per rank by `cost.py`, with its settings as JSON. Rank 0 writes the median seconds by
kind of step and phase to `cost.json` in the given folder.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.pretrain import leave
from tools.bench.common.contenders import Shape, quiet
from tools.bench.common.methods import method
from tools.bench.common.phases import PathPhases
from tools.bench.gradient_path.contenders import SMOKE_SHAPE, TrainerPath

INTERVAL, WARM_UP = 4, 2
STEP, RESAMPLE = "step", "resample"
SMALL_GPT2 = Shape(
    layers=12,
    hidden=768,
    heads=12,
    sequence=256,
    vocabulary=50257,
    batch=2,
    log_interval=1_000_000,
)


def serve(arguments: Sequence[str]) -> int:
    """Run one rank with the settings in `arguments`, and return the exit code.

    Rank 0 writes median seconds by kind of step and phase; each is the slowest rank's in a step.
    """
    settings = json.loads(arguments[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dims = ParallelDims(tp=1, dp=dist.get_world_size(), pp=1)
    groups = ProcessGroups.build(dims, rank=rank)
    shape = replace(SMOKE_SHAPE, vocabulary=512) if settings["smoke"] else SMALL_GPT2
    folder = Path(settings["folder"])
    methods = [method(name, interval=INTERVAL) for name in settings["methods"]]
    with quiet(folder / f"console-{rank}"):
        contenders = [
            TrainerPath(each, shape, settings["dtype"], groups, folder / each.name)
            for each in methods
        ]
        steps = _take_turns(contenders, settings["rounds"], groups)
    if rank == 0:
        found = {
            kind: {
                phase: statistics.median(step[phase] for step in of_kind) for phase in of_kind[0]
            }
            for kind, of_kind in steps.items()
        }
        (folder / "cost.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _take_turns(
    contenders: Sequence[TrainerPath], rounds: int, groups: ProcessGroups
) -> dict[str, list[dict[str, float]]]:
    phases = [PathPhases(contender.trainer) for contender in contenders]
    for contender in contenders:
        for _ in range(INTERVAL - 1 if contender.method.resamples else 0):
            contender.step()
    steps: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
    for number in range(WARM_UP + rounds):
        turns = list(zip(contenders, phases, strict=True))
        for contender, watch in turns if number % 2 else reversed(turns):
            groups.world.barrier()
            before = watch.totals()
            watch.start()
            began = perf_counter()
            contender.step()
            took = perf_counter() - began
            watch.stop()
            passed = {phase: s - before[phase] for phase, s in watch.totals().items()}
            name = contender.name
            if contender.method.resamples and contender.facts().density >= 1.0:
                name = RESAMPLE
            if number >= WARM_UP:
                steps.setdefault(name, []).append(_slowest({STEP: took, **passed}))
    return steps


def _slowest(seconds: dict[str, float]) -> dict[str, float]:
    """Return the maximum over ranks, by phase."""
    values = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(seconds, values.tolist(), strict=True))


if __name__ == "__main__":
    leave(serve(sys.argv[1:]))
