"""What a layout does, for states in host memory of parameters on a device."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.data_parallel.layout import BucketLayout


class HostLayout(Protocol):
    """The part of a `BucketLayout` that brings states and dense tensors together."""

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None: ...

    def scatter(self, name: str, flat: torch.Tensor, param: torch.Tensor) -> None: ...


class MaskedHostLayout:
    """`gather` and `scatter` of a layout, whose own index is on the device, by its masks: slow, and
    for tensors of any memory."""

    def __init__(self, layout: BucketLayout) -> None:
        self._layout = layout

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Write the stored entries of a dense tensor, cast to `out`'s dtype, into its slice."""
        mask, flat = self._layout.mask(name), dense.reshape(-1)
        out.copy_(flat if mask is None else flat[mask])

    def scatter(self, name: str, flat: torch.Tensor, param: torch.Tensor) -> None:
        """Put stored entries back into a dense tensor, in place, cast to its dtype."""
        mask, dense = self._layout.mask(name), param.view(-1)
        if mask is None:
            dense.copy_(flat)
        else:
            dense[mask] = flat.to(dense.dtype)


def beside(layout: BucketLayout, state: torch.Tensor, param: torch.Tensor) -> HostLayout:
    """A layout as it works on states that are where `state` is."""
    return layout if state.device == param.device else MaskedHostLayout(layout)
