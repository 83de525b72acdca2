"""The base classes of an index of selected entries, whose stores are bitmaps and offsets.

Loads no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron.data_parallel.reducer import IndexRange, SparseIndex

if TYPE_CHECKING:
    import torch

    from megatron.data_parallel.reducer import ReducedGrad
    from megatron.optimizer.update_rules import Hyper, UpdateRule
    from megatron.sparse.selection import Selection


class SentIndex(SparseIndex, ABC):
    """The positions whose values are sent in a step, ascending.

    `flat` is 1-D, contiguous and as long as the bucket; `values` and `out` are the compact vector,
    [numel], in the order of the positions. All tensors are on the device of the index. The caller
    passes tensors that fit: the compiled kernels raise `ValueError` for others, Triton's check
    nothing.
    """

    runs: Sequence[IndexRange] = ()
    _chunk: int
    """Number of entries that `apply` expands together."""

    @property
    @abstractmethod
    def numel(self) -> int:
        """Number of positions."""

    @abstractmethod
    def gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Write the entries at the positions to `out`, of the same dtype."""

    @abstractmethod
    def place(self, values: torch.Tensor, flat: torch.Tensor) -> None:
        """Overwrite `flat`, of the same dtype, with the values at the positions and 0 elsewhere."""

    @abstractmethod
    def expand(
        self, values: torch.Tensor, start: int, stop: int, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Return `values` times `scale` at positions in `[start, stop)`, and 0 elsewhere.

        fp32 [stop - start], a tensor of its own.
        """

    @abstractmethod
    def clear(self, flat: torch.Tensor) -> None:
        """Set the entries at the positions to 0, including non-finite ones."""

    def apply(
        self,
        rule: UpdateRule,
        reduced: ReducedGrad,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        *,
        factor: float,
    ) -> None:
        """Apply an update rule as `SparseIndex.apply` says, to fp32 states in place."""
        if reduced.unselected == "frozen":
            hyper = hyper.decay(weight)
            self._apply_to_sent(rule, reduced, weight, moments, hyper, factor)
        else:
            assert reduced.steps_accumulated is None, "sums of several steps belong to frozen rests"
            self._apply_to_all(rule, reduced.values, weight, moments, hyper, factor)

    def _apply_to_all(
        self,
        rule: UpdateRule,
        values: torch.Tensor,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        factor: float,
    ) -> None:
        """Apply the rule to every chunk, with values expanded among zeros just before."""
        import torch

        length = weight.numel()
        scratch = torch.empty(min(self._chunk, length), dtype=torch.float32, device=weight.device)
        for start in range(0, length, self._chunk):
            cut = slice(start, min(start + self._chunk, length))
            grad = scratch[: cut.stop - start]
            self._expand_chunk(values, start, grad, factor)
            rule.apply(weight[cut], grad, [moment[cut] for moment in moments], hyper)

    @abstractmethod
    def _expand_chunk(
        self, values: torch.Tensor, start: int, grad: torch.Tensor, factor: float
    ) -> None:
        """Overwrite `grad`, of the chunk at `start`, with values times `factor` among zeros."""

    @abstractmethod
    def _apply_to_sent(
        self,
        rule: UpdateRule,
        reduced: ReducedGrad,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        factor: float,
    ) -> None:
        """Apply the rule to the sent entries only: gather, update, scatter."""


class BucketIndex(SentIndex):
    """The entries selected in one bucket; none at first. Ranges are positions in the bucket."""

    @abstractmethod
    def selected(self, start: int, length: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield `(lo, hi, selected)` for consecutive pieces of `[start, start + length)`.

        `selected` is a bool tensor over `[lo, hi)`.
        """

    @abstractmethod
    def choose(self, start: int, selection: Selection) -> None:
        """Replace the selection in `[start, start + selection.n)`."""

    @abstractmethod
    def choose_again(self, start: int, selection: Selection) -> tuple[int, int | torch.Tensor]:
        """Choose; return how many entries were selected before, and how many of these again.

        A bitmap returns the second number as an int64 [] tensor, since it may be on a GPU, for
        which the host does not wait.
        """

    @abstractmethod
    def count(self, start: int, length: int) -> int:
        """Return the number of selected entries in `[start, start + length)`."""

    @abstractmethod
    def flushed(self, ranges: Sequence[tuple[int, int]]) -> SentIndex:
        """Return an index of these positions and of all positions in the ranges `[start, stop)`.

        Ranges are ascending and disjoint; their positions among the values are the `runs`.
        """

    @abstractmethod
    def clear_part(self, flat: torch.Tensor, start: int, length: int) -> None:
        """Set the entries at positions in `[start, start + length)` to 0."""

    @abstractmethod
    def packed(self, start: int, length: int) -> torch.Tensor:
        """Return the selection in `[start, start + length)`: uint8 on the CPU, bit 7 first.

        `start` must be a multiple of 8, the entries of a byte.
        """

    def load(self, start: int, length: int, packed: torch.Tensor) -> None:
        """Replace the selection in `[start, start + length)` by one that `packed` returned."""
        import numpy as np
        import torch

        from megatron.sparse.selection import GivenSelection

        bits = np.unpackbits(packed.numpy(), count=length).view(np.bool_)
        self.choose(start, GivenSelection(torch.from_numpy(bits)))

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
