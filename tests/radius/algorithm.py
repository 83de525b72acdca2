"""Algorithms 1 and 2 of the Radius paper, and the rolling schedule, on whole tensors and booleans.

Every rank's residual is here at once, nothing is compact, and a part of a tensor is a mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

BETA1, BETA2, EPS = 0.9, 0.99, 1e-8
Tensors = dict[str, torch.Tensor]


@dataclass
class Algorithm:
    """A run over `ranks` workers. `weights` are fp32 and of any shape."""

    weights: Tensors
    ranks: int
    density: float
    interval: int
    start: int
    rolling: bool = False
    lr: float = 1e-2
    weight_decay: float = 0.1
    clip: float = 1.0
    per_step: bool = False
    first: int = 0
    last: int = 0
    norm: float = 0.0
    mask: Tensors = field(default_factory=dict)
    steps_accumulated: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.m = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.v = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.residual = [
            {name: torch.zeros_like(w) for name, w in self.weights.items()}
            for _ in range(self.ranks)
        ]

    def step(self, t: int, gradients: list[Tensors]) -> Tensors:
        """One step; the mean gradient that was clipped."""
        due = t >= self.start and t % self.interval == 0
        means = {name: self._reduce(name, t, due, gradients) for name in self.weights}
        self.norm = math.sqrt(
            sum(
                float((mean.double().square() / self._summed(name, t, due)).sum())
                for name, (mean, _) in means.items()
            )
        )
        factor = min(1.0, self.clip / self.norm)
        for name, (mean, sent) in means.items():
            self._update(name, t, due, mean * factor, sent)
        if due:
            self.first, self.last = self.first or t, t
        return {name: mean for name, (mean, _) in means.items()}

    def _summed(self, name: str, t: int, due: bool) -> torch.Tensor:
        """Return by how many steps the square of each entry is divided in the norm."""
        ones = torch.ones_like(self.weights[name])
        if not self.per_step or name not in self.mask:
            return ones
        if self.rolling:
            return self.steps_accumulated[name]
        return torch.where(self.mask[name], ones, t - self.last) if due else ones

    def _reduce(
        self, name: str, t: int, due: bool, gradients: list[Tensors]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Lines 3 to 19: the mean, and which entries were sent."""
        own = [gradient[name] for gradient in gradients]
        everything = torch.ones_like(self.weights[name], dtype=torch.bool)
        self.steps_accumulated[name] = torch.ones_like(self.weights[name])
        if self.weights[name].dim() == 1 or not (self.first or due):
            return torch.stack(own).mean(0), everything
        if self.rolling and self.first:
            part = self._part(name, t)
            sent = self.mask[name] | part
            steps = min(self.interval, t - self.first)
            self.steps_accumulated[name][part & ~self.mask[name]] = steps
        else:
            part = sent = everything if due else self.mask[name]
        total = []
        for gradient, residual in zip(own, self.residual, strict=True):
            flushed = residual[name] * (part if due or self.rolling else 0.0)
            total.append((gradient + flushed) * sent)
            residual[name] = residual[name] + gradient - total[-1]
        return torch.stack(total).mean(0), sent

    def _part(self, name: str, t: int) -> torch.Tensor:
        weight = self.weights[name]
        n, number = weight.numel(), t % self.interval
        part = torch.zeros(n, dtype=torch.bool)
        part[n * number // self.interval : n * (number + 1) // self.interval] = True
        return part.view(weight.shape)

    def _update(
        self, name: str, t: int, due: bool, gradient: torch.Tensor, sent: torch.Tensor
    ) -> None:
        """Algorithm 2, the choice of entries (lines 22 to 24) and line 25."""
        weight = self.weights[name]
        moving = sent if self.rolling and self.first else torch.ones_like(sent)
        decay = self.weight_decay if weight.dim() > 1 else 0.0
        m = BETA1 * self.m[name] + (1 - BETA1) * gradient
        c = self.steps_accumulated[name]
        v = BETA2**c * self.v[name] + (1 - BETA2**c) * gradient.square() / c
        scale = (v / (1 - BETA2**t)).sqrt() + EPS
        direction = m / (1 - BETA1**t) / scale + decay * weight
        # What an entry of single gradients would move by: sums of c are sqrt(c) times as noisy.
        compared = m / c.sqrt() / (1 - BETA1**t) / scale + decay * weight
        self.m[name] = torch.where(moving, m, self.m[name])
        self.v[name] = torch.where(moving, v, self.v[name])
        waiting = weight * (1 - self.lr * decay)
        self.weights[name] = torch.where(moving, weight - self.lr * direction, waiting)
        if weight.dim() > 1 and self.rolling and (due or self.first):
            parts = [self._part(name, t)] if self.first else None
            self._choose(
                name, compared, parts or [self._part(name, p) for p in range(self.interval)]
            )
        elif weight.dim() > 1 and due:
            self._choose(name, compared, [torch.ones_like(sent)])

    def _choose(self, name: str, direction: torch.Tensor, parts: list[torch.Tensor]) -> None:
        mask = self.mask.setdefault(name, torch.zeros_like(parts[0]))
        for part in parts:
            places = part.view(-1).nonzero().view(-1)
            if not places.numel():
                continue
            upto = [math.ceil(self.density * int(p)) for p in (places[0], places[-1] + 1)]
            largest = direction.view(-1)[places].abs().topk(upto[1] - upto[0]).indices
            mask.view(-1)[places] = False
            mask.view(-1)[places[largest]] = True
