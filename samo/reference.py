"""The functions of `kernels.py` in plain torch: the reference, and the fallback without Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.sparse.reference import BLOCK, CHUNK, Bits, positions
from megatron.sparse.reference import count_blocks as count_blocks


def compress(bits: Bits, dense: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Write the chosen entries of `dense`, cast to `out`'s dtype, into `out`, or add them in place.

    Addition rounds once.
    """
    for piece, at, mine in _pieces(bits, dense, out):
        found = piece.index_select(0, at)
        mine.add_(found) if add else mine.copy_(found)


def expand(bits: Bits, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write `values`, cast to `out`'s dtype, to the chosen entries of `out` in place."""
    for piece, at, mine in _pieces(bits, out, values):
        piece.index_copy_(0, at, mine.to(out.dtype))


def _pieces(
    bits: Bits, dense: torch.Tensor, compressed: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield for each chunk its dense part, the chosen positions there, and its compressed part."""
    begin = 0
    for number, piece in enumerate(dense.split(CHUNK)):
        block = number * (CHUNK // BLOCK)
        at = positions(bits, block, block + CHUNK // BLOCK)
        yield piece, at, compressed[begin : begin + at.numel()]
        begin += at.numel()
