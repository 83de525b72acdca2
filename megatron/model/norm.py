"""Normalisations, whose kernels compute statistics in fp32 for any input dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension with weight and bias, both filled by `init`."""

    def __init__(
        self, size: int, *, epsilon: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise [..., size]; shape and dtype stay."""
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, weight only (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(
        self, size: int, *, epsilon: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise [..., size]; shape and dtype stay."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


NORMALIZATIONS: dict[str, type[LayerNorm] | type[RMSNorm]] = {
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
}
