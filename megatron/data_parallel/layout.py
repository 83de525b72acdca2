"""The layouts, which define the entries of a parameter that are stored. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

PIECE = 256 * 1024
"""Number of entries that are cast at a time on a CPU, small enough for its cache."""


class BucketLayout(Protocol):
    """A choice of the entries of each parameter that have a gradient, master weight and moments."""

    def numel(self, name: str, param: torch.Tensor) -> int:
        """Return the number of stored entries of this parameter."""
        ...

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Write the stored entries of a dense tensor to the slice `out`, cast to its dtype."""
        ...

    def gather_add(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Add the stored entries of a dense gradient to its slice `out`."""
        ...

    def scatter(self, name: str, flat: torch.Tensor, param: torch.Tensor) -> None:
        """Write stored entries to the dense `param` in place, unless `param` is a view of them."""
        ...

    def bind(self, name: str, flat: torch.Tensor, leaves: Sequence[torch.nn.Parameter]) -> None:
        """Fill the master slice `flat` from the parameter, once, before training.

        The leaves of a parameter that is stored whole become views of a `flat` of their dtype, to
        save the copy.
        """
        ...

    def mask(self, name: str) -> torch.Tensor | None:
        """Return which entries of the flattened parameter are stored, padding excluded.

        The mask is bool, 1-D, on the CPU; None if all entries, including padding, are stored.
        """
        ...

    def positions(self, name: str, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Return the positions of stored entries `[start, stop)` in the flattened parameter.

        int64 [stop - start], ascending, on `device`.
        """
        ...

    def fingerprint(self) -> str:
        """Return a hex digest of the stored entries; equal on every data-parallel rank."""
        ...


Masks = Mapping[str, "torch.Tensor"]
"""Masks by logical name: bool, 1-D, for the flattened parameter in this rank's memory.

A parameter without a mask has all of its entries.
"""


class DenseLayout:
    """The layout that stores every entry: a slice is the flattened parameter."""

    def numel(self, name: str, param: torch.Tensor) -> int:
        return param.numel()

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(dense.reshape(-1))

    def gather_add(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        flat = dense.reshape(-1)
        if flat.element_size() >= out.element_size() or flat.device.type != "cpu":
            out.add_(flat)
            return
        # torch would first widen the whole tensor in a temporary.
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

    def positions(self, name: str, start: int, stop: int, device: torch.device) -> torch.Tensor:
        import torch

        return torch.arange(start, stop, device=device)

    def fingerprint(self) -> str:
        return hashlib.sha256(b"dense").hexdigest()
