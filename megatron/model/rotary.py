"""Rotary position embeddings in the half-rotation layout of GPT-NeoX and Megatron.

Coordinate i of the rotated part is paired with coordinate i + half, and the pair is rotated by
position * base^(-i / half) (Su et al. 2021, eq. 15, with that pairing).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from megatron.config.sections import ROPE_SCALING


class Rotary(NamedTuple):
    """Cosines and sines in fp32, [s, 1, half] or [b, s, 1, half], for heads [b, s, heads, d]."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotary_table(
    positions: int,
    *,
    head_dim: int,
    percent: float,
    base: float,
    scaling: float | None = None,
    device: torch.device,
) -> Rotary:
    """Return cosines and sines of positions 0..positions-1, [positions, 1, half].

    The first `int(head_dim * percent)` coordinates of a head, rounded down to even, are rotated, as
    in Megatron. `scaling`: the factor for `scale_frequencies`; None for no scaling.
    """
    rotated = int(head_dim * percent) // 2 * 2
    frequencies = rotary_frequencies(rotated, base=base)
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, scaling)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)[:, None]
    return Rotary(angles.cos().float().to(device), angles.sin().float().to(device))


def rotary_frequencies(rotated: int, *, base: float) -> torch.Tensor:
    """Return radians per position of each pair of `rotated` coordinates, [rotated / 2] in fp64."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    return base**-exponents


def scale_frequencies(frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    """Scale frequencies for longer texts, as Llama 3.1 does.

    A pair that does not complete a turn within the original length turns `factor` times slower, a
    pair of four or more turns is unchanged, and between these both are mixed linearly in the number
    of turns.
    """
    low, high = ROPE_SCALING["low_freq_factor"], ROPE_SCALING["high_freq_factor"]
    turns = ROPE_SCALING["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def rotate(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate heads [b, s, heads, head_dim] by position; computed in fp32, contiguous."""
    return _Rotate.apply(heads, rotary.cos, rotary.sin)


class _Rotate(torch.autograd.Function):
    """A rotation whose gradient is the reverse rotation, so that only the table is saved."""

    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, -sin), None, None


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    passed = heads[..., 2 * half :]
    return torch.cat([turned.to(heads.dtype), passed], dim=-1)
