"""The functions of `kernels` in plain torch: their reference, and the CPU implementation.

A bitmap is int32 words, 32 per block of 1024 entries, in the order of `numpy.packbits`: byte i of
the words in memory holds entries 8i to 8i + 7, the first entry in the highest bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.sparse.sizes import BINS, BLOCK, TIE_BLOCK
from megatron.sparse.sizes import GROUP as GROUP
from megatron.transfer import to_device

if TYPE_CHECKING:
    from megatron.sparse.shard import FlatShard

WORDS = BLOCK // 32
CHUNK = 256 * 1024
"""Entries processed together: an int32 copy of a chunk stays in a CPU's cache."""
MAGNITUDE = 0x7FFFFFFF
"""All bits of an fp32 number but its sign; as integers these bits are ordered by magnitude."""


@dataclass(frozen=True)
class Bits:
    """A bitmap of the chosen entries among `length`, for the kernels.

    `words` [blocks, 32] int32; `counts` and `offsets` [blocks] int64, the number of chosen entries
    in each block and before it. Where `patch` [blocks] int32 is not negative, row `patch` of
    `patches` replaces the block's words.
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
        """Create a bitmap with offsets computed from `counts`."""
        return cls(length, words, counts, counts.cumsum(0) - counts, patch, patches)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.words.shape[0]

    def part(self, first: int, last: int) -> Bits:
        """Return the bitmap of blocks [first, last)."""
        counts, patch = self.counts[first:last], self.patch
        patch = None if patch is None else patch[first:last]
        length = min(last * BLOCK, self.length) - first * BLOCK
        return Bits.of(length, self.words[first:last], counts, patch, self.patches)


def magnitudes(values: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
    """Return the bits of |x| as fp32, int32, for fp32, bf16 or fp16 values.

    Widening preserves order and ties. With int32 `scratch`, the result is a view of its beginning.
    """
    if scratch is None:
        scratch = torch.empty(values.numel(), dtype=torch.int32, device=values.device)
    bits = scratch[: values.numel()]
    if values.dtype == torch.float32:
        return torch.bitwise_and(values.view(torch.int32), MAGNITUDE, out=bits)
    bits.view(torch.float32).copy_(values.detach())
    return bits.bitwise_and_(MAGNITUDE)


def add_histogram(values: torch.Tensor, bracket: torch.Tensor, counts: torch.Tensor) -> None:
    """Count magnitudes into the int32 or int64 histogram `counts` [BINS + 1] in place.

    `bracket`, int64 [3], is (first, last, shift). A magnitude m in [first, last] counts in bin (m -
    first) >> shift, and one above `last` in the final bin.
    """
    if values.device.type == "cpu":
        first, last, shift = bracket.tolist()
        _add_histogram_on_cpu(values, first, last, shift, counts)
        return
    # The extra bin is for magnitudes below the bracket.
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
            # Magnitudes below the bracket become negative, hence above everything as unsigned
            # integers.
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
    """Count this rank's magnitudes at the threshold, per TIE_BLOCK of the whole tensor, in place.

    `counts` is int64, and undefined where `wanted` (bool []) is False.
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
    """Add 1 to `marks` for each entry of one TIE_BLOCK that is on this rank and at the threshold.

    `marks` is int64 [TIE_BLOCK]; `block` (int64 []) numbers TIE_BLOCKs of the whole tensor.
    """
    if not values.numel():
        return
    places = block * TIE_BLOCK + torch.arange(TIE_BLOCK, device=values.device)
    local, here = shard.local(places)
    found = magnitudes(values.index_select(0, local.clamp_(0, values.numel() - 1)))
    marks += (found == threshold) & here


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Unpack contiguous int32 words to a flat bool tensor, 32 entries per word."""
    if words.device.type == "cpu":  # numpy takes a tenth of torch's time, also in `pack`
        return torch.from_numpy(np.unpackbits(words.view(torch.uint8).numpy()).view(np.bool_))
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=words.device)
    return ((words.view(torch.uint8).view(-1, 1) >> places) & 1).bool().view(-1)


def pack(chosen: torch.Tensor) -> torch.Tensor:
    """Pack a bool tensor of a multiple of 32 entries into int32 words."""
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
    """Write one bit per value from position `start` on, in place; other bits do not change.

    A bit is 1 if `selection.LargestSelection` chooses the entry: if its magnitude is above the
    threshold, or at the threshold and its position in the whole tensor is before the cutoff.
    """
    for first, stop in aligned_pieces(start, start + values.numel()):
        magnitude = magnitudes(values[first - start : stop - start])
        local = torch.arange(first - start, stop - start, device=values.device)
        early = shard.logical(local) < cutoff
        put(words, first, (magnitude > threshold) | ((magnitude == threshold) & early))


def aligned_pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """Split [start, stop) at multiples of CHUNK."""
    cuts = [start, *range((start // CHUNK + 1) * CHUNK, stop, CHUNK), stop]
    return list(zip(cuts, cuts[1:], strict=False)) if stop > start else []


def put(words: torch.Tensor, start: int, chosen: torch.Tensor) -> None:
    """Copy a bool tensor into the bits from position `start` on, in place.

    `chosen` may be on the CPU when `words` are not.
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
    """Return the number of bits set in each row of words [m, 32], int64 [m]."""
    pieces = words.split(CHUNK // BLOCK)
    counts = [unpack(piece).view(-1, BLOCK).sum(dim=1) for piece in pieces]
    return torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64, device=words.device)


def patched_words(bits: Bits, first_block: int, last_block: int) -> torch.Tensor:
    """Return the words of blocks [first_block, last_block), patches included."""
    words = bits.words[first_block:last_block]
    if bits.patch is None or bits.patches is None:
        return words
    patch = bits.patch[first_block:last_block]
    rows = bits.patches.index_select(0, patch.clamp(min=0))
    return torch.where(patch[:, None] >= 0, rows, words)


def positions(bits: Bits, first_block: int, last_block: int) -> torch.Tensor:
    """Return the chosen positions in the blocks, relative to `first_block`, ascending; int64."""
    chosen = unpack(patched_words(bits, first_block, last_block))
    if chosen.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(chosen.numpy()))
    return chosen.nonzero().view(-1)
