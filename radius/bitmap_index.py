"""The selected positions of a bucket as a bitmap, for CUDA and for CPUs with the C kernels."""

from __future__ import annotations

import dataclasses
import weakref
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.data_parallel.reducer import IndexRange, ReducedGrad
from megatron.sparse.reference import (
    BLOCK,
    CHUNK,
    GROUP,
    WORDS,
    Bits,
    aligned_pieces,
    put,
    unpack,
)
from megatron.sparse.selection import LargestSelection, Selection
from megatron.transfer import to_device
from radius import reference
from radius.bucket_index import BucketIndex, SentIndex
from radius.native_library import native_library

if TYPE_CHECKING:
    from megatron.optimizer.update_rules import Hyper, UpdateRule


class RangeCounts:
    """The number of selected entries in consecutive ranges of `[0, length)`, 0 at first.

    `count_on_device(start, stop)` counts the selected entries of a range and blocks the host.
    """

    def __init__(self, length: int, count_on_device: Callable[[int, int], int]) -> None:
        self._count_on_device = count_on_device
        # Range i is [_starts[i], _starts[i + 1]) and has _counts[i] selected entries.
        self._starts = [0, length]
        self._counts = [0]
        self.total = 0

    def replace(self, start: int, stop: int, count: int | None) -> None:
        """Record that `[start, stop)` has `count` selected entries; None: ask the device."""
        first, last = self._cut(start), self._cut(stop)
        if count is None:
            count = self._count_on_device(start, stop)
        self.total += count - sum(self._counts[first:last])
        self._starts[first:last] = [start]
        self._counts[first:last] = [count]

    def count(self, start: int, stop: int) -> int:
        """Return the number of selected entries in `[start, stop)`."""
        first, last = self._cut(start), self._cut(stop)
        return sum(self._counts[first:last])

    def _cut(self, position: int) -> int:
        """Split the ranges at a position; return the number of the range that begins there."""
        number = bisect_left(self._starts, position)
        if self._starts[number] == position:
            return number
        start, stop = self._starts[number - 1], self._starts[number]
        count = self._counts[number - 1]
        if count == 0 or count == stop - start:
            left = min(count, position - start)
        else:
            left = self._count_on_device(start, position)
        self._starts.insert(number, position)
        self._counts[number - 1 : number] = [left, count - left]
        return number


CUDA_CHUNK = 64 * CHUNK
"""Entries of a bucket on a GPU that are expanded together for a rule without a fused kernel."""


class BitmapIndexBase(SentIndex):
    """An index of the entries that `bits` marks, which kernels move."""

    def __init__(self, device: torch.device) -> None:
        self._kernels = _kernels_for(device)
        self._chunk = CHUNK if device.type == "cpu" else CUDA_CHUNK

    @property
    @abstractmethod
    def bits(self) -> Bits:
        """Bitmap of the entries."""

    def gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        self._kernels.compact(self.bits, flat, out)

    def expand(
        self, values: torch.Tensor, start: int, stop: int, *, scale: float = 1.0
    ) -> torch.Tensor:
        # Kernels begin at a group of blocks.
        first = start // (GROUP * BLOCK) * GROUP
        skipped = start - first * BLOCK
        out = torch.empty(stop - start + skipped, dtype=torch.float32, device=values.device)
        self._kernels.expand(self.bits, values, out, first=first, scale=scale)
        return out[skipped:]

    def clear(self, flat: torch.Tensor) -> None:
        self._kernels.clear(self.bits, flat)

    def place(self, values: torch.Tensor, flat: torch.Tensor) -> None:
        self._kernels.expand(self.bits, values, flat)

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
        """Apply an update rule as `SentIndex.apply` does, or AdamW by a fused kernel.

        The kernel reads the values without expanding them first, and decays the weights.
        """
        fused = reduced.unselected in self._kernels.FUSED_ADAMW
        constants = rule.adamw if fused else None
        if constants is None:
            super().apply(rule, reduced, weight, moments, hyper, factor=factor)
            return
        self._kernels.adamw(
            self.bits,
            reduced.values,
            reduced.steps_accumulated,
            weight,
            *moments,
            factor=factor,
            frozen=reduced.unselected == "frozen",
            lr=hyper.lr,
            weight_decay=hyper.weight_decay,
            betas=(constants.beta1, constants.beta2),
            eps=constants.eps,
            t=hyper.t,
        )

    def _expand_chunk(
        self, values: torch.Tensor, start: int, grad: torch.Tensor, factor: float
    ) -> None:
        first = start // BLOCK
        self._kernels.expand(self.bits, values, grad, first=first, scale=factor)

    def _apply_to_sent(
        self,
        rule: UpdateRule,
        reduced: ReducedGrad,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        factor: float,
    ) -> None:
        bits, at = self.bits, 0
        length = weight.numel()
        # On a CPU piece by piece, within cache. On a GPU the bucket is one piece, since the host
        # would have to wait for the number of entries in each piece.
        # Half a chunk, so that copies of all states of a piece that is sent whole stay in cache.
        together = CHUNK // 2 if weight.device.type == "cpu" else length
        for start in range(0, length, together):
            cut = slice(start, min(start + together, length))
            here = bits if together >= length else bits.part(start // BLOCK, -(-cut.stop // BLOCK))
            count = self.numel if here is bits else int(here.counts.sum())
            values = slice(at, at + count)
            at += count
            states = [state[cut] for state in (weight, *moments)]
            held = [state.new_empty(count) for state in states]
            for state, mine in zip(states, held, strict=True):
                self._kernels.compact(here, state, mine)
            counts = (
                None if reduced.steps_accumulated is None else reduced.steps_accumulated[values]
            )
            if here is not bits and counts is not None and bool((counts == 1).all()):
                counts = None  # without a factor the rule makes fewer passes
            rule.apply(held[0], reduced.values[values].float() * factor, held[1:], hyper, counts)
            for state, mine in zip(states, held, strict=True):
                self._kernels.place(here, mine, state)


class FlushedBitmapIndex(BitmapIndexBase):
    """The selected positions of an index together with all positions of some ranges, for one step.

    Only blocks that meet a range are copied; the others are shared with the original index until
    `keep` copies them.
    """

    def __init__(self, bits: Bits, runs: Sequence[IndexRange], numel: int) -> None:
        super().__init__(bits.words.device)
        self.runs, self._numel = runs, numel
        self._spans: list[tuple[int, int]] = []
        for run in runs:
            first, last = run.start // BLOCK, -(-run.stop // BLOCK)
            if self._spans and self._spans[-1][1] >= first:
                first, _ = self._spans.pop()
            self._spans.append((first, last))
        self._bits = self._patched(bits) if runs else bits

    @property
    def bits(self) -> Bits:
        return self._bits

    @property
    def numel(self) -> int:
        return self._numel

    def keep(self, start: int, stop: int) -> None:
        """Stop sharing words with the original index, which is about to change `[start, stop)`.

        Nothing is copied if one of the copied spans covers the range.
        """
        first, last = start // BLOCK, -(-stop // BLOCK)
        if not any(a <= first and last <= b for a, b in self._spans):
            self._bits = dataclasses.replace(self._bits, words=self._bits.words.clone())
            self._spans = [(0, self._bits.blocks)]

    def _patched(self, bits: Bits) -> Bits:
        # The number of operations on the device does not depend on the number of runs.
        rows = np.concatenate([np.arange(*span) for span in self._spans])
        patch = np.full(bits.blocks, -1, dtype=np.int32)
        patch[rows] = np.arange(rows.size)
        octets = np.zeros(rows.size * BLOCK // 8, dtype=np.uint8)
        for run in self.runs:
            first = run.start // BLOCK
            moved = (int(patch[first]) - first) * BLOCK
            _set_bits(octets, run.start + moved, run.stop + moved)
        device = bits.words.device
        where = to_device(torch.from_numpy(rows), device)
        patches = to_device(torch.from_numpy(octets.view(np.int32)).view(-1, WORDS), device)
        patches |= bits.words.index_select(0, where)
        counts = bits.counts.index_copy(0, where, self._kernels.count_blocks(patches))
        return Bits.of(
            bits.length, bits.words, counts, to_device(torch.from_numpy(patch), device), patches
        )


def _set_bits(octets: np.ndarray, start: int, stop: int) -> None:
    """Set the bits of a range that is not empty; the first bit of an octet is its highest."""
    first, last = start // 8, stop // 8
    low, high = 0xFF >> start % 8, 0xFF00 >> stop % 8 & 0xFF
    if first == last:
        octets[first] |= low & high
        return
    octets[first] |= low
    octets[first + 1 : last] = 0xFF
    if high:
        octets[last] |= high


def _kernels_for(device: torch.device) -> ModuleType:
    if device.type == "cuda" and find_spec("triton") is not None:
        from radius import kernels

        return kernels
    if device.type == "cpu" and native_library() is not None:
        from radius import native

        return native
    return reference


class BitmapIndex(BitmapIndexBase, BucketIndex):
    """The positions selected in a bucket of `length` entries; none at first."""

    def __init__(self, length: int, device: torch.device) -> None:
        super().__init__(device)
        self.length = length
        blocks = -(-length // (GROUP * BLOCK)) * GROUP
        self._words = torch.zeros(blocks, WORDS, dtype=torch.int32, device=device)
        self._bits: Bits | None = None
        self._tally = RangeCounts(length, self._count_on_device)
        self._flushed: weakref.ref[FlushedBitmapIndex] | None = None

    @property
    def numel(self) -> int:
        return self._tally.total

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._words.nbytes + self.bits.counts.nbytes + self.bits.offsets.nbytes

    @property
    def bits(self) -> Bits:
        if self._bits is None:
            counts = self._kernels.count_blocks(self._words)
            self._bits = Bits.of(self.length, self._words, counts)
        return self._bits

    def choose(self, start: int, selection: Selection) -> None:
        stop = start + selection.n
        if start == stop:
            return
        # Count the range's old entries while they are still there.
        self._tally.count(start, stop)
        flushed = self._flushed() if self._flushed is not None else None
        if flushed is not None:
            flushed.keep(start, stop)
        if isinstance(selection, LargestSelection) and selection.values.device.type != "cpu":
            found = selection
            where = (found.values, found.threshold, found.cutoff, found.shard)
            # Positions given by runs need a lookup, which no kernel does.
            kernels = self._kernels if found.shard.runs is None else reference
            kernels.write_bits(self._words, start, *where)
        else:
            for lo, hi in aligned_pieces(start, stop):
                put(self._words, lo, _marked(selection, lo - start, hi - start))
        self._tally.replace(start, stop, selection.count)
        self._bits = None

    def choose_again(self, start: int, selection: Selection) -> tuple[int, torch.Tensor]:
        # Whole blocks are counted: their entries outside the range stay as they are.
        words = self._words[start // BLOCK : -(-(start + selection.n) // BLOCK)]
        before, count = words.clone(), self.count(start, selection.n)
        self.choose(start, selection)
        held = self._kernels.count_blocks(before)
        return count, (self._kernels.count_blocks(before & words) - held).sum() + count

    def flushed(self, ranges: Sequence[tuple[int, int]]) -> FlushedBitmapIndex:
        runs: list[IndexRange] = []
        at = upto = 0
        for start, stop in ranges:
            if start < stop:
                at += self._tally.count(upto, start)
                runs.append(IndexRange(start, stop, at))
                at += stop - start
                upto = stop
        numel = at + self._tally.count(upto, self.length)
        flushed = FlushedBitmapIndex(self.bits, runs, numel)
        self._flushed = weakref.ref(flushed)
        return flushed

    def count(self, start: int, length: int) -> int:
        return self._tally.count(start, start + length)

    def clear_part(self, flat: torch.Tensor, start: int, length: int) -> None:
        self._kernels.clear_range(self.bits, flat, start, start + length)

    def packed(self, start: int, length: int) -> torch.Tensor:
        assert start % 8 == 0
        octets = self._words.view(torch.uint8).view(-1)[start // 8 : -(-(start + length) // 8)]
        octets = octets.cpu().clone()
        if length % 8:
            octets[-1] &= 0xFF00 >> (length % 8) & 0xFF
        return octets

    def selected(self, start: int, length: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        for lo, hi in aligned_pieces(start, start + length):
            words = self._words.view(-1)[lo // 32 : -(-hi // 32)]
            skipped = lo // 32 * 32
            yield lo, hi, unpack(words)[lo - skipped : hi - skipped]

    def _count_on_device(self, start: int, stop: int) -> int:
        first, last = -(-start // BLOCK), stop // BLOCK
        edges, inside = [(start, stop)], 0
        if first < last:
            edges = [(start, first * BLOCK), (last * BLOCK, stop)]
            inside = int(self._kernels.count_blocks(self._words[first:last]).sum())
        pieces = [chosen for lo, hi in edges for _, _, chosen in self.selected(lo, hi - lo)]
        return inside + sum(int(chosen.sum()) for chosen in pieces)


def _marked(selection: Selection, start: int, stop: int) -> torch.Tensor:
    """Return whether each of [start, stop) is selected: bool, on the CPU."""
    if isinstance(selection, LargestSelection) and selection.values.device.type == "cpu":
        return selection.mask(start, stop)
    chosen = torch.zeros(stop - start, dtype=torch.bool)
    chosen[selection.positions(start, stop).long().cpu()] = True
    return chosen
