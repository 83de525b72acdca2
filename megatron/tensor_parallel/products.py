"""Matrix products of a layer on a CPU, by the faster library and the faster dtype.

torch computes fp32 products with MKL and 16-bit ones with oneDNN. On a core of an AMD EPYC (Zen 5,
AVX512) MKL multiplies fp32 at 98 GFLOP/s and oneDNN at 160-220; with AVX2 only, both are about
equal. On Intel's CPUs MKL is faster (`tools/bench/products`), as oneDNN copies the operands of a
backward pass that are transposed.

A CPU without 16-bit multiply-add units runs oneDNN's 16-bit products at a sixth of the fp32 rate or
less. There, operands are widened to fp32, a slice of the weight at a time so that it stays in
cache, sums are fp32, and results are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron.low_memory.activation_checkpoint import product_result
from megatron.processor import is_intel, multiplies_natively, vector_instructions

_WORTHWHILE = 1 << 22
"""Multiplications from which oneDNN is faster despite its start-up time."""
_WIDENED_ELEMENTS = 1 << 20
"""Weight elements widened at a time."""


def multiply(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `F.linear`: inputs [..., k], weight [n, k], bias [n] -> [..., n].

    The implementation depends on the shape, not on gradients, so that recomputation is bitwise
    equal.
    """
    if uses_one_dnn(inputs, weight):
        return one_dnn_linear(inputs, weight, bias)
    if must_widen(inputs.dtype, inputs.device):
        return _WidenedLinear.apply(inputs, weight, bias)
    return F.linear(inputs, weight, bias)


def product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `multiply` inside an autograd function, which has a backward of its own.

    The three products of a linear layer have the same number of multiplications, and so use the
    same implementation.
    """
    if uses_one_dnn(left, right):
        return _product(left, right, bias)
    if must_widen(left.dtype, left.device):
        return _widened_product(left, right, bias)
    return F.linear(left, right, bias)


def batched_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute `left @ right`: [..., n, k] and [..., k, m], of the same batches -> [..., n, m]."""
    if must_widen(left.dtype, left.device):
        return _WidenedBatchedProduct.apply(left, right)
    return left @ right


def must_widen(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products of a dtype on a device are computed in fp32 instead.

    True on a CPU without multiply-add units for the dtype; see `megatron.processor`.
    """
    # Compiled code keeps torch's functions, for which the compiler has its own kernels.
    return (
        not torch.compiler.is_compiling()
        and device.type == "cpu"
        and not multiplies_natively(dtype)
    )


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return an operand of a product in the dtype of the arithmetic: fp32 where `must_widen`.

    Casts are differentiable. The caller casts the result back.
    """
    return tensor.float() if must_widen(tensor.dtype, tensor.device) else tensor


def uses_one_dnn(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether oneDNN computes the product of `inputs` [..., k] and `weight` [n, k]."""
    return (
        not torch.compiler.is_compiling()
        and inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and inputs.numel() * weight.shape[0] >= _WORTHWHILE
        and torch.backends.mkldnn.is_available()
        and vector_instructions() == "AVX512"
        and not is_intel()
    )


def one_dnn_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute `multiply` of fp32 tensors on a CPU by oneDNN."""
    return _OneDnnLinear.apply(inputs, weight, bias)


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return product_result(_product, inputs, weight, bias)

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
    """Return left [..., k] times the transpose of right [n, k], contiguous."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


class _WidenedLinear(torch.autograd.Function):
    """A linear function of 16-bit tensors in fp32, which saves the 16-bit tensors."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return product_result(_widened_product, inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wants_inputs, wants_weight, _ = ctx.needs_input_grad
        grad = grads[0].reshape(-1, weight.shape[0])  # [rows, n]
        rows = inputs.reshape(-1, inputs.shape[-1]).float() if wants_weight else None
        sums = torch.zeros(grad.shape[0], weight.shape[1]) if wants_inputs else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        for part in _slices(weight):
            some = grad[:, part].float()
            if sums is not None:
                sums.addmm_(some, weight[part].float())
            if grad_weight is not None and rows is not None:
                grad_weight[part] = some.t() @ rows
        grad_inputs = None if sums is None else sums.to(inputs.dtype).view(inputs.shape)
        return grad_inputs, grad_weight, grad.sum(0) if ctx.has_bias else None


class _WidenedBatchedProduct(torch.autograd.Function):
    """Products of 16-bit matrices in fp32, which save the 16-bit matrices."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        return product_result(_widened_batched_product, left, right)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        left, right = ctx.saved_tensors
        wants_left, wants_right = ctx.needs_input_grad
        grad, grad_left, grad_right = grads[0].float(), None, None
        if wants_left:
            grad_left = (grad @ right.float().transpose(-1, -2)).to(left.dtype)
        if wants_right:
            grad_right = (left.float().transpose(-1, -2) @ grad).to(right.dtype)
        return grad_left, grad_right


def _widened_batched_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.float() @ right.float()).to(left.dtype)


def _widened_product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return left [..., k] times right [n, k] transposed, rounded after the bias."""
    rows = left.reshape(-1, left.shape[-1]).float()
    out = left.new_empty(*left.shape[:-1], right.shape[0])
    columns = out.view(-1, right.shape[0])
    for part in _slices(right):
        some = right[part].float().t()
        columns[:, part] = (
            rows @ some if bias is None else torch.addmm(bias[part].float(), rows, some)
        )
    return out


def _slices(weight: torch.Tensor) -> Iterator[slice]:
    """Yield slices of the rows of a weight [n, k], each of which stays in cache in fp32."""
    size = max(1, _WIDENED_ELEMENTS // max(1, weight.shape[1]))
    return (slice(start, start + size) for start in range(0, weight.shape[0], size))
