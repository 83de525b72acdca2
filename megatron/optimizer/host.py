"""Layout operations for states in host memory of parameters on a device."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.data_parallel.layout import BucketLayout


class HostLayout(Protocol):
    """The part of a `BucketLayout` that converts between states and dense tensors."""

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None: ...

    def scatter(self, name: str, flat: torch.Tensor, param: torch.Tensor) -> None: ...


class MaskedHostLayout:
    """The `gather` and `scatter` of a layout by its masks: slow, but for tensors on any device."""

    def __init__(self, layout: BucketLayout) -> None:
        self._layout = layout

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Write the stored entries of a dense tensor to the slice `out`, cast to its dtype."""
        mask, flat = self._layout.mask(name), dense.reshape(-1)
        out.copy_(flat if mask is None else flat[mask])

    def scatter(self, name: str, flat: torch.Tensor, param: torch.Tensor) -> None:
        """Write stored entries to the dense `param`, in place, cast to its dtype."""
        mask, dense = self._layout.mask(name), param.view(-1)
        if mask is None:
            dense.copy_(flat)
        else:
            dense[mask] = flat.to(dense.dtype)


def beside(layout: BucketLayout, state: torch.Tensor, param: torch.Tensor) -> HostLayout:
    """Return a layout that works for states on the device of `state`."""
    return layout if state.device == param.device else MaskedHostLayout(layout)
