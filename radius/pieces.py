"""Sent entries of a bucket, chunk by chunk: gathered, cleared, and brought to an update rule.

What a piece's offsets point into is 1 MiB at most and stays in cache from the placing of the values
to the optimizer's arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.data_parallel.reducer import Reduced, Run
from megatron.sparse.selection import CHUNK

if TYPE_CHECKING:
    from megatron.optimizer.rules import Hyper, UpdateRule


@dataclass(frozen=True)
class Piece:
    """Sent entries that lie in `[start, stop)`, within one chunk: those at `offsets` (int32, from
    `start`), or all of them where that is None. Their values begin at `at`. `in_runs`: whether most
    offsets follow upon the one before."""

    start: int
    stop: int
    at: int
    offsets: torch.Tensor | None
    in_runs: bool = False

    @property
    def values(self) -> slice:
        """Where their values lie in the compact vector."""
        count = self.stop - self.start if self.offsets is None else self.offsets.numel()
        return slice(self.at, self.at + count)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """View of the piece of a bucket-sized tensor."""
        return flat[self.start : self.stop]


class Pieces(ABC):
    """A `SparseIndex` that works chunk by chunk."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.runs: Sequence[Run] = ()

    @property
    @abstractmethod
    def pieces(self) -> Sequence[Piece]:
        """What is sent, ascending."""

    @property
    def numel(self) -> int:
        return self.pieces[-1].values.stop if self.pieces else 0

    def gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Write the entries at the positions to `out`, of the same dtype."""
        for piece in self.pieces:
            _gather(piece, flat, out[piece.values])

    def take(self, flat: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0) -> None:
        """Gather finite entries times `scale` and leave zeros where they were."""
        for piece in self.pieces:
            part, values = piece.of(flat), out[piece.values]
            _gather(piece, flat, values)
            if piece.offsets is None:
                part.zero_()
            else:
                # A finite number less itself is 0, and takes two thirds of the time of a fill.
                part.index_add_(0, piece.offsets, values, alpha=-1)
        if scale != 1.0:
            out.mul_(scale)

    def place(self, values: torch.Tensor, flat: torch.Tensor) -> None:
        """Overwrite `flat`, of the same dtype, by the values at the positions and zeros
        elsewhere."""
        flat.zero_()
        for piece in self.pieces:
            part, mine = piece.of(flat), values[piece.values]
            if piece.offsets is None:
                part.copy_(mine)
            else:
                part.index_add_(0, piece.offsets, mine)

    def clear(self, flat: torch.Tensor) -> None:
        """Set the entries at the positions to 0, whatever they are."""
        for piece in self.pieces:
            if piece.offsets is None:
                piece.of(flat).zero_()
            else:
                piece.of(flat).index_fill_(0, piece.offsets.long(), 0.0)

    def apply(
        self,
        rule: UpdateRule,
        reduced: Reduced,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        *,
        factor: float,
    ) -> None:
        """See `SparseIndex.apply`."""
        if reduced.rest == "frozen":
            self._apply_to_sent(rule, reduced, weight, moments, hyper, factor)
        else:
            assert reduced.gathered is None, "sums of several steps belong to frozen rests"
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
        """The rule on every chunk, its values placed among zeros just before."""
        scratch = torch.empty(min(CHUNK, self.length))
        pieces = list(reversed(self.pieces))
        for start in range(0, self.length, CHUNK):
            cut = slice(start, min(start + CHUNK, self.length))
            grad = scratch[: cut.stop - start].zero_()
            while pieces and pieces[-1].start < cut.stop:
                _place(pieces.pop(), values, grad, start, factor)
            rule.apply(weight[cut], grad, [moment[cut] for moment in moments], hyper)

    def _apply_to_sent(
        self,
        rule: UpdateRule,
        reduced: Reduced,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        factor: float,
    ) -> None:
        """The rule on the sent entries alone, taken together and put back."""
        states = (weight, *moments)
        for piece in self.pieces:
            grad = reduced.values[piece.values].float() * factor
            counts = None if reduced.gathered is None else reduced.gathered[piece.values]
            if counts is not None and counts.amax() == 1:
                counts = None  # which spares the rule a few passes
            parts = [piece.of(state) for state in states]
            if piece.offsets is None:
                rule.apply(parts[0], grad, parts[1:], hyper, counts)
                continue
            held = [part.new_empty(piece.offsets.numel()) for part in parts]
            for state, mine in zip(states, held, strict=True):
                _gather(piece, state, mine)
            rule.apply(held[0], grad, held[1:], hyper, counts)
            wide = piece.offsets.long()
            for part, new in zip(parts, held, strict=True):
                part.scatter_(0, wide, new)


def _gather(piece: Piece, flat: torch.Tensor, out: torch.Tensor) -> None:
    part = piece.of(flat)
    if piece.offsets is None:
        out.copy_(part)
        return
    if piece.in_runs:
        # Between runs lie stretches of memory that a processor does not fetch ahead across. To read
        # all of it once, in order, and then gather out of the cache takes half the time.
        part.sum()
    torch.index_select(part, 0, piece.offsets, out=out)


def _place(
    piece: Piece, values: torch.Tensor, grad: torch.Tensor, start: int, factor: float
) -> None:
    """Add the piece's values times `factor` to the gradient of the chunk that begins at `start`."""
    part = grad[piece.start - start : piece.stop - start]
    mine = values[piece.values].float()
    if piece.offsets is None:
        part.add_(mine, alpha=factor)
    else:
        part.index_add_(0, piece.offsets, mine, alpha=factor)
