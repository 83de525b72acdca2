"""One rank of the gradient-path benchmark: every method in turn, step by step.

Started once per rank by `run.py`, with its settings as JSON. Rank 0 writes the results of all ranks
to `result.json` in the given folder.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import traceback
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
from tools.bench.common.emulated import Gradients
from tools.bench.common.image_models import ImageTraining
from tools.bench.common.image_models import smoke as smoke_training
from tools.bench.common.methods import COMPUTE, Method, method
from tools.bench.common.netlab import InterfaceCounters
from tools.bench.common.tensors import release
from tools.bench.gradient_path.contenders import (
    NOTHING,
    REAL,
    SMOKE_SHAPE,
    Arrivals,
    MeasuredContender,
    OursPath,
    emulated,
    emulated_contenders,
    image_contender,
    real_contenders,
)
from tools.bench.gradient_path.rows import EMULATED

SMALL, LARGE = 1 << 19, 1 << 23
"""Bytes of the two all-reduces that determine alpha and beta; buckets are between them."""
HEAD_START = 2
COLUMNS = ("seconds", "blocked", "bytes_sent", "density", "counted")
"""Values kept of each step."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a rank.

    Each method takes `warm_up + rounds` turns, and the first ones are not kept. `interval` is
    Radius's T; its first resample is over when the turns begin. `network` names an image network;
    its contenders are in memory one at a time, and take `images` images a step under the real
    protocol.
    """

    protocol: str
    methods: tuple[str, ...]
    rounds: int
    warm_up: int
    interval: int
    folder: str
    interface: str | None = None
    smoke: bool = False
    network: str | None = None
    images: int = 0


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
        self.settings, self.groups, self._own = settings, groups, own
        self.methods = [method(name, interval=settings.interval) for name in settings.methods]
        self.steps: dict[str, list[list[float]]] = {each.name: [] for each in self.methods}
        self.links: dict[int, list[float]] = {SMALL: [], LARGE: []}
        self._gradients: dict[str, Gradients] = {}
        self._arrivals: dict[str, Arrivals] = {}
        self._parameters: list[list[Any]] = []
        self._coordinates: dict[str, Any] = {}
        self._medians: dict[str, Any] = {}

    def run(self) -> None:
        """Take all turns: contenders alternate; those of an image network run one after another."""
        if self.settings.network is None:
            self._take_turns(self._contenders(self.methods))
            return
        # All contenders of a network of 144 million parameters are more than a machine holds.
        for each in self.methods:
            (contender,) = self._contenders([each])
            self._take_turns([contender])
            contender.close()
            self._arrivals.clear()
            del contender
            release()

    def result(self) -> dict[str, Any]:
        """Return the results of all ranks: times of the slowest rank, means of other values.

        Collective over the world.
        """
        found = {name: self._over_ranks(rows) for name, rows in self.steps.items()}
        links = {size: self._over_ranks([[s] for s in rows]) for size, rows in self.links.items()}
        return {
            "settings": asdict(self.settings),
            "ranks": self.groups.world.size,
            "steps": {
                name: [dict(zip(COLUMNS, map(_plain, row), strict=True)) for row in rows]
                for name, rows in found.items()
            },
            "links": {str(size): [row[0] for row in rows] for size, rows in links.items()},
            "parameters": self._parameters,
            "coordinates": self._coordinates,
            "arrivals": self._medians,
        }

    def _contenders(self, methods: Sequence[Method]) -> list[MeasuredContender]:
        settings, groups = self.settings, self.groups
        if settings.protocol == EMULATED:
            emulation = emulated(settings.network, smoke=settings.smoke)
            dtypes = {each.dtype for each in methods}
            if settings.network is not None:
                self._gradients = {d: g for d, g in self._gradients.items() if d in dtypes}
            for dtype in dtypes - set(self._gradients):
                self._gradients[dtype] = emulation.gradients(groups.world.rank, dtype)
            return emulated_contenders(methods, emulation, self._gradients, groups)
        if settings.network is not None:
            training = ImageTraining(name=settings.network, images=settings.images)
            training = smoke_training(training) if settings.smoke else training
            return [image_contender(each, training, groups) for each in methods]
        shape = SMOKE_SHAPE if settings.smoke else REAL
        return real_contenders(methods, shape, groups, self._own, dtype="fp32")

    def _take_turns(self, contenders: Sequence[MeasuredContender]) -> None:
        """Take all turns of these contenders, in an order that changes from round to round."""
        engines = {c.name: c.engine for c in contenders if isinstance(c, OursPath)}
        self._arrivals = {
            c.name: Arrivals(engines[c.name]) for c in contenders if c.method.kind == COMPUTE
        }
        self._head_start(contenders)
        for number in range(self.settings.warm_up + self.settings.rounds):
            kept = number >= self.settings.warm_up
            turn = number % len(contenders)
            for contender in [*contenders[turn:], *contenders[:turn]]:
                found = self._measure(contender)
                if kept:
                    self.steps[contender.name].append(found)
                    if contender.name in self._arrivals:
                        self._arrivals[contender.name].keep()
            for size, seconds in self.links.items():
                took = self._all_reduce(size)
                seconds += [took] if kept else []
        for name, engine in engines.items():
            self._coordinates[name] = _coordinates(engine)
        for name, each in self._arrivals.items():
            self._medians[name] = each.medians()
        if COMPUTE in engines:
            infos = engines[COMPUTE].infos.values()
            self._parameters = [[info.name, list(info.param.shape)] for info in infos]

    def _head_start(self, contenders: Sequence[MeasuredContender]) -> None:
        """Take steps that no table shows, without sleeping.

        These are Radius's steps up to its first resample, and the steps after which DDP rebuilds
        its buckets and its PowerSGD begins.
        """
        for contender in contenders:
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
        """Return for each row the maximum over ranks of its first number, and means of the others.

        Collective over the world.
        """
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
    try:
        code = main(sys.argv[1:])
    except Exception:
        # A normal exit would wait for the wire's thread, which may wait for another rank.
        traceback.print_exc()
        code = 1
    leave(code)
