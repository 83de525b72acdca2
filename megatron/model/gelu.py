"""GELU for 16 bit on the CPU, where torch's own spends most of its time in tanh.

The tanh form (Hendrycks and Gimpel 2016) is x * sigmoid(u), u = 2 sqrt(2 / pi) (x + 0.044715 x^3).
Forward also computes the derivative while data is in cache in fp32, and saves it instead of the
input, so that backward is one product. Values and derivative are rounded to 16 bit once each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _SLOPE
_CHUNK_ELEMENTS = 1 << 19


def gelu_tanh(inputs: torch.Tensor) -> torch.Tensor:
    """Apply GELU in GPT-2's tanh form to a floating-point tensor of any shape and device.

    The chunked form serves 16-bit CPU tensors that need a gradient; torch's function serves others.
    """
    chunked = inputs.device.type == "cpu" and inputs.dtype in (torch.bfloat16, torch.float16)
    if torch.compiler.is_compiling():
        chunked = False  # the compiler fuses the loop itself
    if chunked and inputs.requires_grad and torch.is_grad_enabled():
        return _ChunkedGelu.apply(inputs)
    return F.gelu(inputs, approximate="tanh")


class _ChunkedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.contiguous()
        outputs, derivative = torch.empty_like(inputs), torch.empty_like(inputs)
        chunks = (part.flatten().split(_CHUNK_ELEMENTS) for part in (inputs, outputs, derivative))
        size = min(inputs.numel(), _CHUNK_ELEMENTS)
        scratch = torch.empty(3, size, dtype=torch.float32)
        for source, value, slope in zip(*chunks, strict=True):
            x, gate, t = scratch[:, : source.numel()]
            x.copy_(source)
            torch.mul(x, x, out=t)
            torch.mul(t, _CUBIC, out=gate).add_(_SLOPE).mul_(x).sigmoid_()
            # derivative = gate * (1 + x u' (1 - gate)), u' = slope + 3 * cubic * x^2
            t.mul_(3 * _CUBIC).add_(_SLOPE).mul_(x)
            t.addcmul_(t, gate, value=-1).add_(1).mul_(gate)
            value.copy_(x.mul_(gate))
            slope.copy_(t)
        ctx.save_for_backward(derivative)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (derivative,) = ctx.saved_tensors
        return grads[0] * derivative
