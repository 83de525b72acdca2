"""Matrix products of a layer, in fp32 on the CPU by oneDNN.

torch hands fp32 products to MKL and 16-bit ones to oneDNN. On a core of an AMD EPYC (Zen 5, AVX512)
MKL multiplies fp32 at 98 GFLOP/s and oneDNN at 160-220; on Intel they are about equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_WORTHWHILE = 1 << 22
"""Multiplications from which oneDNN's start-up is paid back."""


def multiply(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear`: inputs [..., k], weight [n, k], bias [n] -> [..., n]. One way for one shape,
    with gradients or without, so that recomputation repeats the bits of the first pass."""
    if _one_dnn_serves(inputs, weight):
        return _OneDnnLinear.apply(inputs, weight, bias)
    return F.linear(inputs, weight, bias)


def product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`multiply` without a graph, for functions that differentiate themselves: the three products
    of a linear layer, forward and backward, have one size and so go one way."""
    if _one_dnn_serves(left, right):
        return _product(left, right, bias)
    return F.linear(left, right, bias)


def _one_dnn_serves(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and inputs.numel() * weight.shape[0] >= _WORTHWHILE
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return _product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wants_inputs, wants_weight, _ = ctx.needs_input_grad
        grad = grads[0].flatten(0, -2)  # [rows, n]
        grad_inputs = grad_weight = None
        if wants_inputs:
            grad_inputs = _product(grad, weight.t()).view(inputs.shape)
        if wants_weight:
            grad_weight = _product(grad.t(), inputs.flatten(0, -2).t())
        return grad_inputs, grad_weight, grad.sum(0) if ctx.has_bias else None


def _product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """left [..., k] times the transpose of right [n, k], contiguous."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
