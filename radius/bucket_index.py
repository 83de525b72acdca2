"""The interface of an index of selected entries, with its common methods. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron.data_parallel.reducer import SparseIndex

if TYPE_CHECKING:
    import torch

    from megatron.sparse.selection import Selection


class SentIndex(SparseIndex, Protocol):
    """The positions whose values are sent in a step."""

    def clear(self, flat: torch.Tensor) -> None:
        """Set the entries at the positions to 0, including non-finite ones."""
        ...


class BucketIndex(SentIndex, Protocol):
    """The entries selected in one bucket; none at first. Ranges are positions in the bucket.

    The two subclasses differ in how they store positions. Methods with a body here use only
    `selected` and `choose`.
    """

    def selected(self, start: int, length: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield `(lo, hi, selected)` for consecutive pieces of `[start, start + length)`.

        `selected` is a bool tensor over `[lo, hi)`.
        """
        ...

    def choose(self, start: int, selection: Selection) -> None:
        """Replace the selection in `[start, start + selection.n)`."""
        ...

    def choose_again(self, start: int, selection: Selection) -> tuple[int, int | torch.Tensor]:
        """Choose; return how many entries were selected before, and how many of these again.

        A bitmap returns the second number as an int64 [] tensor, since it may be on a GPU, for
        which the host does not wait.
        """
        ...

    def count(self, start: int, length: int) -> int:
        """Return the number of selected entries in `[start, start + length)`."""
        ...

    def flushed(self, ranges: Sequence[tuple[int, int]]) -> SentIndex:
        """Return an index of these positions and of all positions in the ranges `[start, stop)`.

        Ranges are ascending and disjoint; their positions among the values are the `runs`.
        """
        ...

    def take(self, flat: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0) -> None:
        """Write the entries at the positions, times `scale`, to `out`, and zero them in `flat`.

        The entries must be finite; `clear` also zeroes others.
        """
        ...

    def place(self, values: torch.Tensor, flat: torch.Tensor) -> None:
        """Overwrite `flat`, of the same dtype, with the values at the positions and 0 elsewhere."""
        ...

    def clear_part(self, flat: torch.Tensor, start: int, length: int) -> None:
        """Set the entries at positions in `[start, start + length)` to 0."""
        ...

    def gather_rest(self, flat: torch.Tensor, out: torch.Tensor, start: int, length: int) -> None:
        """Write the unselected entries in `[start, start + length)` to `out`, in order."""
        at = 0
        for lo, hi, selected in self.selected(start, length):
            rest = flat[lo:hi][~selected]
            out[at : at + rest.numel()] = rest
            at += rest.numel()

    def place_rest(self, values: torch.Tensor, flat: torch.Tensor, start: int, length: int) -> None:
        """Write `values`, from `gather_rest`, back to the unselected entries of `flat`.

        Selected entries are not changed. `values` may be on another device.
        """
        from megatron.transfer import to_device

        at = 0
        for lo, hi, selected in self.selected(start, length):
            rest = ~selected
            count = int(rest.sum())
            flat[lo:hi].masked_scatter_(rest, to_device(values[at : at + count], flat.device))
            at += count

    def packed(self, start: int, length: int) -> torch.Tensor:
        """Return the selection in `[start, start + length)`: uint8 on the CPU, bit 7 first.

        `start` must be a multiple of 8, the entries of a byte.
        """
        ...

    def load(self, start: int, length: int, packed: torch.Tensor) -> None:
        """Replace the selection in `[start, start + length)` by one that `packed` returned."""
        import numpy as np
        import torch

        from megatron.sparse.selection import GivenSelection

        bits = np.unpackbits(packed.numpy(), count=length).view(np.bool_)
        self.choose(start, GivenSelection(torch.from_numpy(bits)))
