"""Which entries of a bucket are sent, in the form by which torch gathers fastest on a CPU.

An int32 offset for each entry, counted from the start of its chunk of 256k: half the memory of
torch's usual int64 positions, and a fifth of the time that a boolean mask takes to gather by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron.data_parallel.reducer import Run
from megatron.sparse.selection import CHUNK, Given, Selection
from radius.pieces import Piece, Pieces


class ChunkIndex(Pieces):
    """The positions chosen in a bucket of `length` entries, none to begin with."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        none = torch.empty(0, dtype=torch.int32)
        self._offsets = [none] * -(-length // CHUNK)
        self._in_runs = [False] * len(self._offsets)
        self._pieces: Sequence[Piece] | None = None

    @property
    def pieces(self) -> Sequence[Piece]:
        if self._pieces is None:
            self._pieces, _ = _cut(self.length, self._offsets, self._in_runs)
        return self._pieces

    @property
    def nbytes(self) -> int:
        """Bytes it keeps."""
        return sum(offsets.nbytes for offsets in self._offsets)

    def choose(self, start: int, selection: Selection) -> None:
        """Replace what is chosen in `[start, start + selection.n)`."""
        for number, lo, hi in self._cut(start, selection.n):
            base, old = number * CHUNK, self._offsets[number]
            new = selection.positions(lo - start, hi - start) + (lo - base)
            first, last = _ranks(old, (lo - base, hi - base))
            self._offsets[number] = torch.cat([old[:first], new, old[last:]])
            self._in_runs[number] = _in_runs(self._offsets[number])
        self._pieces = None

    def flushed(self, ranges: Sequence[tuple[int, int]]) -> FlushedIndex:
        """These positions and all of the ranges `[start, stop)`, ascending and disjoint, whose
        places among the values are the `runs`. A later `choose` does not change it."""
        cut = _cut(self.length, self._offsets, self._in_runs, ranges)
        return FlushedIndex(self.length, *cut)

    def count(self, start: int, length: int) -> int:
        """How many are chosen in `[start, start + length)`."""
        total = 0
        for number, lo, hi in self._cut(start, length):
            base = number * CHUNK
            first, last = _ranks(self._offsets[number], (lo - base, hi - base))
            total += last - first
        return total

    def clear_part(self, flat: torch.Tensor, start: int, length: int) -> None:
        """`clear` within `[start, start + length)`."""
        for number, lo, hi in self._cut(start, length):
            base, offsets = number * CHUNK, self._offsets[number]
            first, last = _ranks(offsets, (lo - base, hi - base))
            flat[base : base + CHUNK].index_fill_(0, offsets[first:last].long(), 0.0)

    def gather_rest(self, flat: torch.Tensor, out: torch.Tensor, start: int, length: int) -> None:
        """Write the entries of `[start, start + length)` that are not chosen to `out`, in order."""
        at = 0
        for lo, hi, chosen in self._chosen(start, length):
            rest = flat[lo:hi][~chosen]
            out[at : at + rest.numel()] = rest
            at += rest.numel()

    def place_rest(self, values: torch.Tensor, flat: torch.Tensor, start: int, length: int) -> None:
        """Put back what `gather_rest` gave; chosen entries stay as they are."""
        at = 0
        for lo, hi, chosen in self._chosen(start, length):
            count = int((~chosen).sum())
            flat[lo:hi].masked_scatter_(~chosen, values[at : at + count])
            at += count

    def packed(self, start: int, length: int) -> torch.Tensor:
        """What is chosen in `[start, start + length)`: uint8, bit 7 first, as numpy packs."""
        out = torch.empty(-(-length // 8), dtype=torch.uint8)
        for done in range(0, length, CHUNK):
            here = start + done, min(CHUNK, length - done)
            chosen = torch.cat([part for _, _, part in self._chosen(*here)])
            octets = torch.from_numpy(np.packbits(chosen.numpy()))
            out[done // 8 : done // 8 + octets.numel()] = octets
        return out

    def load(self, start: int, length: int, packed: torch.Tensor) -> None:
        """Take back what `packed` gave."""
        bits = np.unpackbits(packed.numpy(), count=length)
        self.choose(start, Given(torch.from_numpy(bits).bool()))

    def _cut(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """The range by chunks: the chunk's number, and which of its entries."""
        stop = start + length
        while start < stop:
            number = start // CHUNK
            upto = min(stop, (number + 1) * CHUNK)
            yield number, start, upto
            start = upto

    def _chosen(self, start: int, length: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The range by chunks: `[lo, hi)` and which of it is chosen, as booleans."""
        for number, lo, hi in self._cut(start, length):
            base, offsets = number * CHUNK, self._offsets[number]
            first, last = _ranks(offsets, (lo - base, hi - base))
            chosen = torch.zeros(hi - lo, dtype=torch.bool)
            chosen[offsets[first:last].long() - (lo - base)] = True
            yield lo, hi, chosen


class FlushedIndex(Pieces):
    """Chosen positions and whole ranges, for one step."""

    def __init__(self, length: int, pieces: Sequence[Piece], runs: Sequence[Run]) -> None:
        super().__init__(length)
        self._pieces, self.runs = pieces, runs

    @property
    def pieces(self) -> Sequence[Piece]:
        return self._pieces


def _in_runs(offsets: torch.Tensor) -> bool:
    """Whether most follow upon the one before, by a look at a hundred of them."""
    some = offsets[: offsets.numel() // 2 * 2].view(-1, 2)[:: max(1, offsets.numel() // 128)]
    return bool((some[:, 1] - some[:, 0] == 1).float().mean() > 0.9)


def _ranks(offsets: torch.Tensor, bounds: tuple[int, int]) -> tuple[int, int]:
    """How many offsets lie below each bound."""
    first, last = torch.searchsorted(offsets, torch.tensor(bounds, dtype=torch.int32)).tolist()
    return first, last


def _cut(
    length: int,
    chunks: Sequence[torch.Tensor],
    in_runs: Sequence[bool],
    ranges: Sequence[tuple[int, int]] = (),
) -> tuple[list[Piece], list[Run]]:
    """Offsets by chunk and whole ranges, ascending and disjoint, as pieces; the ranges as runs."""
    pieces: list[Piece] = []
    left = [bounds for bounds in reversed(ranges) if bounds[0] < bounds[1]]
    places: dict[int, int] = {}
    at = 0
    for start, offsets, runs in zip(range(0, length, CHUNK), chunks, in_runs, strict=True):
        stop = min(start + CHUNK, length)
        while left and left[-1][0] < stop:
            lo, hi = left.pop()
            if hi > stop:  # goes on in the next chunk
                left.append((stop, hi))
                hi = stop
            first, last = _ranks(offsets, (lo - start, hi - start))
            if first:
                pieces.append(Piece(start, stop, at, offsets[:first], runs))
                at += first
            pieces.append(Piece(lo, hi, at, None))
            places[lo] = at
            at += hi - lo
            offsets = offsets[last:]
        if offsets.numel():
            pieces.append(Piece(start, stop, at, offsets, runs))
            at += offsets.numel()
    return pieces, [Run(lo, hi, places[lo]) for lo, hi in ranges if lo < hi]
