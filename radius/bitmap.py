"""Which entries of a bucket are sent, in the form that kernels gather by fastest: a bit for each.

An eighth of a byte for each entry of the bucket, whatever the density, where positions take four or
eight for each entry sent; and with the number of entries sent before each block, every block's
values are found without a list of positions, which a GPU would have to wait for the host to size.
The host knows by itself how many entries are chosen where.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron.data_parallel.reducer import Run
from megatron.sparse.reference import BLOCK, GROUP, WORDS, Bits, aligned_pieces, put, unpack
from megatron.sparse.selection import Given, Largest, Selection
from megatron.transfer import to_device
from radius import reference
from radius.marked import FlushedBitmap, Marked
from radius.tally import Tally


class BitmapIndex(Marked):
    """The positions chosen in a bucket of `length` entries, none to begin with."""

    def __init__(self, length: int, device: torch.device) -> None:
        super().__init__(device)
        self.length = length
        blocks = -(-length // (GROUP * BLOCK)) * GROUP
        self._words = torch.zeros(blocks, WORDS, dtype=torch.int32, device=device)
        self._bits: Bits | None = None
        self._tally = Tally(length, self._count_on_device)
        self._flushed: weakref.ref[FlushedBitmap] | None = None

    @property
    def numel(self) -> int:
        return self._tally.total

    @property
    def nbytes(self) -> int:
        """Bytes it keeps on the device."""
        return self._words.nbytes + self.bits.counts.nbytes + self.bits.offsets.nbytes

    @property
    def bits(self) -> Bits:
        if self._bits is None:
            counts = self._kernels.count_blocks(self._words)
            self._bits = Bits.of(self.length, self._words, counts)
        return self._bits

    def choose(self, start: int, selection: Selection) -> None:
        """Replace what is chosen in `[start, start + selection.n)`."""
        stop = start + selection.n
        if start == stop:
            return
        # While the range's old entries can still be counted.
        self._tally.count(start, stop)
        flushed = self._flushed() if self._flushed is not None else None
        if flushed is not None:
            flushed.keep(start, stop)
        if isinstance(selection, Largest) and selection.values.device.type != "cpu":
            found = selection
            where = (found.values, found.threshold, found.cutoff, found.shard)
            # Places told by a list of runs are looked up, which no kernel does.
            kernels = self._kernels if found.shard.runs is None else reference
            kernels.write_bits(self._words, start, *where)
        else:
            for lo, hi in aligned_pieces(start, stop):
                put(self._words, lo, _marked(selection, lo - start, hi - start))
        self._tally.replace(start, stop, selection.count)
        self._bits = None

    def flushed(self, ranges: Sequence[tuple[int, int]]) -> FlushedBitmap:
        """These positions and all of the ranges `[start, stop)`, ascending and disjoint, whose
        places among the values are the `runs`. A later `choose` does not change it."""
        runs: list[Run] = []
        at = upto = 0
        for start, stop in ranges:
            if start < stop:
                at += self._tally.count(upto, start)
                runs.append(Run(start, stop, at))
                at += stop - start
                upto = stop
        numel = at + self._tally.count(upto, self.length)
        flushed = FlushedBitmap(self.bits, runs, numel)
        self._flushed = weakref.ref(flushed)
        return flushed

    def count(self, start: int, length: int) -> int:
        """How many are chosen in `[start, start + length)`."""
        return self._tally.count(start, start + length)

    def clear_part(self, flat: torch.Tensor, start: int, length: int) -> None:
        """`clear` within `[start, start + length)`."""
        for lo, hi, chosen in self._chosen(start, start + length):
            flat[lo:hi].masked_fill_(chosen, 0.0)

    def gather_rest(self, flat: torch.Tensor, out: torch.Tensor, start: int, length: int) -> None:
        """Write the entries of `[start, start + length)` that are not chosen to `out`, in order.
        For checkpoints: makes the host wait."""
        at = 0
        for lo, hi, chosen in self._chosen(start, start + length):
            rest = flat[lo:hi][~chosen]
            out[at : at + rest.numel()] = rest
            at += rest.numel()

    def place_rest(self, values: torch.Tensor, flat: torch.Tensor, start: int, length: int) -> None:
        """Put back what `gather_rest` gave; chosen entries stay as they are."""
        at = 0
        for lo, hi, chosen in self._chosen(start, start + length):
            rest = ~chosen
            count = int(rest.sum())
            flat[lo:hi].masked_scatter_(rest, to_device(values[at : at + count], flat.device))
            at += count

    def packed(self, start: int, length: int) -> torch.Tensor:
        """What is chosen in `[start, start + length)`: uint8 on the CPU, bit 7 first, as numpy
        packs. `start` divides by 8, as that of every slice of a bucket does."""
        assert start % 8 == 0
        octets = self._words.view(torch.uint8).view(-1)[start // 8 : -(-(start + length) // 8)]
        octets = octets.cpu().clone()
        if length % 8:
            octets[-1] &= 0xFF00 >> (length % 8) & 0xFF
        return octets

    def load(self, start: int, length: int, packed: torch.Tensor) -> None:
        """Take back what `packed` gave."""
        bits = np.unpackbits(packed.numpy(), count=length).astype(np.bool_)
        self.choose(start, Given(torch.from_numpy(bits)))

    def _chosen(self, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The range by chunks: `[lo, hi)` and which of it is chosen, as booleans."""
        for lo, hi in aligned_pieces(start, stop):
            words = self._words.view(-1)[lo // 32 : -(-hi // 32)]
            skipped = lo // 32 * 32
            yield lo, hi, unpack(words)[lo - skipped : hi - skipped]

    def _count_on_device(self, start: int, stop: int) -> int:
        return sum(int(chosen.sum()) for _, _, chosen in self._chosen(start, stop))


def _marked(selection: Selection, start: int, stop: int) -> torch.Tensor:
    """Whether each of [start, stop) is chosen: bool, on the CPU."""
    if isinstance(selection, Largest) and selection.values.device.type == "cpu":
        return selection.mask(start, stop)
    chosen = torch.zeros(stop - start, dtype=torch.bool)
    chosen[selection.positions(start, stop).long().cpu()] = True
    return chosen
