"""The selected positions of a bucket as int32 offsets within chunks, for CPUs without C kernels."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.data_parallel.reducer import IndexRange, ReducedGrad
from megatron.sparse.selection import CHUNK, Selection
from radius.bucket_index import BucketIndex, SentIndex

if TYPE_CHECKING:
    from megatron.optimizer.update_rules import Hyper, UpdateRule


@dataclass(frozen=True)
class OffsetPiece:
    """Sent entries in `[start, stop)`, within one chunk.

    Their positions are `offsets` (int32, relative to `start`); None if they fill the range. Their
    values begin at `at` in the compact vector. `in_runs`: nearly all offsets are consecutive.
    """

    start: int
    stop: int
    at: int
    offsets: torch.Tensor | None
    in_runs: bool = False

    @property
    def values(self) -> slice:
        """Slice of their values in the compact vector."""
        count = self.stop - self.start if self.offsets is None else self.offsets.numel()
        return slice(self.at, self.at + count)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of a bucket-sized tensor for this piece."""
        return flat[self.start : self.stop]


class OffsetIndexBase(SentIndex):
    """An index whose entries are moved by torch, chunk by chunk."""

    _chunk = CHUNK

    def __init__(self, length: int) -> None:
        self.length = length

    @property
    @abstractmethod
    def pieces(self) -> Sequence[OffsetPiece]:
        """Pieces of the sent entries, ascending."""

    @property
    def numel(self) -> int:
        return self.pieces[-1].values.stop if self.pieces else 0

    def gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        for piece in self.pieces:
            _gather(piece, flat, out[piece.values])

    def place(self, values: torch.Tensor, flat: torch.Tensor) -> None:
        flat.zero_()
        for piece in self.pieces:
            part, mine = piece.of(flat), values[piece.values]
            if piece.offsets is None:
                part.copy_(mine)
            else:
                part.index_add_(0, piece.offsets, mine)

    def expand(
        self, values: torch.Tensor, start: int, stop: int, *, scale: float = 1.0
    ) -> torch.Tensor:
        out = torch.zeros(stop - start)
        for piece in self._pieces_from(start, stop):
            if piece.stop <= start:
                continue
            bounds = max(start - piece.start, 0), min(stop, piece.stop) - piece.start
            moved = piece.start - start
            if piece.offsets is None:
                first, last = bounds
                out[first + moved : last + moved] = values[piece.at + first : piece.at + last]
                continue
            first, last = _ranks(piece.offsets, bounds)
            found = values[piece.at + first : piece.at + last].float()
            out[piece.offsets[first:last].long() + moved] = found
        return out if scale == 1.0 else out.mul_(scale)

    def clear(self, flat: torch.Tensor) -> None:
        for piece in self.pieces:
            if piece.offsets is None:
                piece.of(flat).zero_()
            else:
                piece.of(flat).index_fill_(0, piece.offsets.long(), 0.0)

    def _pieces_from(self, start: int, stop: int) -> Iterator[OffsetPiece]:
        """Yield the pieces that begin before `stop`, and not before the chunk of `start`."""
        pieces = self.pieces
        # Chunks ascend, but stops do not: offsets end with their chunk, beyond a run after them.
        first = bisect_left(pieces, start // CHUNK, key=lambda p: p.start // CHUNK)
        for number in range(first, len(pieces)):
            if pieces[number].start >= stop:
                return
            yield pieces[number]

    def _expand_chunk(
        self, values: torch.Tensor, start: int, grad: torch.Tensor, factor: float
    ) -> None:
        grad.zero_()
        for piece in self._pieces_from(start, start + grad.numel()):
            _place(piece, values, grad, start, factor)

    def _apply_to_sent(
        self,
        rule: UpdateRule,
        reduced: ReducedGrad,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        factor: float,
    ) -> None:
        states = (weight, *moments)
        for piece in self.pieces:
            grad = reduced.values[piece.values].float() * factor
            counts = (
                None
                if reduced.steps_accumulated is None
                else reduced.steps_accumulated[piece.values]
            )
            if counts is not None and counts.amax() == 1:
                counts = None  # without a factor the rule makes fewer passes
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


def _gather(piece: OffsetPiece, flat: torch.Tensor, out: torch.Tensor) -> None:
    part = piece.of(flat)
    if piece.offsets is None:
        out.copy_(part)
        return
    if piece.in_runs:
        # The processor does not prefetch across the gaps between runs. Reading all memory once, in
        # order, and then gathering from cache takes half the time.
        part.sum()
    torch.index_select(part, 0, piece.offsets, out=out)


def _place(
    piece: OffsetPiece, values: torch.Tensor, grad: torch.Tensor, start: int, factor: float
) -> None:
    """Add the piece's values times `factor` to the gradient of the chunk that begins at `start`."""
    part = grad[piece.start - start : piece.stop - start]
    mine = values[piece.values].float()
    if piece.offsets is None:
        part.add_(mine, alpha=factor)
    else:
        part.index_add_(0, piece.offsets, mine, alpha=factor)


class OffsetIndex(OffsetIndexBase, BucketIndex):
    """The positions selected in a bucket of `length` entries; none at first."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        none = torch.empty(0, dtype=torch.int32)
        self._offsets = [none] * -(-length // CHUNK)
        self._in_runs = [False] * len(self._offsets)
        self._pieces: Sequence[OffsetPiece] | None = None

    @property
    def pieces(self) -> Sequence[OffsetPiece]:
        if self._pieces is None:
            self._pieces, _ = _cut(self.length, self._offsets, self._in_runs)
        return self._pieces

    @property
    def nbytes(self) -> int:
        """Bytes of the offsets."""
        return sum(offsets.nbytes for offsets in self._offsets)

    def choose(self, start: int, selection: Selection) -> None:
        for number, lo, hi in self._cut(start, selection.n):
            base, old = number * CHUNK, self._offsets[number]
            new = selection.positions(lo - start, hi - start) + (lo - base)
            first, last = _ranks(old, (lo - base, hi - base))
            self._offsets[number] = torch.cat([old[:first], new, old[last:]])
            self._in_runs[number] = _in_runs(self._offsets[number])
        self._pieces = None

    def flushed(self, ranges: Sequence[tuple[int, int]]) -> FlushedOffsetIndex:
        cut = _cut(self.length, self._offsets, self._in_runs, ranges)
        return FlushedOffsetIndex(self.length, *cut)

    def count(self, start: int, length: int) -> int:
        total = 0
        for number, lo, hi in self._cut(start, length):
            base = number * CHUNK
            first, last = _ranks(self._offsets[number], (lo - base, hi - base))
            total += last - first
        return total

    def clear_part(self, flat: torch.Tensor, start: int, length: int) -> None:
        for number, lo, hi in self._cut(start, length):
            base, offsets = number * CHUNK, self._offsets[number]
            first, last = _ranks(offsets, (lo - base, hi - base))
            flat[base : base + CHUNK].index_fill_(0, offsets[first:last].long(), 0.0)

    def choose_again(self, start: int, selection: Selection) -> tuple[int, int]:
        first = start // 8 * 8  # the start of a byte, which may belong to another range
        length, count = start + selection.n - first, self.count(start, selection.n)
        before = self.packed(first, length)
        outside = _ones(before) - count
        self.choose(start, selection)
        return count, _ones(before & self.packed(first, length)) - outside

    def packed(self, start: int, length: int) -> torch.Tensor:
        out = torch.empty(-(-length // 8), dtype=torch.uint8)
        for done in range(0, length, CHUNK):
            here = start + done, min(CHUNK, length - done)
            chosen = torch.cat([part for _, _, part in self.selected(*here)])
            octets = torch.from_numpy(np.packbits(chosen.numpy()))
            out[done // 8 : done // 8 + octets.numel()] = octets
        return out

    def _cut(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield `(number, lo, hi)`: each chunk that meets the range, and the positions they share.

        `lo` and `hi` are positions in the bucket.
        """
        stop = start + length
        while start < stop:
            number = start // CHUNK
            upto = min(stop, (number + 1) * CHUNK)
            yield number, start, upto
            start = upto

    def selected(self, start: int, length: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        for number, lo, hi in self._cut(start, length):
            base, offsets = number * CHUNK, self._offsets[number]
            first, last = _ranks(offsets, (lo - base, hi - base))
            chosen = torch.zeros(hi - lo, dtype=torch.bool)
            chosen[offsets[first:last].long() - (lo - base)] = True
            yield lo, hi, chosen


class FlushedOffsetIndex(OffsetIndexBase):
    """The selected positions of an index and all positions of some ranges, for one step."""

    def __init__(
        self, length: int, pieces: Sequence[OffsetPiece], runs: Sequence[IndexRange]
    ) -> None:
        super().__init__(length)
        self._pieces, self.runs = pieces, runs

    @property
    def pieces(self) -> Sequence[OffsetPiece]:
        return self._pieces


def _in_runs(offsets: torch.Tensor) -> bool:
    """Return whether over 90 % of offsets directly follow the previous one.

    At most 128 pairs of neighbours are sampled.
    """
    some = offsets[: offsets.numel() // 2 * 2].view(-1, 2)[:: max(1, offsets.numel() // 128)]
    return bool((some[:, 1] - some[:, 0] == 1).float().mean() > 0.9)


def _ranks(offsets: torch.Tensor, bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the number of offsets below each bound."""
    first, last = torch.searchsorted(offsets, torch.tensor(bounds, dtype=torch.int32)).tolist()
    return first, last


def _cut(
    length: int,
    chunks: Sequence[torch.Tensor],
    in_runs: Sequence[bool],
    ranges: Sequence[tuple[int, int]] = (),
) -> tuple[list[OffsetPiece], list[IndexRange]]:
    """Return the pieces of all chunks and of `ranges`, in ascending order, and the ranges as runs.

    Offsets within a range are left out, since the range has all positions.
    """
    pieces: list[OffsetPiece] = []
    left = [bounds for bounds in reversed(ranges) if bounds[0] < bounds[1]]
    places: dict[int, int] = {}
    at = 0
    for start, offsets, runs in zip(range(0, length, CHUNK), chunks, in_runs, strict=True):
        stop = min(start + CHUNK, length)
        while left and left[-1][0] < stop:
            lo, hi = left.pop()
            if hi > stop:  # continues in the next chunk
                left.append((stop, hi))
                hi = stop
            first, last = _ranks(offsets, (lo - start, hi - start))
            if first:
                pieces.append(OffsetPiece(start, stop, at, offsets[:first], runs))
                at += first
            pieces.append(OffsetPiece(lo, hi, at, None))
            places[lo] = at
            at += hi - lo
            offsets = offsets[last:]
        if offsets.numel():
            pieces.append(OffsetPiece(start, stop, at, offsets, runs))
            at += offsets.numel()
    return pieces, [IndexRange(lo, hi, places[lo]) for lo, hi in ranges if lo < hi]


def _ones(bits: torch.Tensor) -> int:
    return sum(int(np.unpackbits(part.numpy()).sum(dtype=np.int64)) for part in bits.split(CHUNK))
