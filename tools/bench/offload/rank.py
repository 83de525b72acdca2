"""One rank of the benchmark of all-reduce coarsening.

Started once per rank by `run.py`, with its settings as JSON. Rank 0 writes the seconds of the
slowest rank to `result.json`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.gradient_path import PathParts
from megatron.data_parallel.layout import DenseLayout
from megatron.data_parallel.reducer import StepContext
from megatron.optimizer.cpu_offload import OffloadedOptimizer
from megatron.optimizer.update_rules import AdamW
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.pretrain import leave

WARM_UP = 2
APART = "apart"
"""Name of the contender that finishes all sums before any update."""


def main(arguments: Sequence[str]) -> int:
    """Run one rank with the settings in `arguments`."""
    settings = json.loads(arguments[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=ranks, pp=1), rank=rank)
    contenders = {APART: Updates(groups, settings, k=4, stream=False)}
    for k in settings["coarsening"]:
        contenders[str(k)] = Updates(groups, settings, k=k, stream=True)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for number in range(WARM_UP + settings["rounds"]):
        turn = number % len(order)
        for name in [*order[turn:], *order[:turn]]:
            took = contenders[name].step(groups)
            if number >= WARM_UP:
                seconds[name].append(took)
    if rank == 0:
        text = json.dumps(seconds)
        (Path(settings["folder"]) / "result.json").write_text(text, encoding="utf-8")
    dist.barrier()
    return 0


class Updates:
    """The sums and updates of gradients that are all complete at the start, in chunks of k buckets.

    A step is in this state at the end of a pipeline's last backward.
    """

    def __init__(
        self, groups: ProcessGroups, settings: dict[str, Any], *, k: int, stream: bool
    ) -> None:
        side, bucket_size = settings["side"], settings["bucket_size"]
        self._made = (1e-3 * torch.randn(side, side)).bfloat16()
        self._infos = [
            ParamInfo(
                name=f"{number}",
                leaves=(torch.nn.Parameter(torch.zeros(side, side, dtype=torch.bfloat16)),),
                logical_shape=(side, side),
            )
            for number in range(settings["matrices"])
        ]
        parts = PathParts(layout=DenseLayout(), reducer=AllReduceReducer(Exchange(groups.dp)))
        self._engine = GradientEngine(
            self._infos,
            parts,
            groups,
            cap=k * bucket_size,
            grad_dtype=torch.bfloat16,
            overlap=False,
            stream=stream,
        )
        rule = AdamW(beta1=0.9, beta2=0.95, eps=1e-8)
        self._optimizer = OffloadedOptimizer(self._engine, rule, bucket_size=bucket_size)

    def step(self, groups: ProcessGroups) -> float:
        """Return the seconds of the slowest rank from the first sum to the last update."""
        engine = self._engine
        engine.begin(StepContext(t=self._optimizer.applied + 1))
        engine.expect_last_backward()
        for info in self._infos:
            info.param.grad = self._made
            engine.accumulate(info.name, info.param)
        groups.world.barrier()
        began = time.perf_counter()
        step = engine.finish(tag=self._optimizer.applied)
        self._optimizer.step(step, lr=1e-4, weight_decay=0.1)
        engine.commit(step)
        took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        groups.world.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
