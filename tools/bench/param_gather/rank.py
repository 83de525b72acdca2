"""One rank of the benchmark: two trainers, with gathers overlapped and not, take turns in blocks.

Started once for each rank by `run.py`, with its settings as JSON. Rank 0 writes the milliseconds of
each phase of each block to `result.json` in the given folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.training import Trainer
from tools.bench.common.contenders import Ours, quiet
from tools.bench.common.phases import (
    BACKWARD,
    CHECK,
    FORWARD,
    NORM,
    OPTIMIZER,
    SCATTER,
    WAIT,
    Phases,
)
from tools.bench.common.phases import GATHER as ACCUMULATE

GATHER = "wait for parameters"
WARM_UP = 1
"""Blocks that are not kept."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "forward": (FORWARD,),
    "backward": (BACKWARD, ACCUMULATE, CHECK),
    "gradients": (WAIT, NORM),
    "update": (OPTIMIZER,),
    "gather": (GATHER, SCATTER),
}
"""The phases that each column of the table adds up."""


class GatherPhases(Phases):
    """Phases of a step in which parameters are gathered, wherever the step waits for them."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._seconds[GATHER] = 0.0

    def _verbs(self, trainer: Trainer) -> list[tuple[Any, str, str]]:
        return [*super()._verbs(trainer), (trainer.optimizer._updates, "_receive", GATHER)]


def main(arguments: Sequence[str]) -> int:
    """Run one rank with the settings in `arguments`."""
    settings = json.loads(arguments[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=ranks, pp=1), rank=rank)
    blocks: dict[str, list[dict[str, float]]] = {name: [] for name in settings["rows"]}
    with tempfile.TemporaryDirectory() as own, quiet(Path(own) / "console"):
        made = {
            name: Ours(flags, groups, Path(own) / str(number))
            for number, (name, flags) in enumerate(settings["rows"].items())
        }
        losses = dict[str, list[float]]()
        for _ in range(WARM_UP + settings["blocks"]):
            for name, ours in made.items():
                found, seconds = block(ours, settings["steps"])
                losses.setdefault(name, []).extend(found)
                blocks[name].append(seconds)
        first, *others = losses.values()
        assert all(other == first for other in others), "the flag changes no bit"
    if rank == 0:
        kept = {name: each[WARM_UP:] for name, each in blocks.items()}
        file = Path(settings["folder"]) / "result.json"
        file.write_text(json.dumps(kept), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def block(ours: Ours, steps: int) -> tuple[list[float], dict[str, float]]:
    """Train some steps; return the losses, and the mean milliseconds of a step by column.

    The first step is not measured, since no gather is in progress when it begins.
    """
    losses = [ours.step()]
    phases = GatherPhases(ours.trainer)
    for _ in range(steps):
        phases.start()
        losses.append(ours.step())
        phases.stop()
    found = phases.means()
    phases.remove()
    # Nothing is left for the steps of the other trainer.
    ours.trainer.optimizer.finish_param_gather()
    total = sum(found.values())
    columns = {name: sum(found[phase] for phase in of) for name, of in COLUMNS.items()}
    columns |= {"rest": total - sum(columns.values()), "step": total}
    return losses, {name: 1e3 * seconds for name, seconds in columns.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
