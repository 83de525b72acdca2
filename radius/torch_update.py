"""The update of an optimizer of `torch.optim`, before the learning rate.

Radius selects by it (Algorithm 2, line 5, of the paper): AdamW changes a weight by this and not by
its gradient. It is taken from the optimizer's own state right after its step, never from the change
of the weight, which vanishes where the learning rate does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of parameters that may be sent in part."""


class TorchUpdate:
    """Corrected updates of the matrices of an Adam, AdamW or SGD optimizer.

    `before_step` just before the step to look at, `matrices` and `forget` after it. Raises
    `ConfigError` for other optimizers.
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
        """Copy the weights that the coming update contains, and gradients that it may overwrite."""
        self._old_weights = {
            parameter: parameter.detach().clone()
            for group in self.optimizer.param_groups
            if group["weight_decay"] and self._adds_weights(group)
            for parameter in group["params"]
            if _is_matrix(parameter)
        }
        # torch's kernels for many tensors at a time add Nesterov's momentum to the gradient itself.
        self._old_grads = {
            parameter: parameter.grad.clone()
            for group in self.optimizer.param_groups
            if group.get("nesterov")
            for parameter in group["params"]
            if _is_matrix(parameter) and parameter.grad is not None
        }

    @torch.no_grad()
    def matrices(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Every parameter that may be sent in part and was just updated, with its update.

        Fp32, 1-D, in the order in which its entries lie in memory.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if _is_matrix(parameter) and parameter.grad is not None:
                    update = self._update(group, parameter)
                    yield parameter, in_memory_order(update)

    def forget(self) -> None:
        """Free what `before_step` copied."""
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
        """Return whether lambda w is added to the update itself.

        Where decay is part of the gradient, as in Adam and SGD, the moments have it already.
        """
        if isinstance(self.optimizer, torch.optim.Adam):
            return bool(group["decoupled_weight_decay"])
        return group["momentum"] == 0 or bool(group["nesterov"])


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The entries of a tensor as they lie in memory, 1-D.

    DDP lays a gradient out as its parameter is, which for channels-last weights is not the logical
    order.
    """
    axes = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    by_stride = tensor.permute(axes)
    return (by_stride if by_stride.is_contiguous() else tensor).reshape(-1)


def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.dim() > 1 and parameter.requires_grad and parameter.dtype in DTYPES


def _adam_update(group: dict[str, Any], state: dict[str, Any]) -> torch.Tensor:
    """m^ / (sqrt(v^) + eps)."""
    beta1, beta2 = map(float, group["betas"])
    t = float(state["step"])
    square = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    mean = state["exp_avg"].float() / (1 - beta1**t)
    scale = (square.float() / (1 - beta2**t)).sqrt_().add_(group["eps"])
    return mean.div_(scale)


def _sgd_update(group: dict[str, Any], state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
    """The velocity, or the gradient as far as it is used itself."""
    velocity = state.get("momentum_buffer")
    if velocity is not None and not group["nesterov"]:
        return velocity.to(torch.float32, copy=True)
    downhill = grad.to(torch.float32, copy=True)
    if group["maximize"]:
        downhill.neg_()
    return downhill if velocity is None else downhill.add_(velocity, alpha=group["momentum"])
