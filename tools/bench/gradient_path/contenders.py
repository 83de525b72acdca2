"""The contenders of the gradient-path benchmark; each reports what a step sent and waited for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from megatron.data_parallel.engine import GradientEngine
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tools.bench.common.contenders import Batches, DdpLoop, DdpTraining, Ours, Shape
from tools.bench.common.emulated import (
    EmulatedModel,
    EmulatedNetwork,
    EmulatedTraining,
    Emulation,
    EngineModel,
    EngineTraining,
    Gradients,
)
from tools.bench.common.image_models import SMOKE_WIDTH, ImageTraining
from tools.bench.common.methods import COMPUTE, Method
from tools.planner.replay.image_networks import SLOWER
from tools.planner.replay.image_networks import network as image_network

BUCKET = 1_900_000
"""Entries of one of our buckets in the real model: about one layer."""
REAL = Shape(vocabulary=2048, batch=2, bucket=BUCKET, log_interval=1_000_000)
NOTHING = float("nan")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about one step on this rank.

    `bytes_sent` are counted by the ring model (NaN if the contender does not count them), `density`
    is entries sent divided by entries stored, and `blocked` seconds of waiting for communication.
    """

    bytes_sent: float
    density: float
    blocked: float


class MeasuredContender(Protocol):
    """A contender of this benchmark. `pace` 0 skips emulated computation."""

    name: str
    method: Method

    def step(self) -> object:
        """Run one whole step."""
        ...

    def facts(self) -> Facts:
        """Return the facts about the last step."""
        ...

    def pace(self, pace: float) -> None:
        """Scale the time of emulated computation."""
        ...

    def close(self) -> None:
        """Remove the hooks from the parameters, which would keep all tensors alive."""
        ...


class OursPath:
    """A contender with our engine.

    Its blocked time is that of the reducer's waits and of the vote, which is the first to wait for
    pending messages.
    """

    def __init__(self, method: Method, engine: GradientEngine) -> None:
        self.name, self.method, self.engine = method.name, method, engine
        self._agreeing = 0.0
        self.close = engine.detach
        agree = engine._agree

        def timed(tag: int, request: int) -> Any:
            began = perf_counter()
            try:
                return agree(tag, request)
            finally:
                self._agreeing = perf_counter() - began

        engine._agree = timed  # pyright: ignore[reportAttributeAccessIssue]

    def _facts(self, bytes_sent: int, density: float, waited: float) -> Facts:
        return Facts(bytes_sent=bytes_sent, density=density, blocked=waited + self._agreeing)


class EnginePath(OursPath):
    """A gradient path of ours around a model without the trainer of `pretrain_gpt.py`."""

    def __init__(
        self,
        method: Method,
        model: EngineModel,
        groups: ProcessGroups,
        *,
        bucket: int | None = None,
        image: bool = False,
    ) -> None:
        self._ours = EngineTraining(
            method.flags, model, groups, name=method.name, bucket=bucket, image=image
        )
        super().__init__(method, self._ours.engine)

    def step(self) -> object:
        return self._ours.step()

    def facts(self) -> Facts:
        stats = self._ours.stats
        return self._facts(stats.bytes_sent, stats.density, stats.wait_seconds)

    def pace(self, pace: float) -> None:
        if isinstance(self._ours.model, EmulatedModel):
            self._ours.model.pace = pace


class TrainerPath(OursPath):
    """A gradient path of ours in the trainer of `pretrain_gpt.py`."""

    def __init__(
        self, method: Method, shape: Shape, dtype: str, groups: ProcessGroups, folder: Path
    ) -> None:
        flags = shape.flags(dtype=dtype, ranks=groups.world.size, extra=method.flags)
        self.trainer = Ours(flags, groups, folder, name=method.name).trainer
        super().__init__(method, self.trainer.engine)

    def step(self) -> object:
        self._record, _ = self.trainer.train_step()
        return self._record

    def facts(self) -> Facts:
        record = self._record
        assert record.wait_seconds is not None, "the trainer fills it in"
        return self._facts(record.bytes_sent, record.density, record.wait_seconds)

    def pace(self, pace: float) -> None:
        pass


class DdpPath:
    """A contender with torch's DistributedDataParallel.

    Its blocked time is from the last gradient to the end of backward, including the copy back.
    """

    def __init__(
        self, method: Method, training: DdpTraining, emulated: EmulatedModel | None
    ) -> None:
        self.name, self.method, self._training = method.name, method, training
        self._emulated = emulated
        self._last_gradient = 0.0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrived)
            for parameter in training.parameters
        ]

    def step(self) -> object:
        return self._training.step()

    def facts(self) -> Facts:
        blocked = self._training.backward_ended - self._last_gradient
        return Facts(bytes_sent=NOTHING, density=1.0, blocked=blocked)

    def pace(self, pace: float) -> None:
        if self._emulated is not None:
            self._emulated.pace = pace

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._last_gradient = perf_counter()


class Arrivals:
    """A record of the times at which gradients are complete, for an engine that sends nothing."""

    def __init__(self, engine: GradientEngine) -> None:
        self._engine = engine
        self._began = self._ended = 0.0
        self.ready: dict[str, list[float]] = {name: [] for name in engine.infos}
        self.backward: list[float] = []
        self._seen: dict[str, float] = {}
        engine.layout.gather = self._noted(engine.layout.gather)
        engine.layout.gather_add = self._noted(engine.layout.gather_add)
        engine.finish = self._at_end(engine.finish)

    def start(self) -> None:
        """Begin a step."""
        self._began = perf_counter()

    def keep(self) -> None:
        """Keep the times of the step."""
        for name, seconds in self._seen.items():
            self.ready[name].append(seconds)
        self.backward.append(self._ended)

    def medians(self) -> dict[str, Any]:
        """Return the median times over the kept steps, in seconds from the start of a step.

        `ready` has the time at which each gradient is complete, by name, and `backward` is the end
        of backward.
        """
        ready = {name: statistics.median(seconds) for name, seconds in self.ready.items()}
        return {"ready": ready, "backward": statistics.median(self.backward)}

    def _noted(self, store: Callable[..., None]) -> Callable[..., None]:
        @wraps(store)
        def noted(name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
            store(name, dense, out)
            self._seen[name] = perf_counter() - self._began

        return noted

    def _at_end(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(finish)
        def ended(**arguments: Any) -> Any:
            self._ended = perf_counter() - self._began
            return finish(**arguments)

        return ended


def alone() -> ProcessGroups:
    """Return the groups of this rank alone, in which nothing is sent."""
    return ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)


def emulated_contenders(
    methods: Sequence[Method],
    emulation: EmulatedTraining,
    gradients: Mapping[str, Gradients],
    groups: ProcessGroups,
) -> list[MeasuredContender]:
    """Return contenders around sleeping models, which share their given gradients by dtype."""
    contenders: list[MeasuredContender] = []
    for method in methods:
        model = EmulatedModel(emulation, gradients[method.dtype])
        if method.kind == "ddp":
            training = _ddp(DdpTraining, method, model, image=emulation.image)
            contenders.append(DdpPath(method, training, model))
        else:
            mine = alone() if method.kind == COMPUTE else groups
            bucket, image = emulation.bucket, emulation.image
            contenders.append(EnginePath(method, model, mine, bucket=bucket, image=image))
    return contenders


def image_contender(
    method: Method, training: ImageTraining, groups: ProcessGroups
) -> MeasuredContender:
    """Return a contender that trains an image network on this rank's images."""
    model = training.model(method.dtype, seed=groups.world.rank)
    if method.kind == "ddp":
        return DdpPath(method, _ddp(DdpTraining, method, model, image=True), None)
    mine = alone() if method.kind == COMPUTE else groups
    return EnginePath(method, model, mine, image=True)


def real_contenders(
    methods: Sequence[Method], shape: Shape, groups: ProcessGroups, folder: Path, *, dtype: str
) -> list[MeasuredContender]:
    """Return contenders with the same GPT and batches; `folder` is this rank's own."""
    contenders: list[MeasuredContender] = []
    flags = shape.flags(dtype=dtype, ranks=groups.world.size)
    batches: Batches | None = None
    for method in methods:
        if method.kind != "ddp":
            mine = alone() if method.kind == COMPUTE else groups
            contenders.append(TrainerPath(method, shape, dtype, mine, folder / method.name))
            continue
        if batches is None:
            reader = Ours(flags, groups, folder / "data").trainer
            batches = Batches(reader)
        loop = _ddp(DdpLoop, method, flags, dtype=dtype, batches=batches, bucket_view=False)
        contenders.append(DdpPath(method, loop, None))
    return contenders


def _ddp(
    kind: Callable[..., DdpTraining], method: Method, *args: Any, **options: Any
) -> DdpTraining:
    return kind(
        *args,
        name=method.name,
        bucket_mb=method.bucket_mb,
        hook=method.hook,
        rank=method.rank,
        **options,
    )


def emulated(network: str | None, *, smoke: bool = False) -> EmulatedTraining:
    """Return the emulated computation of an image network, or of the default model."""
    if network is None:
        return SMOKE_EMULATION if smoke else Emulation()
    times = SLOWER if network == "wide_resnet101" else 1.0
    if smoke:
        small = image_network(network, 32, width=SMOKE_WIDTH)
        return EmulatedNetwork(network=small, forward=0.002, backward=0.004)
    forward, backward = (times * seconds for seconds in IMAGE_SECONDS)
    return EmulatedNetwork(network=image_network(network), forward=forward, backward=backward)


IMAGE_SECONDS = (0.5, 1.0)
"""Forward and backward of VGG-19 with emulated computing.

At 800 Mbit/s, two ranks send its 16-bit gradients in 3 s: twice as long.
"""
SMOKE_EMULATION = Emulation(layers=2, rows=64, columns=64, forward=0.002, backward=0.004)
SMOKE_SHAPE = replace(REAL, layers=2, hidden=32, heads=2, sequence=32, vocabulary=128, bucket=None)
