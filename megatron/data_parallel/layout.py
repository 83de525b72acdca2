"""Which entries of each parameter have a gradient, a master weight and moments. Loads no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

PIECE = 256 * 1024
"""Entries cast at a time on a CPU, so that they stay in its cache."""


class BucketLayout(Protocol):
    """Which coordinates of each parameter have a gradient, a master weight and moments."""

    def numel(self, name: str, param: torch.Tensor) -> int:
        """Number of stored entries of this parameter."""
        ...

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Write the stored entries of a dense tensor, cast to `out`'s dtype, into its slice."""
        ...

    def gather_add(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Add the stored entries of a dense gradient to its slice."""
        ...

    def scatter(self, name: str, flat: torch.Tensor, param: torch.Tensor) -> None:
        """Put stored entries back into the dense parameter, in place, cast to its dtype.

        Where `param` is itself a view of `flat` there is nothing to do."""
        ...

    def bind(self, name: str, flat: torch.Tensor, leaves: Sequence[torch.nn.Parameter]) -> None:
        """Fill the fp32 master slice `flat` from the parameter, once, before training. Where the
        parameter is fp32 and stored whole, make its leaves views of `flat` and save the copy."""
        ...

    def mask(self, name: str) -> torch.Tensor | None:
        """Which entries of the flattened parameter are stored (bool, 1-D, on the CPU); None where
        all are. Vocabulary padding is not, where there is a mask."""
        ...

    def fingerprint(self) -> str:
        """Hex digest of which coordinates exist; equal on every data-parallel rank."""
        ...


Masks = Mapping[str, "torch.Tensor"]
"""Which entries of parameters exist: bool, 1-D, one for each entry of the flattened parameter as it
lies in this rank's memory, by logical name. A parameter without a mask has all of its entries."""


class DenseLayout:
    """Every coordinate exists: a parameter's slice is the parameter, flattened."""

    def numel(self, name: str, param: torch.Tensor) -> int:
        return param.numel()

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(dense.reshape(-1))

    def gather_add(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        flat = dense.reshape(-1)
        if flat.element_size() >= out.element_size() or flat.device.type != "cpu":
            out.add_(flat)
            return
        # torch would widen all of it first, in memory of its own.
        for start in range(0, flat.numel(), PIECE):
            piece = flat[start : start + PIECE]
            out[start : start + PIECE].add_(piece.to(out.dtype))

    def scatter(self, name: str, flat: torch.Tensor, param: torch.Tensor) -> None:
        if param.data_ptr() != flat.data_ptr():
            param.view(-1).copy_(flat)

    def bind(self, name: str, flat: torch.Tensor, leaves: Sequence[torch.nn.Parameter]) -> None:
        param = leaves[0].detach()
        flat.copy_(param.reshape(-1))
        if param.dtype == flat.dtype:
            for leaf in leaves:
                leaf.data = flat.view(param.shape)

    def mask(self, name: str) -> torch.Tensor | None:
        return None

    def fingerprint(self) -> str:
        return hashlib.sha256(b"dense").hexdigest()
