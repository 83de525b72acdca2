"""Training steps that sleep instead of computing, so that only the gradient path takes CPU time.

    forward: sleep          backward: sleep, gradients of a layer; sleep, gradients of the next; ...

Ranks that share the cores of one machine slow each other's computing down, which would hide what
communication costs; asleep they do not. Gradients go through autograd, so that ours and DDP get
them the same way; accumulating, reducing, clipping and updating are real.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.config import parse, resolve
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.bucket_plan import bucket_elements
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.reducer import ReducerStats, StepContext
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.build import update_rule
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.common.contenders import IMAGE_FLAGS, LEARNING_RATE, Shape
from tools.planner.replay.image_networks import ImageNetwork

Gradients = Sequence[Sequence[torch.Tensor]]
"""The gradients of each layer's parameters."""


@dataclass(frozen=True, kw_only=True)
class EmulatedLayer:
    """The shapes of a layer's parameters by name, and its share of the seconds of backward."""

    shapes: Mapping[str, tuple[int, ...]]
    share: float


class EmulatedTraining:
    """The computation that a step emulates: its layers, and seconds of forward and backward.

    `image` stands for an image network, which is trained with momentum SGD and without clipping.
    """

    forward: float
    backward: float
    image: bool = False

    @property
    def parts(self) -> Sequence[EmulatedLayer]:
        """Layers in the order of the forward pass."""
        raise NotImplementedError

    @property
    def bucket(self) -> int | None:
        """Number of entries of a bucket; None for the trainer's own."""
        return None

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for part in self.parts for shape in part.shapes.values())

    def gradients(self, seed: int, dtype: str = "float32") -> Gradients:
        """Return the random gradients of a backward, drawn from `seed`, by layer and parameter."""
        generator = torch.Generator().manual_seed(seed)

        def draw(shape: Sequence[int]) -> torch.Tensor:
            return (1e-3 * torch.randn(*shape, generator=generator)).to(getattr(torch, dtype))

        return [[draw(shape) for shape in part.shapes.values()] for part in self.parts]


@dataclass(frozen=True, kw_only=True)
class Emulation(EmulatedTraining):
    """Equal layers of one matrix and one vector each; a matrix fills a bucket."""

    layers: int = 8
    rows: int = 1120
    columns: int = 1280
    forward: float = 0.150
    backward: float = 0.300

    @property
    def parts(self) -> Sequence[EmulatedLayer]:
        return [
            EmulatedLayer(
                shapes={
                    f"layers.{number}.weight": (self.rows, self.columns),
                    f"layers.{number}.bias": (self.columns,),
                },
                share=1 / self.layers,
            )
            for number in range(self.layers)
        ]

    @property
    def bucket(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class EmulatedNetwork(EmulatedTraining):
    """An image network, whose layers take parts of backward in proportion to their FLOPs."""

    network: ImageNetwork
    forward: float
    backward: float
    image: bool = True

    @property
    def parts(self) -> Sequence[EmulatedLayer]:
        whole = sum(layer.forward_flops for layer in self.network.layers)
        return [
            EmulatedLayer(shapes=layer.shapes, share=layer.forward_flops / whole)
            for layer in self.network.layers
        ]


class EngineModel(Protocol):
    """A model under `EngineTraining`: parameters as the engine wants them, a forward pass."""

    def infos(self) -> list[ParamInfo]:
        """Return the parameters."""
        ...

    def __call__(self) -> torch.Tensor:
        """Return the loss of the next batch."""
        ...


class EmulatedModel(torch.nn.Module):
    """A module that sleeps where a model computes, with parameters of its gradients' dtype.

    `pace` 0 takes steps without sleeping, for steps that are not timed.
    """

    def __init__(self, emulation: EmulatedTraining, gradients: Gradients) -> None:
        super().__init__()
        self.emulation, self.pace = emulation, 1.0
        self._gradients = gradients
        self.names = [name for part in emulation.parts for name in part.shapes]
        self._shares = [part.share for part in emulation.parts]
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterList(
                0.02 * torch.randn_like(made) if made.dim() > 1 else torch.zeros_like(made)
                for made in layer
            )
            for layer in gradients
        )

    def forward(self) -> torch.Tensor:
        """Sleep as long as a forward, and return a value whose backward makes the gradients."""
        time.sleep(self.pace * self.emulation.forward)
        x = torch.ones(1)
        backward = self.pace * self.emulation.backward
        for layer, share, made in zip(self.layers, self._shares, self._gradients, strict=True):
            x = _EmulatedLayer.apply(x, made, share * backward, *layer.parameters())
        assert isinstance(x, torch.Tensor)
        return x.sum()

    def infos(self) -> list[ParamInfo]:
        return infos_of(zip(self.names, self.parameters(), strict=True))


def infos_of(named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[ParamInfo]:
    """Return parameters as the engine wants them, unsharded; only matrices decay."""
    return [
        ParamInfo(
            name=name,
            leaves=(parameter,),
            logical_shape=tuple(parameter.shape),
            weight_decay=parameter.ndim > 1,
        )
        for name, parameter in named
    ]


class _EmulatedLayer(torch.autograd.Function):
    """Identity on `x` whose backward takes `seconds` and returns the given gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        made: Sequence[torch.Tensor],
        seconds: float,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.made, ctx.seconds = made, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # Autograd keeps a gradient without copying it only if nothing else refers to it, as for a
        # model's gradients. So return tensors that no other variable holds.
        ends = time.perf_counter() + ctx.seconds
        made = [gradient.clone() for gradient in ctx.made]
        time.sleep(max(0.0, ends - time.perf_counter()))
        return grads[0], None, None, *made


class EngineTraining:
    """A step of our engine, a registered gradient path and our optimizer around a model.

    `bucket` is the number of entries of a bucket (None: the trainer's own). With `image`, momentum
    SGD without clipping takes the place of AdamW.
    """

    def __init__(
        self,
        path: Sequence[str],
        model: EngineModel,
        groups: ProcessGroups,
        *,
        name: str,
        bucket: int | None = None,
        image: bool = False,
    ) -> None:
        self.name, self.model = name, model
        extra = [*path, *(IMAGE_FLAGS if image else ())]
        flags = Shape().flags(dtype="fp32", ranks=groups.world.size, extra=extra)
        config = resolve(parse(flags, paths=GRADIENT_PATHS), groups.world.size)
        infos = model.infos()
        self.engine = GradientEngine(
            infos,
            GRADIENT_PATHS[config.gradient.grad_path].build(config, infos, groups),
            groups,
            cap=bucket or bucket_elements(config, groups.dp.size),
            grad_dtype=getattr(torch, config.precision.grad_dtype),
            overlap=config.parallel.overlap_grad_reduce,
        )
        self.optimizer = BucketOptimizer(self.engine, update_rule(config))
        self.stats = ReducerStats()
        self._clip, self._decay = config.optimizer.clip_grad, config.optimizer.weight_decay
        assert self._decay is not None

    def step(self) -> float:
        self.engine.begin(StepContext(t=self.optimizer.applied + 1))
        loss = self.model()
        self.engine.expect_last_backward()
        loss.backward()
        step = self.engine.finish(tag=self.optimizer.applied, clip_norm=self._clip)
        assert step.ok, "gradients are finite"
        self.optimizer.step(step, lr=LEARNING_RATE, weight_decay=self._decay)
        self.engine.commit(step)
        self.stats = self.engine.stats()
        return loss.item()
