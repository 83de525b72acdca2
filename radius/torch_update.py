"""The update of a `torch.optim` optimizer, before the learning rate.

Radius selects by it (Algorithm 2, line 5, of the paper), since AdamW changes a weight by this
update and not by its gradient. It is computed from the optimizer's state right after the step, and
not from the change of the weight, which vanishes with the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parameters that may be sent in part."""


class TorchUpdate:
    """Corrected updates of the matrices of an Adam, AdamW or SGD optimizer.

    Call `before_step` just before a step, then `matrices` and `forget` after it. The constructor
    raises `ConfigError` for other optimizers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.SGD):
            raise ConfigError(
                f"optimizer={type(optimizer).__name__}: its update is not known; must be torch's "
                "AdamW, Adam or SGD; for others use radius.functional.select on your own update"
            )
        self.optimizer = optimizer
        self._old_weights: dict[torch.Tensor, torch.Tensor] = {}
        self._old_grads: dict[torch.Tensor, torch.Tensor] = {}

    def before_step(self) -> None:
        """Copy the weights that the update contains, and gradients that the step may overwrite."""
        self._old_weights = {
            parameter: parameter.detach().clone()
            for group in self.optimizer.param_groups
            if group["weight_decay"] and self._adds_weights(group)
            for parameter in group["params"]
            if _is_matrix(parameter)
        }
        # torch's foreach kernels add Nesterov's momentum to the gradient itself.
        self._old_grads = {
            parameter: parameter.grad.clone()
            for group in self.optimizer.param_groups
            if group.get("nesterov")
            for parameter in group["params"]
            if _is_matrix(parameter) and parameter.grad is not None
        }

    @torch.no_grad()
    def matrices(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield every just updated parameter that may be sent in part, with its update.

        The update is fp32, 1-D, in memory order.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if _is_matrix(parameter) and parameter.grad is not None:
                    update = self._update(group, parameter)
                    yield parameter, in_memory_order(update)

    def forget(self) -> None:
        """Free the copies of `before_step`."""
        self._old_weights, self._old_grads = {}, {}

    def _update(self, group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
        state = self.optimizer.state[parameter]
        kept = parameter in self._old_grads
        grad = self._old_grads[parameter] if kept else parameter.grad
        assert grad is not None, "of those just updated"
        adam = isinstance(self.optimizer, torch.optim.Adam)
        update = _adam_update(group, state) if adam else _sgd_update(group, state, grad)
        if parameter in self._old_weights:
            update.add_(self._old_weights[parameter], alpha=group["weight_decay"])
        return update

    def _adds_weights(self, group: dict[str, Any]) -> bool:
        """Return whether lambda w is part of the update.

        If decay is part of the gradient, as in Adam and SGD, the moments include it.
        """
        if isinstance(self.optimizer, torch.optim.Adam):
            return bool(group["decoupled_weight_decay"])
        return group["momentum"] == 0 or bool(group["nesterov"])


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the entries of a tensor in memory order, 1-D.

    DDP lays out a gradient like its parameter, which for channels-last weights is not the logical
    order.
    """
    axes = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    by_stride = tensor.permute(axes)
    return (by_stride if by_stride.is_contiguous() else tensor).reshape(-1)


def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.dim() > 1 and parameter.requires_grad and parameter.dtype in DTYPES


def _adam_update(group: dict[str, Any], state: dict[str, Any]) -> torch.Tensor:
    """Return m^ / (sqrt(v^) + eps)."""
    beta1, beta2 = map(float, group["betas"])
    t = float(state["step"])
    square = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    mean = state["exp_avg"].float() / (1 - beta1**t)
    scale = (square.float() / (1 - beta2**t)).sqrt_().add_(group["eps"])
    return mean.div_(scale)


def _sgd_update(group: dict[str, Any], state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
    """Return the velocity; with Nesterov, gradient + momentum x velocity; else the gradient."""
    velocity = state.get("momentum_buffer")
    if velocity is not None and not group["nesterov"]:
        return velocity.to(torch.float32, copy=True)
    downhill = grad.to(torch.float32, copy=True)
    if group["maximize"]:
        downhill.neg_()
    return downhill if velocity is None else downhill.add_(velocity, alpha=group["momentum"])
