"""Triton kernels of the cross-entropy, with one pass over the logits in each direction.

The reference in `cross_entropy.py` passes over an fp32 copy of the logits five times each way,
which a CPU's cache hides but a GPU's does not. Imported on CUDA only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_BLOCK = 4096
"""Columns that a program holds at a time."""
_WARPS = 8


def statistics(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum and the sum of exp(logit - maximum) of each row; two fp32 tensors [n].

    Rows of `logits` [n, columns] must be contiguous.
    """
    assert logits.stride(1) == 1, "rows are read as they lie"
    rows, columns = logits.shape
    maximum = torch.empty(rows, dtype=torch.float32, device=logits.device)
    exp_sum = torch.empty_like(maximum)
    kernel: Any = _statistics  # Triton takes the grid in brackets
    kernel[(rows,)](
        logits, maximum, exp_sum, logits.stride(0), columns, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return maximum, exp_sum


def write_gradient(
    logits: torch.Tensor,
    maximum: torch.Tensor,
    scale: torch.Tensor,
    targets: torch.Tensor,
    at_target: torch.Tensor,
) -> None:
    """Overwrite `logits` [n, columns] in place with their gradient.

    Each row becomes (exp(logit - maximum) + at_target at its target) * scale; all other arguments
    are [n]. Autograd does not see the write.
    """
    rows, columns = logits.shape
    kernel: Any = _gradient
    kernel[(rows,)](
        logits,
        maximum,
        scale,
        targets,
        at_target,
        logits.stride(0),
        columns,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def _statistics(logits, maximum, exp_sum, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    # Each lane has a running maximum and sum, combined at the end. The first maximum is finite,
    # since -inf - -inf is NaN.
    highest = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(start + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, value)
        total = total * tl.exp(highest - higher) + tl.exp(value - higher)
        highest = higher
    most = tl.max(highest, axis=0)
    tl.store(maximum + row, most)
    tl.store(exp_sum + row, tl.sum(total * tl.exp(highest - most), axis=0))


@triton.jit
def _gradient(logits, maximum, scale, targets, at_target, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    most, factor = tl.load(maximum + row), tl.load(scale + row)
    target, extra = tl.load(targets + row), tl.load(at_target + row)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(start + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        slope = (tl.exp(value - most) + tl.where(at == target, extra, 0.0)) * factor
        tl.store(start + at, slope.to(logits.dtype.element_ty), mask=at < columns)
