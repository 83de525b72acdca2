"""Normalisations. Statistics are fp32 inside the kernels whatever the dtype of the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LayerNorm(nn.Module):
    """LayerNorm over the last dim with weight and bias; both are left for `init` to fill."""

    def __init__(
        self, size: int, *, epsilon: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size], same dtype."""
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """RMSNorm over the last dim, weight only (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(
        self, size: int, *, epsilon: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size], same dtype."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


NORMALIZATIONS: dict[str, type[LayerNorm] | type[RMSNorm]] = {
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
}
