"""The functions of `native.py` and of `kernels.py`, except AdamW, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.sparse.reference import (
    BLOCK,
    CHUNK,
    Bits,
    aligned_pieces,
    patched_words,
    positions,
    unpack,
)
from megatron.sparse.reference import count_blocks as count_blocks
from megatron.sparse.reference import write_bits as write_bits

FUSED_ADAMW: tuple[str, ...] = ()
"""Values of `ReducedGrad.unselected` for which there is an AdamW kernel."""


def compact(bits: Bits, flat: torch.Tensor, out: torch.Tensor) -> None:
    """Write the selected entries of `flat` to `out`, as many and of the same dtype."""
    for piece, at, values in _pieces(bits, flat, out):
        torch.index_select(piece, 0, at, out=values)


def clear(bits: Bits, flat: torch.Tensor) -> None:
    """Set the selected entries of `flat` to 0."""
    for piece, at, _ in _pieces(bits, flat, flat):
        piece.index_fill_(0, at, 0)


def clear_range(bits: Bits, flat: torch.Tensor, start: int, stop: int) -> None:
    """Set the selected entries of `flat` in `[start, stop)` to 0."""
    for first, last in aligned_pieces(start, stop):
        block = first // BLOCK
        chosen = unpack(patched_words(bits, block, -(-last // BLOCK)))
        flat[first:last].masked_fill_(chosen[first - block * BLOCK : last - block * BLOCK], 0)


def expand(
    bits: Bits, values: torch.Tensor, out: torch.Tensor, *, first: int = 0, scale: float = 1.0
) -> None:
    """Write the values of the selected entries to `out`, and 0 to all other entries of `out`.

    `out` begins at block `first` of the bitmap, `values` at block 0. Values are cast to the dtype
    of `out`, and then multiplied by `scale`.
    """
    out.zero_()
    for piece, at, some in _pieces(bits, out, values, first):
        piece.index_copy_(0, at, some.to(out.dtype))
    if scale != 1.0:
        out.mul_(scale)


def place(bits: Bits, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write `values` to the selected entries of `out`, cast to its dtype; keep other entries."""
    for piece, at, some in _pieces(bits, out, values):
        piece.index_copy_(0, at, some.to(out.dtype))


def _pieces(
    bits: Bits, flat: torch.Tensor, compacted: torch.Tensor, first: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield each chunk's part of `flat`, selected positions in it, and part of the compact vector.

    `flat` begins at block `first`.
    """
    begin = int(bits.offsets[first]) if first else 0
    for number, piece in enumerate(flat.split(CHUNK)):
        block = first + number * (CHUNK // BLOCK)
        at = positions(bits, block, block + CHUNK // BLOCK)
        if (number + 1) * CHUNK > flat.numel():
            at = at[: torch.searchsorted(at, piece.numel())]
        yield piece, at, compacted[begin : begin + at.numel()]
        begin += at.numel()
