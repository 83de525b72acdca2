"""Reductions over a flat bucket: the square of its norm, and a bound of its entries."""

from __future__ import annotations

from collections.abc import Iterator

import torch

NORM_ROW = 1 << 10
"""Number of entries summed in fp32 before fp64 takes over.

Rows 64 times as long take equal time, with 40 (bf16) to 350 times the error.
"""
PIECE = 256 * 1024
"""Number of entries that are widened at a time on a CPU, small enough for its cache."""
WIDE_LIMIT = 2.0**59
"""Bound of fp32 and bf16 entries: a row of entries of this size still has a finite fp32 norm."""


def reach(values: torch.Tensor) -> torch.Tensor:
    """Return an upper bound of the absolute entries (fp32 scalar), non-finite if an entry is.

    The bound is far cheaper than `isfinite().all()`. For fp16 it is the largest absolute entry,
    since loss scaling keeps entries near the limit of the dtype. For other dtypes it is the norm,
    which also rejects entries whose squares overflow: such an entry could wait in the residual of a
    sparse path and spoil every later norm. torch sums bf16 in fp32 and rounds once.
    """
    if values.dtype != torch.float16:
        return torch.linalg.vector_norm(values).float()
    if not values.numel():
        return torch.zeros((), device=values.device)
    # `aminmax` propagates NaN.
    least, most = torch.aminmax(values)
    return torch.maximum(-least, most).float()


def may_overflow(
    reached: torch.Tensor, dtype: torch.dtype, *, overflow_bound: float, ranks: int
) -> torch.Tensor:
    """Return whether sums over `ranks` ranks, or their norm, might be non-finite (bool scalar).

    Args:
        reached: Largest `reach` of the ranks' entries.
        dtype: The dtype of the sums.
        overflow_bound: Maximum growth of an entry relative to one rank's entry, before rounding.
        ranks: Number of terms, each of which adds a rounding error.
    """
    limit = torch.finfo(dtype).max if dtype == torch.float16 else WIDE_LIMIT
    # Not ">=", because NaN must count as an overflow.
    return ~(reached * (overflow_bound * (1 + ranks * torch.finfo(dtype).eps)) < limit)


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a 1-D tensor, in fp64.

    It adds row by row: torch's fp32 norm on the CPU is off by a third of a percent at 40M entries.
    """
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for piece in _pieces(values):
        whole = piece.numel() // NORM_ROW * NORM_ROW
        by_row = piece[:whole].view(-1, NORM_ROW)
        rows = torch.linalg.vector_norm(by_row, dim=1, dtype=torch.float32)
        rest = torch.linalg.vector_norm(piece[whole:], dtype=torch.float32)
        total += rows.double().square().sum() + rest.double().square()
    return total


def _pieces(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a flat vector in fp32 pieces; each is valid until the next."""
    # On a CPU an fp32 norm of 16-bit data takes ten times as long as of its fp32 copy.
    if values.dtype == torch.float32 or values.device.type != "cpu":
        yield values
        return
    scratch = torch.empty(min(values.numel(), PIECE), dtype=torch.float32)
    for piece in values.split(scratch.numel()):
        yield scratch[: piece.numel()].copy_(piece)
