"""Training steps that sleep instead of computing, so that only the gradient path takes CPU time.

    forward: sleep          backward: sleep, gradients of a layer; sleep, gradients of the next; ...

Ranks that share the cores of one machine slow each other's computation, which would hide the cost
of communication; sleeping ranks do not. Gradients go through autograd, so that our engine and DDP
get them in the same way. Accumulation, reduction, clipping and AdamW are real.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config import parse, resolve
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.reducer import ReducerStats, StepContext
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.build import update_rule
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.common.contenders import CLIP, LEARNING_RATE, WEIGHT_DECAY, Shape

Gradients = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""The gradients of each layer's matrix and vector."""


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """The emulated model: `layers` of one matrix and one vector each, and the seconds of a step.

    Each matrix fills a bucket.
    """

    layers: int = 8
    rows: int = 1120
    columns: int = 1280
    forward: float = 0.150
    backward: float = 0.300

    @property
    def bucket(self) -> int:
        """Entries of a bucket."""
        return self.rows * self.columns

    def gradients(self, seed: int, dtype: str = "float32") -> Gradients:
        """Return the gradients of backward, the same at every step."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return (1e-3 * torch.randn(*shape, generator=generator)).to(getattr(torch, dtype))

        return [(draw(self.rows, self.columns), draw(self.columns)) for _ in range(self.layers)]


class EmulatedModel(torch.nn.Module):
    """A module that sleeps where a model computes, with parameters of its gradients' dtype.

    `pace` 0 takes steps without sleeping, for steps that are not timed.
    """

    def __init__(self, emulation: Emulation, gradients: Gradients) -> None:
        super().__init__()
        self.emulation, self.pace = emulation, 1.0
        self._gradients = gradients
        self.weights = torch.nn.ParameterList(0.02 * torch.randn_like(w) for w, _ in gradients)
        self.biases = torch.nn.ParameterList(torch.zeros_like(b) for _, b in gradients)

    def forward(self) -> torch.Tensor:
        """Sleep as long as a forward, and return a value whose backward makes the gradients."""
        time.sleep(self.pace * self.emulation.forward)
        x = torch.ones(1)
        seconds = self.pace * self.emulation.backward / self.emulation.layers
        for weight, bias, made in zip(self.weights, self.biases, self._gradients, strict=True):
            x = _EmulatedLayer.apply(x, weight, bias, made, seconds)
        assert isinstance(x, torch.Tensor)
        return x.sum()

    def infos(self) -> list[ParamInfo]:
        """Return the parameters in the form that the engine expects."""
        named = [
            (f"layers.{number}.{kind}", parameter)
            for number, pair in enumerate(zip(self.weights, self.biases, strict=True))
            for kind, parameter in zip(("weight", "bias"), pair, strict=True)
        ]
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
        weight: torch.Tensor,
        bias: torch.Tensor,
        made: tuple[torch.Tensor, torch.Tensor],
        seconds: float,
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
        return grads[0], *made, None, None


class EmulatedOurs:
    """A step of our engine, a registered gradient path and our optimizer around a module."""

    def __init__(
        self,
        path: Sequence[str],
        model: EmulatedModel,
        groups: ProcessGroups,
        *,
        name: str,
    ) -> None:
        self.name, self.model = name, model
        flags = Shape().flags(dtype="fp32", ranks=groups.world.size, extra=path)
        config = resolve(parse(flags, paths=GRADIENT_PATHS), groups.world.size)
        infos = model.infos()
        self.engine = GradientEngine(
            infos,
            GRADIENT_PATHS[config.gradient.grad_path].build(config, infos, groups),
            groups,
            cap=model.emulation.bucket,
            grad_dtype=getattr(torch, config.precision.grad_dtype),
            overlap=config.parallel.overlap_grad_reduce,
        )
        self.optimizer = BucketOptimizer(self.engine, update_rule(config))
        self.stats = ReducerStats()

    def step(self) -> float:
        self.engine.begin(StepContext(t=self.optimizer.applied + 1))
        loss = self.model()
        self.engine.expect_last_backward()
        loss.backward()
        step = self.engine.finish(tag=self.optimizer.applied, clip_norm=CLIP)
        assert step.ok, "gradients that were made up are finite"
        self.optimizer.step(step, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        self.engine.commit(step)
        self.stats = self.engine.stats()
        return loss.item()
