"""One stage of the benchmark of pipeline schedules.

Started once per stage by `run.py`, with its settings as JSON. Rank 0 writes the seconds of the
slowest rank to `result.json`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.pipeline.runner import Pipeline
from megatron.pipeline.schedule import StagePosition
from megatron.pipeline.transport import open_transport
from megatron.pretrain import leave
from megatron.timers import Timers

WARM_UP = 1


def main(arguments: Sequence[str]) -> int:
    """Run one stage with the settings in `arguments`."""
    settings = json.loads(arguments[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=ranks), rank=rank)
    cases = [(v, m) for v in settings["chunks"] for m in settings["microbatches"]]
    pipelines = {v: _pipeline(groups, v, settings) for v in settings["chunks"]}
    steps: dict[str, list[float]] = {f"{v} {m}": [] for v, m in cases}
    for number in range(WARM_UP + settings["rounds"]):
        for v, m in cases:
            took = _step(pipelines[v], groups, m)
            if number >= WARM_UP:
                steps[f"{v} {m}"].append(took)
    if rank == 0:
        text = json.dumps(steps)
        (Path(settings["folder"]) / "result.json").write_text(text, encoding="utf-8")
    dist.barrier()
    return 0


class SleepingStage:
    """A `Stage` without the arithmetic."""

    def __init__(self, place: StagePosition, settings: dict[str, Any]) -> None:
        self.chunks = [SimpleNamespace(device=torch.device("cpu"))] * place.chunks
        self._place = place
        self._forward = settings["forward"] / place.chunks
        self._backward = settings["backward"] / place.chunks
        self._made = torch.zeros(settings["shape"])

    def names(self, chunk: int) -> tuple[str, ...]:
        """Return no parameters."""
        return ()

    def forward(self, iteration: int, batch: Any, hidden: object, *, chunk: int) -> torch.Tensor:
        """Return an activation, or a loss in the last stage."""
        time.sleep(self._forward)
        return torch.zeros(()) if self._place.is_last(chunk) else self._made.clone()

    def backward(self, index: int, gradient: object, *, chunk: int) -> torch.Tensor | None:
        """Return the gradient of an activation, None in the first stage."""
        time.sleep(self._backward)
        return None if self._place.is_first(chunk) else self._made.clone()


def _pipeline(groups: ProcessGroups, chunks: int, settings: dict[str, Any]) -> Pipeline:
    place = StagePosition(stage=groups.pp.rank, stages=groups.pp.size, chunks=chunks)
    # The runner uses only these parts of a stage and an engine.
    stage: Any = SleepingStage(place, settings)
    engine: Any = SimpleNamespace(expect_last_backward=lambda names: None)
    return Pipeline(
        stage=stage,
        place=place,
        transport=open_transport(
            groups,
            shape=tuple(settings["shape"]),
            dtype=torch.float32,
            device=torch.device("cpu"),
            chunks=chunks,
        ),
        engine=engine,
        timers=Timers(0, synchronize=None),
        at=lambda phase: None,
    )


def _step(pipeline: Pipeline, groups: ProcessGroups, microbatches: int) -> float:
    """Return the seconds of the slowest rank."""
    batches: list[Any] = [SimpleNamespace(index=number) for number in range(microbatches)]
    groups.world.barrier()
    began = time.perf_counter()
    pipeline.forward_backward(batches, iteration=1, scale=1.0)
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    groups.world.all_reduce(took, dist.ReduceOp.MAX)
    pipeline.wait_for_sends()
    return took.item()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
