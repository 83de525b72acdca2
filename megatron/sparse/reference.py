"""The reference of the kernels, in plain torch; it serves every CPU.

A bitmap is int32 words, 32 to a block of 1024 entries, in the order of `numpy.packbits`: the bytes
of a word in memory are those of entries 8i to 8i + 7, the first entry in the highest bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.sparse.sizes import BLOCK
from megatron.sparse.sizes import GROUP as GROUP
from megatron.transfer import to_device

if TYPE_CHECKING:
    from megatron.sparse.shard import FlatShard

BINS = 1 << 16
"""Ranges of magnitude that are counted in one pass."""
WORDS = BLOCK // 32
CHUNK = 256 * 1024
"""Entries looked at together: an int32 copy of so many stays within a CPU's cache."""
TIE_BLOCK = 1 << 16
MAGNITUDE = 0x7FFFFFFF
"""Bits of an fp32 number without its sign; as integers they are in the order of the magnitudes."""


@dataclass(frozen=True)
class Bits:
    """A bitmap of the chosen ones of `length` entries, for the kernels.

    `words` [blocks, 32] int32; `counts` and `offsets` [blocks] int64, number chosen in each block
    and before it. Where `patch` [blocks] int32 is not negative, row `patch` of `patches` stands
    for the block's words.
    """

    length: int
    words: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    patch: torch.Tensor | None = None
    patches: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        length: int,
        words: torch.Tensor,
        counts: torch.Tensor,
        patch: torch.Tensor | None = None,
        patches: torch.Tensor | None = None,
    ) -> Bits:
        """Return the bitmap with the offsets that follow from the counts."""
        return cls(length, words, counts, counts.cumsum(0) - counts, patch, patches)

    @property
    def blocks(self) -> int:
        return self.words.shape[0]

    def part(self, first: int, last: int) -> Bits:
        """Blocks [first, last) by themselves."""
        counts, patch = self.counts[first:last], self.patch
        patch = None if patch is None else patch[first:last]
        length = min(last * BLOCK, self.length) - first * BLOCK
        return Bits.of(length, self.words[first:last], counts, patch, self.patches)


def magnitudes(values: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
    """Bits of |x| as an fp32 number, int32, for fp32, bf16 or fp16 values.

    Widening keeps their order, and which are equal. Written to the beginning of `scratch` (int32)
    if that is given.
    """
    if scratch is None:
        scratch = torch.empty(values.numel(), dtype=torch.int32, device=values.device)
    bits = scratch[: values.numel()]
    if values.dtype == torch.float32:
        return torch.bitwise_and(values.view(torch.int32), MAGNITUDE, out=bits)
    bits.view(torch.float32).copy_(values.detach())
    return bits.bitwise_and_(MAGNITUDE)


def add_histogram(values: torch.Tensor, bracket: torch.Tensor, counts: torch.Tensor) -> None:
    """Count magnitudes into `counts`, int32 or int64 [BINS + 1].

    In bin i those whose bits less `first` begin with i when the lowest `shift` are cut off, in the
    last those above `last`; int64 `bracket` [3] is (first, last, shift).
    """
    if values.device.type == "cpu":
        first, last, shift = bracket.tolist()
        _add_histogram_on_cpu(values, first, last, shift, counts)
        return
    # One more bin, for what is below the bracket.
    found = torch.zeros(BINS + 2, dtype=torch.int64, device=values.device)
    low, high, cut = bracket.unbind()
    for piece in values.split(16 * CHUNK):
        magnitude = magnitudes(piece)
        bins = (magnitude - low) >> cut
        bins = torch.where(magnitude > high, BINS, torch.where(magnitude < low, BINS + 1, bins))
        found.index_add_(0, bins, torch.ones_like(bins, dtype=torch.int64))
    counts += found[: BINS + 1]


def _add_histogram_on_cpu(
    values: torch.Tensor, first: int, last: int, shift: int, counts: torch.Tensor
) -> None:
    if last < first:
        return
    scratch = torch.empty(min(CHUNK, values.numel()), dtype=torch.int32)
    for piece in values.split(CHUNK):
        magnitude = magnitudes(piece, scratch)
        if (first, last) == (0, MAGNITUDE):
            inside = magnitude
        else:
            counts[BINS] += int(np.count_nonzero((magnitude > last).numpy()))
            # What is below becomes negative, which is above everything once unsigned.
            found = magnitude.sub_(first).numpy()
            inside = torch.from_numpy(found[np.flatnonzero(found.view(np.uint32) <= last - first)])
        if inside.numel():
            counts[:BINS] += torch.bincount(inside.bitwise_right_shift_(shift), minlength=BINS)


def add_tie_counts(
    values: torch.Tensor,
    threshold: torch.Tensor,
    wanted: torch.Tensor,
    shard: FlatShard,
    counts: torch.Tensor,
) -> None:
    """Count the magnitudes that equal the threshold in each block of the whole tensor.

    Adds to `counts`, int64, for each TIE_BLOCK entries, the entries on this rank. Means nothing
    where `wanted` (bool []) is False.
    """
    numel = values.numel()
    if shard.is_run and values.device.type == "cpu":
        for block in range(shard.offset // TIE_BLOCK, -(-(shard.offset + numel) // TIE_BLOCK)):
            first = block * TIE_BLOCK - shard.offset
            piece = values[max(first, 0) : first + TIE_BLOCK]
            counts[block] += int(np.count_nonzero((magnitudes(piece) == threshold).numpy()))
        return
    for first in range(0, numel, CHUNK):
        ties = magnitudes(values[first : first + CHUNK]) == threshold
        local = torch.arange(first, first + ties.numel(), device=values.device)
        counts.index_add_(0, shard.logical(local) // TIE_BLOCK, ties.long())


def mark_ties(
    values: torch.Tensor,
    threshold: torch.Tensor,
    block: torch.Tensor,
    shard: FlatShard,
    marks: torch.Tensor,
) -> None:
    """Mark the entries of one block of the whole tensor that equal the threshold.

    Writes 1 to `marks`, int64 [TIE_BLOCK], for each such entry of TIE_BLOCK number `block` (int64
    []) on this rank.
    """
    if not values.numel():
        return
    places = block * TIE_BLOCK + torch.arange(TIE_BLOCK, device=values.device)
    local, here = shard.local(places)
    found = magnitudes(values.index_select(0, local.clamp_(0, values.numel() - 1)))
    marks += (found == threshold) & here


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Return whether each entry is chosen: bool, 32 for each of the contiguous int32 words."""
    if words.device.type == "cpu":  # numpy takes a tenth of torch's time, here and below
        return torch.from_numpy(np.unpackbits(words.view(torch.uint8).numpy()).view(np.bool_))
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=words.device)
    return ((words.view(torch.uint8).view(-1, 1) >> places) & 1).bool().view(-1)


def pack(chosen: torch.Tensor) -> torch.Tensor:
    """The int32 words of a bool tensor whose length divides by 32."""
    if chosen.device.type == "cpu":
        return torch.from_numpy(np.packbits(chosen.numpy())).view(torch.int32)
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=chosen.device)
    octets = (chosen.view(-1, 8).to(torch.uint8) << places).sum(dim=1, dtype=torch.uint8)
    return octets.view(torch.int32)


def write_bits(
    words: torch.Tensor,
    start: int,
    values: torch.Tensor,
    threshold: torch.Tensor,
    cutoff: torch.Tensor,
    shard: FlatShard,
) -> None:
    """Choose entries from `start` on by threshold and cutoff (see `selection.LargestSelection`).

    Chosen are entries above the threshold, or at it and before the cutoff in the whole tensor.
    """
    for first, stop in aligned_pieces(start, start + values.numel()):
        magnitude = magnitudes(values[first - start : stop - start])
        local = torch.arange(first - start, stop - start, device=values.device)
        early = shard.logical(local) < cutoff
        put(words, first, (magnitude > threshold) | ((magnitude == threshold) & early))


def aligned_pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """[start, stop) cut at multiples of CHUNK."""
    cuts = [start, *range((start // CHUNK + 1) * CHUNK, stop, CHUNK), stop]
    return list(zip(cuts, cuts[1:], strict=False)) if stop > start else []


def put(words: torch.Tensor, start: int, chosen: torch.Tensor) -> None:
    """Set the bits from position `start` on to a bool tensor.

    The tensor may be on the CPU where the words are not.
    """
    first, last = start // 32, -(-(start + chosen.numel()) // 32)
    padded = torch.zeros((last - first) * 32, dtype=torch.bool, device=chosen.device)
    within = slice(start - first * 32, start - first * 32 + chosen.numel())
    padded[within] = chosen
    new = to_device(pack(padded), words.device)
    target = words.view(-1)[first:last]
    if within != slice(0, padded.numel()):
        padded[within] = True
        new |= target & ~to_device(pack(padded), words.device)
    target.copy_(new)


def count_blocks(words: torch.Tensor) -> torch.Tensor:
    """Number of bits set in each row of words [m, 32]; int64 [m]."""
    pieces = words.split(CHUNK // BLOCK)
    counts = [unpack(piece).view(-1, BLOCK).sum(dim=1) for piece in pieces]
    return torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64, device=words.device)


def positions(bits: Bits, first_block: int, last_block: int) -> torch.Tensor:
    """Chosen entries of blocks [first, last), counted from the first of them; int64."""
    words = bits.words[first_block:last_block]
    if bits.patch is not None and bits.patches is not None:
        patch = bits.patch[first_block:last_block]
        rows = bits.patches.index_select(0, patch.clamp(min=0))
        words = torch.where(patch[:, None] >= 0, rows, words)
    chosen = unpack(words)
    if chosen.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(chosen.numpy()))
    return chosen.nonzero().view(-1)
