"""One stage of the benchmark of message-driven pipelines.

Started for each stage by `run.py` under mpiexec, with its settings as JSON. Rank 0 writes every
step of every contender, and whether they train equally, to `result.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.launch import detect_launch, duplicate, leave_mpi, require_mpi, with_master

LAUNCH = detect_launch()
require_mpi(LAUNCH)  # before torch, as in a run

# ruff: noqa: E402
import torch
import torch.distributed as dist
from mpi4py import MPI

from megatron.model.gpt import GPT
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.pipeline.message_driven import MessageDriven
from megatron.pipeline.mpi_staging import HostStaging
from megatron.pipeline.mpi_transport import CALLS, MessageMover, MPITransport
from megatron.pipeline.runner import Pipeline
from megatron.pipeline.schedule import StagePosition
from megatron.pipeline.transport import open_transport
from megatron.timers import Timers
from tools.bench.common.contenders import Ours, quiet
from tools.bench.message_driven.uneven_stage import (
    CONTENDERS,
    UnevenContender,
    UnevenStage,
    factor_of,
)

WARM_UP = 1
TIMEOUT = 120.0


def main(arguments: Sequence[str]) -> int:
    """Run one stage with the settings in `arguments`."""
    settings = json.loads(arguments[0])
    torch.set_num_threads(1)
    launch = with_master(LAUNCH, seconds=TIMEOUT)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{launch.master_addr}:{launch.master_port}",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    dims = ParallelDims(tp=1, dp=1, pp=launch.world_size)
    groups = ProcessGroups.build(dims, rank=launch.rank)
    equality = _train_both(settings, groups) if settings["steps"] else None
    steps = _measure(settings, groups)
    if launch.rank == 0:
        text = json.dumps({"equality": equality, "steps": steps})
        (Path(settings["folder"]) / "result.json").write_text(text, encoding="utf-8")
    groups.world.barrier()
    leave_mpi(0)
    return 0


def _train_both(settings: dict[str, Any], groups: ProcessGroups) -> dict[str, Any]:
    """Return losses of a few steps under both schedules, and a hash of the final weights."""
    stages, found = groups.pp.size, {}
    flags = ["--num-layers", str(2 * stages), "--hidden-size", "64", "--num-attention-heads", "4"]
    flags += ["--seq-length", "64", "--mock-data", "--lr", "1e-3", "--clip-grad", "1"]
    flags += ["--micro-batch-size", "1", "--global-batch-size", str(2 * stages)]
    flags += ["--train-iters", "1000", "--pipeline-model-parallel-size", str(stages)]
    for schedule in ("1f1b", "message-driven"):
        folder = Path(settings["folder"]) / schedule
        with quiet(Path(settings["folder"]) / f"console-{groups.pp.rank}.txt"):
            ours = Ours([*flags, "--pipeline-schedule", schedule], groups, folder)
            losses = [ours.step() for _ in range(settings["steps"])]
        hashed = hashlib.sha256()
        for chunk in ours.trainer.stage.chunks:
            assert isinstance(chunk, GPT)
            for value in chunk.logical_values().values():
                hashed.update(value.contiguous().numpy().tobytes())
        stages_hashed = groups.world.all_gather_str(hashed.hexdigest())
        weights = hashlib.sha256("".join(stages_hashed).encode()).hexdigest()
        found[schedule] = {"losses": losses, "weights": weights}
        ours.trainer.pipeline.transport.close()
    return found


def _measure(settings: dict[str, Any], groups: ProcessGroups) -> list[dict[str, Any]]:
    """Time every step of the contenders, which take turns; the first round warms up."""
    stage = UnevenStage(StagePosition(stage=groups.pp.rank, stages=groups.pp.size), settings)
    shape: dict[str, Any] = {
        "shape": tuple(settings["shape"]),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    assert groups.edges is not None
    mover = MessageMover()
    mpi = MPITransport(
        groups.edges,
        duplicate(MPI.COMM_WORLD, seconds=TIMEOUT),
        shape=shape["shape"],
        dtype=shape["dtype"],
        staging=HostStaging(),
        seconds=TIMEOUT,
        progress=mover,
    )
    transports = {False: open_transport(groups, **shape), True: mpi}
    pipelines = {
        contender: _pipeline(contender, stage, transports[contender.over_mpi], groups)
        for contender in CONTENDERS
    }
    cases = [(p, m) for p in settings["profiles"] for m in settings["microbatches"]]
    steps: list[dict[str, Any]] = []
    for number in range(-WARM_UP, settings["rounds"]):
        for profile, microbatches in cases:
            stage.factor = factor_of(profile, number)
            for contender, pipeline in pipelines.items():
                mover.set_calls(contender.calls or CALLS)
                taken = _step(pipeline, stage, groups, microbatches)
                case = {"profile": profile, "microbatches": microbatches, "round": number}
                if number >= 0:
                    steps.append({**case, "contender": contender.name, **taken})
    mpi.close()
    return steps


def _pipeline(
    contender: UnevenContender, stage: UnevenStage, transport: Any, groups: ProcessGroups
) -> Pipeline:
    place = StagePosition(stage=groups.pp.rank, stages=groups.pp.size)
    timers = Timers(0, synchronize=None)
    driven = None
    if contender.beyond is not None:
        driven = MessageDriven(
            place,
            limit=place.stages + contender.beyond,
            transport=transport,
            tp=groups.tp,
            marker=None,
            timers=timers,
            at=lambda phase: None,
        )
    # The runner uses only these parts of a stage and an engine.
    sleeping: Any = stage
    engine: Any = SimpleNamespace(expect_last_backward=lambda names: None)
    return Pipeline(
        stage=sleeping,
        place=place,
        transport=transport,
        engine=engine,
        timers=timers,
        at=lambda phase: None,
        driven=driven,
    )


def _step(
    pipeline: Pipeline, stage: UnevenStage, groups: ProcessGroups, microbatches: int
) -> dict[str, Any]:
    """Return the seconds of the slowest rank, and the passes of all ranks."""
    batches: list[Any] = [SimpleNamespace(index=number) for number in range(microbatches)]
    stage.passes.clear()
    groups.world.barrier()
    began = time.monotonic()
    pipeline.forward_backward(batches, iteration=1, scale=1.0)
    took = torch.tensor([time.monotonic() - began], dtype=torch.float64)
    groups.world.all_reduce(took, dist.ReduceOp.MAX)
    pipeline.wait_for_sends()
    passes = [json.loads(text) for text in groups.world.all_gather_str(json.dumps(stage.passes))]
    return {"seconds": took.item(), "passes": passes}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # torch's threads sometimes abort the interpreter while it shuts down.
    sys.stdout.flush()
    os._exit(code)
