"""Layers of the image classifiers, and the function that fills them with initial values."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megatron.low_memory.activation_checkpoint import product_result
from megatron.model.init import initial_values, uniform_values
from megatron.tensor_parallel.products import multiply, must_widen

Filler = Literal["fan-in uniform", "fan-out normal", "normal 0.01"]
"""Distributions of initial weights.

fan-in uniform: U(-1/sqrt(fan_in), 1/sqrt(fan_in)), torch's default for both kinds of layers, biases
included. fan-out normal: N(0, 2 / fan_out), biases 0 (He et al. 2015, eq. 14; torchvision's
convolutions). normal 0.01: N(0, 0.01^2), biases 0 (torchvision's linear layers of VGG).
"""


class _Convolution(nn.Conv2d):
    # torch's `skip_init` would replace the parameters, which fake tensors do not allow.
    def reset_parameters(self) -> None:
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if must_widen(input.dtype, input.device):
            geometry = (self.stride, self.padding)
            return _WidenedConvolution.apply(input, self.weight, self.bias, *geometry)
        return super().forward(input)


class _WidenedConvolution(torch.autograd.Function):
    """A convolution of 16-bit tensors in fp32, which saves the 16-bit tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        images: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> torch.Tensor:
        ctx.save_for_backward(images, weight)
        ctx.stride, ctx.padding = stride, padding
        return product_result(_widened_convolution, images, weight, bias, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        found = torch.ops.aten.convolution_backward(
            grads[0].float(),
            images.float(),
            weight.float(),
            bias_sizes=[weight.shape[0]],
            stride=ctx.stride,
            padding=ctx.padding,
            dilation=[1, 1],
            transposed=False,
            output_padding=[0, 0],
            groups=1,
            output_mask=ctx.needs_input_grad[:3],
        )
        rounded = [None if grad is None else grad.to(images.dtype) for grad in found]
        return (*rounded, None, None)


def _widened_convolution(
    images: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> torch.Tensor:
    """Return a convolution of 16-bit tensors, rounded after the bias."""
    wide_bias = None if bias is None else bias.float()
    out = F.conv2d(images.float(), weight.float(), wide_bias, stride, padding)
    return out.to(images.dtype)


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return multiply(input, self.weight, self.bias)


def convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = False, **placed: Any
) -> nn.Conv2d:
    """Return a convolution without initial values, with an odd square kernel, padded by half of it.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        kernel: Side of the kernel.
        stride: Distance of the kernel's positions.
        bias: Whether a bias is added.
        placed: `dtype` and `device` of the parameters.
    """
    options: dict[str, Any] = {"stride": stride, "padding": kernel // 2, "bias": bias}
    return _Convolution(inputs, outputs, kernel, **options, **placed)


def linear(inputs: int, outputs: int, **placed: Any) -> nn.Linear:
    """Return a linear layer with a bias, without initial values."""
    return _Linear(inputs, outputs, **placed)


def fill(network: nn.Module, *, seed: int, convolutions: Filler, linears: Filler) -> None:
    """Fill all parameters of a network in place.

    The fillers apply to convolutions and linear layers; weights of norms become 1, biases 0. Values
    depend on the seed, the logical name and the shape alone.
    """
    for owner, module in network.named_modules():
        filler = {_Convolution: convolutions, _Linear: linears}.get(type(module))
        for leaf, param in module.named_parameters(recurse=False):
            shape, name = tuple(param.shape), f"{owner}.{leaf}"
            if filler is None:
                values = torch.full(shape, 1.0 if leaf == "weight" else 0.0)
            elif filler == "fan-in uniform":
                weight = module.get_parameter("weight")
                bound = 1 / math.sqrt(weight[0].numel())
                values = uniform_values(seed, name, shape, bound)
            elif leaf == "bias":
                values = torch.zeros(shape)
            else:
                std = 0.01 if filler == "normal 0.01" else math.sqrt(2 / param[:, 0].numel())
                values = initial_values(seed, name, shape, std)
            with torch.no_grad():
                param.copy_(values)
