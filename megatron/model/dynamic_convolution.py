"""Dynamic convolution (Wu et al. 2019, "Pay Less Attention", 3.2).

Each position computes a kernel for every head from its own input; a softmax makes the taps of a
kernel positive with sum 1, and all channels of a head share the kernel:

    out[t, c] = sum_j kernel[t, head(c), j] * x[t + j - padding, c]

Shapes: b sentences, t positions, c channels, h heads, k taps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 64
"""Longest run of positions that one band matrix covers.

A band matrix has k taps in each of its rows of BLOCK + k - 1 entries: longer rows waste products,
shorter rows copy more overlapping inputs."""


class Matrix(nn.Module):
    """A weight matrix [rows, columns] without a bias, filled by the model."""

    def __init__(
        self, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device))


class DynamicConvolution(nn.Module):
    """A depthwise convolution whose kernels are functions of the input: [b, t, c] -> [b, t, c].

    Args:
        size: channels.
        heads: number of kernels at each position; divides `size`.
        kernel_size: taps of a kernel.
        padding: taps before the position itself: `kernel_size - 1` for a causal convolution.
        weight_dropout: probability of dropping a tap in training (DropConnect).
    """

    def __init__(
        self,
        size: int,
        *,
        heads: int,
        kernel_size: int,
        padding: int,
        weight_dropout: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kernel_size = kernel_size
        self.padding = padding
        self.weight_dropout = weight_dropout
        self.weight_linear = Matrix(heads * kernel_size, size, dtype=dtype, device=device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the convolution: [b, t, c] -> [b, t, c]. Positions outside 0..t-1 count as 0."""
        return convolve(hidden, self.kernels(hidden), padding=self.padding)

    def step(self, hidden: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """Apply a causal convolution to one new position: [b, 1, c] -> [b, 1, c].

        `window` [b, k, c] holds the last k inputs, that of the new position last; inputs before
        the first position are 0.
        """
        assert self.padding == self.kernel_size - 1, "a later position would be needed"
        kernels = self.kernels(hidden)[:, 0]  # [b, h, k]
        taps = window.unflatten(2, (self.heads, -1)).permute(0, 2, 1, 3)  # [b, h, k, c / h]
        return (kernels[:, :, None] @ taps).flatten(1)[:, None]

    def kernels(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the kernels [b, t, h, k] of every position, in the dtype of `hidden`."""
        logits = F.linear(hidden, self.weight_linear.weight)
        logits = logits.unflatten(2, (self.heads, self.kernel_size))
        kernels = logits.softmax(-1, dtype=torch.float32)
        return F.dropout(kernels, self.weight_dropout, self.training).to(hidden.dtype)


def convolve(hidden: torch.Tensor, kernels: torch.Tensor, *, padding: int) -> torch.Tensor:
    """Convolve `hidden` [b, t, c] with a kernel for each position and head, as a band matrix.

    The k taps of neighbouring positions overlap in all inputs but one, so a product of a band
    matrix with the inputs reads each input once where a sum over taps would read it k times.

    Args:
        hidden: [b, t, c].
        kernels: [b, t, h, k] in the dtype of `hidden`.
        padding: taps before the position itself.

    Returns:
        The sums [b, t, c] of `out` in the formula above.
    """
    length, (heads, width) = hidden.shape[1], kernels.shape[2:]
    values = hidden.unflatten(2, (heads, -1)).transpose(1, 2)  # [b, h, t, c / h]
    kernels = kernels.transpose(1, 2)  # [b, h, t, k]
    if length <= BLOCK:
        # Columns of positions outside the sentence are left out.
        sums = band_matrix(kernels)[..., padding : padding + length] @ values
    else:
        blocks = -(-length // BLOCK)
        rest = blocks * BLOCK - length
        kernels = F.pad(kernels, (0, 0, 0, rest)).unflatten(2, (blocks, BLOCK))
        values = F.pad(values, (0, 0, padding, width - 1 - padding + rest))
        values = values.unfold(2, BLOCK + width - 1, BLOCK)  # [b, h, blocks, c / h, inputs]
        sums = band_matrix(kernels) @ values.transpose(-1, -2)
        sums = sums.flatten(2, 3)[:, :, :length]
    return sums.transpose(1, 2).flatten(2)


def band_matrix(rows: torch.Tensor) -> torch.Tensor:
    """Shift row i of [..., n, k] by i places to the right: [..., n, n + k - 1], 0 elsewhere."""
    count, width = rows.shape[-2:]
    # Rows of n + k entries that are read as rows of n + k - 1 begin one place later each time.
    flat: Any = F.pad(rows, (0, count)).flatten(-2)
    return flat[..., : count * (count + width - 1)].unflatten(-1, (count, count + width - 1))
