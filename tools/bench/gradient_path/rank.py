"""One rank of the gradient-path benchmark: every method in turn, step by step.

Started once per rank by `run.py`, with its settings as JSON. Rank 0 writes the results of all ranks
to `result.json` in the given folder.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from megatron.data_parallel.engine import GradientEngine
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.pretrain import leave
from tools.bench.common.contenders import quiet
from tools.bench.common.emulated import Emulation
from tools.bench.common.methods import COMPUTE, method
from tools.bench.common.netlab import InterfaceCounters
from tools.bench.gradient_path.contenders import (
    NOTHING,
    REAL,
    SMOKE_EMULATION,
    SMOKE_SHAPE,
    Arrivals,
    MeasuredContender,
    OursPath,
    emulated_contenders,
    real_contenders,
)

SMALL, LARGE = 1 << 19, 1 << 23
"""Bytes of the two all-reduces that determine alpha and beta; buckets are between them."""
HEAD_START = 2
COLUMNS = ("seconds", "blocked", "bytes_sent", "density", "counted")
"""Values kept of each step."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a rank.

    Of `warm_up + rounds` turns of each method the first ones are dropped. `interval` is Radius's T;
    its first resample is over when the turns begin.
    """

    protocol: str
    methods: tuple[str, ...]
    rounds: int
    warm_up: int
    interval: int
    folder: str
    interface: str | None = None
    smoke: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run one rank with the settings in `arguments`."""
    settings = Settings(**json.loads(arguments[0]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=ranks, pp=1), rank=rank)
    with tempfile.TemporaryDirectory() as own, quiet(Path(own) / "console"):
        bench = RankBench(settings, groups, Path(own))
        bench.run()
        result = bench.result()
    if rank == 0:
        text = json.dumps(result, indent=1)
        (Path(settings.folder) / "result.json").write_text(text, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


class RankBench:
    """Contenders that take turns, with the values of each of their steps."""

    def __init__(self, settings: Settings, groups: ProcessGroups, own: Path) -> None:
        self.settings, self.groups = settings, groups
        methods = [method(name, interval=settings.interval) for name in settings.methods]
        if settings.protocol == "emulated":
            emulation = SMOKE_EMULATION if settings.smoke else Emulation()
            seed = groups.world.rank
            dtypes = {each.dtype for each in methods}
            gradients = {dtype: emulation.gradients(seed, dtype) for dtype in dtypes}
            self.contenders = emulated_contenders(methods, emulation, gradients, groups)
        else:
            shape = SMOKE_SHAPE if settings.smoke else REAL
            self.contenders = real_contenders(methods, shape, groups, own, dtype="fp32")
        self.steps: dict[str, list[list[float]]] = {c.name: [] for c in self.contenders}
        self.links: dict[int, list[float]] = {SMALL: [], LARGE: []}
        self._engines = {c.name: c.engine for c in self.contenders if isinstance(c, OursPath)}
        self._arrivals = {
            c.name: Arrivals(self._engines[c.name])
            for c in self.contenders
            if c.method.kind == COMPUTE
        }

    def run(self) -> None:
        """Run all turns, in an order that changes from round to round."""
        self._head_start()
        for number in range(self.settings.warm_up + self.settings.rounds):
            kept = number >= self.settings.warm_up
            turn = number % len(self.contenders)
            for contender in [*self.contenders[turn:], *self.contenders[:turn]]:
                found = self._measure(contender)
                if kept:
                    self.steps[contender.name].append(found)
                    if contender.name in self._arrivals:
                        self._arrivals[contender.name].keep()
            for size, seconds in self.links.items():
                took = self._all_reduce(size)
                seconds += [took] if kept else []

    def result(self) -> dict[str, Any]:
        """Return the results of all ranks: the slowest rank's time, means of the rest."""
        found = {name: self._over_ranks(rows) for name, rows in self.steps.items()}
        links = {size: self._over_ranks([[s] for s in rows]) for size, rows in self.links.items()}
        infos = self._engines[COMPUTE].infos.values()
        return {
            "settings": asdict(self.settings),
            "ranks": self.groups.world.size,
            "steps": {
                name: [dict(zip(COLUMNS, map(_plain, row), strict=True)) for row in rows]
                for name, rows in found.items()
            },
            "links": {str(size): [row[0] for row in rows] for size, rows in links.items()},
            "parameters": [[info.name, list(info.param.shape)] for info in infos],
            "coordinates": {name: _coordinates(engine) for name, engine in self._engines.items()},
            "arrivals": {name: each.medians() for name, each in self._arrivals.items()},
        }

    def _head_start(self) -> None:
        """Run the steps before the measurement.

        These are Radius's steps up to its first resample, and the steps after which DDP rebuilds
        its buckets and its PowerSGD begins.
        """
        for contender in self.contenders:
            contender.pace(0.0)
            resamples = contender.method.resamples
            for _ in range(self.settings.interval if resamples else HEAD_START):
                self.groups.world.barrier()
                contender.step()
            contender.pace(1.0)

    def _measure(self, contender: MeasuredContender) -> list[float]:
        interface = self.settings.interface
        self.groups.world.barrier()
        before = InterfaceCounters.read(interface) if interface else None
        for arrivals in self._arrivals.values():
            arrivals.start()
        began = perf_counter()
        contender.step()
        took = perf_counter() - began
        self.groups.world.barrier()  # until then some of it may still be in the send queue
        counted = (
            InterfaceCounters.read(interface).payload_since(before)
            if interface and before
            else NOTHING
        )
        facts = contender.facts()
        return [took, facts.blocked, facts.bytes_sent, facts.density, counted]

    def _all_reduce(self, size: int) -> float:
        values = torch.ones(size // 4)
        self.groups.world.barrier()
        began = perf_counter()
        self.groups.dp.all_reduce(values, dist.ReduceOp.SUM)
        return perf_counter() - began

    def _over_ranks(self, rows: list[list[float]]) -> list[list[float]]:
        """Return each row's maximum over ranks of the first number, and the means of the others."""
        mine = torch.tensor(rows, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in self.groups.world.ranks]
        dist.all_gather(every, mine)
        stacked = torch.stack(every)
        merged = stacked.mean(dim=0)
        merged[:, 0] = stacked[:, :, 0].amax(dim=0)
        return merged.tolist()


def _coordinates(engine: GradientEngine) -> dict[str, Any]:
    """Return which parameters share a bucket, and the number of stored entries of each."""
    return {
        "buckets": [list(bucket.names) for bucket in engine.buckets],
        "stored": {info.name: where.numel for info, _, where in engine.slices()},
    }


def _plain(number: float) -> float | None:
    """Replace NaN, which JSON does not have."""
    return None if math.isnan(number) else number


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
