"""A user's training loop: a small model under DistributedDataParallel with Radius' hook."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron.parallel.groups import ProcessGroups
from radius.ddp_hook import RadiusHook, radius_hook
from radius.torch_update import in_memory_order

INTERVAL = 4
"""With START: dense up to step 4, the first resample; steps 8 and 12 are the next resamples."""
LR = 1e-2
START = 3


def small_model() -> nn.Module:
    """Return a model with a matrix, a channels-last convolution and 1-D parameters."""
    torch.manual_seed(3)
    convolution = nn.Conv2d(3, 8, 3)
    convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
    layers = (convolution, nn.Flatten(), nn.Linear(128, 33), nn.LayerNorm(33), nn.Linear(33, 1))
    return nn.Sequential(*layers)


class Loop:
    """A user's training loop; `batch` numbers select random data that differs by rank."""

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        density: float | None = 0.4,
        scaler: torch.amp.GradScaler | None = None,
        fused: bool = False,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        self.rank, self.scaler = groups.dp.rank, scaler
        # Several buckets, which DDP rebuilds after the first step.
        self.model = DistributedDataParallel(
            small_model(), bucket_cap_mb=0.01, gradient_as_bucket_view=gradient_as_bucket_view
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, weight_decay=0.1, fused=fused
        )
        scale: dict[str, Any] = {} if scaler is None else {"loss_scale": scaler.get_scale}
        self.state = RadiusHook(
            self.optimizer, density=density or 1.0, interval=INTERVAL, start=START, **scale
        )
        if density is not None:
            self.model.register_comm_hook(self.state, radius_hook)

    def loss(self, model: nn.Module, batch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * batch + self.rank)
        x = torch.randn(4, 3, 6, 6, generator=generator)
        return (model(x) - x.mean((1, 2, 3))[:, None]).square().mean()

    def backward(self, *batches: int, poison: float | None = None) -> None:
        """Compute the gradients of one step of several microbatches.

        `poison` goes into one unselected entry of the last matrix on rank 1.
        """
        self.optimizer.zero_grad()
        last_matrix = len(self.parameters) - 2
        nothing = torch.zeros(self.parameters[last_matrix].numel(), dtype=torch.bool)
        chosen, _ = self.waiting().get(last_matrix, (nothing, None))
        entry = int((~chosen).nonzero()[0])
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else self.model.no_sync():
                loss = self.loss(self.model, batch)
                if poison is not None and self.rank == 1:
                    loss = loss + self.parameters[last_matrix].view(-1)[entry] * poison
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, *batches: int, poison: float | None = None) -> None:
        """Run a whole step, which is skipped if a gradient is not finite."""
        self.backward(*batches, poison=poison)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif all(bool(p.grad.isfinite().all()) for p in self.parameters if p.grad is not None):
            self.optimizer.step()

    def local(self, *batches: int) -> list[torch.Tensor]:
        """Return this rank's own gradients, computed without DDP, in memory order."""
        total = [torch.zeros_like(p) for p in self.parameters]
        for batch in batches:
            loss = self.loss(self.model.module, batch)
            grads = torch.autograd.grad(loss, self.parameters)
            total = [a + b for a, b in zip(total, grads, strict=True)]
        return [in_memory_order(grad) for grad in total]

    def means(self) -> list[torch.Tensor]:
        """Return the gradients that the optimizer sees, in memory order."""
        return [in_memory_order(p.grad.clone()) for p in self.parameters if p.grad is not None]

    def waiting(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the selected entries and the residual, by number of the parameter."""
        return unpacked(self.state.state_dict(), [p.numel() for p in self.parameters])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of everything that a skipped step must leave unchanged."""
        found = {f"parameter.{n}": p.detach().clone() for n, p in enumerate(self.parameters)}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{kind}.{number}": t.clone() for kind, t in state.items()}
        return found | {f"hook.{name}": t for name, t in self.state.state_dict().items()}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


def unpacked(
    state: dict[str, torch.Tensor], sizes: list[int]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Unpack a hook's `state_dict` by parameter: selected entries as booleans, whole residual."""
    found = {}
    for number, size in enumerate(sizes):
        if f"index.{number}" in state:
            bits = np.unpackbits(state[f"index.{number}"].numpy(), count=size).astype(bool)
            chosen = torch.from_numpy(bits)
            residual = torch.zeros(size)
            residual[~chosen] = state[f"residual.{number}"]
            found[number] = chosen, residual
    return found
