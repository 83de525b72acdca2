"""Products of sharded layers with their collectives, eager and in compiled graphs.

Eager layers call autograd functions, whose forward can overwrite its terms and is left out of some
recomputations. torch.compile cannot trace the work handles, counters and reports of a `Group`, so
that compiled layers call operators of torch instead, which run the same functions. A graph then
has a layer whole, and the compiler fuses what lies between two products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron.low_memory.activation_checkpoint import product_result
from megatron.tensor_parallel.collectives import TensorParallel, of_number
from megatron.tensor_parallel.products import product


def multiply_by_rows(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel
) -> torch.Tensor:
    """Multiply as `F.linear` by this rank's share of inputs, and sum over ranks (g).

    k is this rank's share. `inputs` [b, s, k], or [tp * b, s/tp, k] with sequence parallelism;
    `weight` [n, k]; `bias` [n], added once, after the sum. Returns [b, s, n] or [b, s/tp, n].
    """
    if torch.compiler.is_compiling():
        return _rows_in_graph(inputs, weight, bias, tp.number)
    return _MultiplyByRows.apply(inputs, weight, bias, tp)


def multiply_by_columns(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel
) -> torch.Tensor:
    """Gather the inputs if needed (f), and multiply as `F.linear` by this rank's share of outputs.

    n is this rank's share. `inputs` [b, s, k], or [b, s/tp, k] with sequence parallelism; `weight`
    [n, k]; `bias` [n]. Returns [b, s, n] or [tp * b, s/tp, n].
    """
    if torch.compiler.is_compiling():
        return _columns_in_graph(inputs, weight, bias, tp.number)
    return _MultiplyByColumns.apply(inputs, weight, bias, tp)


def _by_rows(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel
) -> torch.Tensor:
    total, _ = tp.add_up(product(inputs, weight))
    return total if bias is None else total.add_(bias)


def _rows_gradients(
    grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, tp: TensorParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the inputs and of the weight."""
    # Every term has the gradient of the sum.
    rows, _ = tp.gather(grad)
    grad = rows.flatten(0, -2)
    grad_inputs = product(grad, weight.t()).view(inputs.shape)
    return grad_inputs, product(grad.t(), inputs.flatten(0, -2).t())


def _by_columns(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel
) -> torch.Tensor:
    rows, _ = tp.gather(inputs)
    return product(rows, weight, bias)


def _columns_gradients(
    grad: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    tp: TensorParallel,
    *,
    bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the inputs, of the weight and, if it is asked for, of the bias."""
    # Collectives overlap with products, with sequence parallelism (A) or without:
    #
    #     gather input again (A)   |-----------|
    #     gradient of the input    |=========|
    #     its sum over ranks                 |--------------|
    #     gradient of the weight                |=========|
    #
    # Keeping the gathered input from forward would undo the memory saving.
    rows, arriving = tp.gather(inputs, async_op=True)
    grad = grad.flatten(0, -2)  # [rows, n]
    terms = product(grad, weight.t()).view(rows.shape)
    grad_inputs, adding = tp.add_up(terms, async_op=True)
    if arriving is not None:
        arriving.wait()
    grad_weight = product(grad.t(), rows.flatten(0, -2).t())
    grad_bias = grad.sum(0) if bias else None
    if adding is not None:
        adding.wait()
    return grad_inputs, grad_weight, grad_bias


def _save(ctx: Any, inputs: Any, output: Any = None) -> None:
    """Keep what the gradients need of the operands: inputs, weight, bias and the ranks."""
    *saved, bias, ctx.tp = inputs
    ctx.save_for_backward(*saved)
    ctx.has_bias = bias is not None


class _MultiplyByRows(torch.autograd.Function):
    """Product and sum in one function, so that the sum can overwrite its terms."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> torch.Tensor:
        _save(ctx, operands)
        return product_result(_by_rows, *operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        grad_inputs, grad_weight = _rows_gradients(grads[0], inputs, weight, ctx.tp)
        grad_bias = grads[0].flatten(0, -2).sum(0) if ctx.has_bias else None
        return grad_inputs, grad_weight, grad_bias, None


class _MultiplyByColumns(torch.autograd.Function):
    """Product whose backward overlaps collectives with products."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> torch.Tensor:
        _save(ctx, operands)
        return product_result(_by_columns, *operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        found = _columns_gradients(grads[0], inputs, weight, ctx.tp, bias=ctx.has_bias)
        return *found, None


# ---- operators of compiled graphs ---------------------------------------------------------------

_operator = torch.library.custom_op
_FORWARD = "(Tensor inputs, Tensor weight, Tensor? bias, int tp) -> Tensor"
_BACKWARD = "(Tensor grad, Tensor inputs, Tensor weight, int tp) -> (Tensor, Tensor)"


@_operator("sparsetron::multiply_by_rows", mutates_args=(), schema=_FORWARD)
def _rows_in_graph(inputs, weight, bias, tp):
    return _by_rows(inputs, weight, bias, of_number(tp))


@_operator("sparsetron::rows_gradients", mutates_args=(), schema=_BACKWARD)
def _rows_gradients_in_graph(grad, inputs, weight, tp):
    return _rows_gradients(grad, inputs, weight, of_number(tp))


@_operator("sparsetron::multiply_by_columns", mutates_args=(), schema=_FORWARD)
def _columns_in_graph(inputs, weight, bias, tp):
    return _by_columns(inputs, weight, bias, of_number(tp))


@_operator("sparsetron::columns_gradients", mutates_args=(), schema=_BACKWARD)
def _columns_gradients_in_graph(grad, inputs, weight, tp):
    return _columns_gradients(grad, inputs, weight, of_number(tp), bias=False)[:2]


def _shape_by_rows(inputs, weight, bias, tp):
    ranks = of_number(tp).size if of_number(tp).cuts_sequence else 1
    return inputs.new_empty(inputs.shape[0] // ranks, *inputs.shape[1:-1], weight.shape[0])


def _shape_by_columns(inputs, weight, bias, tp):
    ranks = of_number(tp).size if of_number(tp).cuts_sequence else 1
    return inputs.new_empty(inputs.shape[0] * ranks, *inputs.shape[1:-1], weight.shape[0])


def _gradient_shapes(grad, inputs, weight, tp):
    return inputs.new_empty(inputs.shape), weight.new_empty(weight.shape)


def _differentiable(forward, shape, backward):
    """Tell torch the shapes of an operator's results, and its derivative, which is another one."""

    def gradients(ctx, grad):
        # The compiler fuses this sum with its neighbours.
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return *backward(grad, *ctx.saved_tensors, ctx.tp), grad_bias, None

    forward.register_fake(shape)
    backward.register_fake(_gradient_shapes)
    forward.register_autograd(gradients, setup_context=_save)


_differentiable(_rows_in_graph, _shape_by_rows, _rows_gradients_in_graph)
_differentiable(_columns_in_graph, _shape_by_columns, _columns_gradients_in_graph)
