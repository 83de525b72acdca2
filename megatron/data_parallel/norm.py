"""What is summed up over a flat bucket: the square of its norm, and how far its entries reach."""

from __future__ import annotations

from collections.abc import Iterator

import torch

NORM_ROW = 1 << 10
"""Entries summed in fp32 before fp64 takes over. 64 times as many take as long, and are off by 40
(bf16) to 350 times as much."""
PIECE = 256 * 1024
"""Entries widened at a time on a CPU: they stay in cache."""
WIDE_LIMIT = 2.0**59
"""Of an fp32 or bf16 entry: a row of such ones still has a norm in fp32."""


def reach(values: torch.Tensor) -> torch.Tensor:
    """A number that no entry of a 1-D tensor is larger than (fp32 scalar), not finite if an entry
    is not; far cheaper than `isfinite().all()`.

    Of fp16 it is the largest entry: loss scaling keeps those near the dtype's end. Else it is the
    norm, which is not finite either where squares overflow: an entry so large that a sparse path
    does not send would wait in its residual and spoil every later norm. torch adds bf16 up in fp32
    and rounds once, to a type of the same range.
    """
    if values.dtype != torch.float16:
        return torch.linalg.vector_norm(values).float()
    if not values.numel():
        return torch.zeros((), device=values.device)
    # A NaN is passed on.
    least, most = torch.aminmax(values)
    return torch.maximum(-least, most).float()


def may_overflow(
    reached: torch.Tensor, dtype: torch.dtype, *, overflow_bound: float, ranks: int
) -> torch.Tensor:
    """Whether sums over `ranks` of entries that reach so far might not be finite, or their norm
    (bool scalar): an entry becomes `overflow_bound` times what one rank has, and each addition
    rounds."""
    limit = torch.finfo(dtype).max if dtype == torch.float16 else WIDE_LIMIT
    # Not ">=": NaN is to count.
    return ~(reached * (overflow_bound * (1 + ranks * torch.finfo(dtype).eps)) < limit)


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Of a 1-D tensor, in fp64. Row by row: torch's fp32 norm on the CPU adds one term after
    another and is off by a third of a percent at 40M entries."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for piece in _pieces(values):
        whole = piece.numel() // NORM_ROW * NORM_ROW
        by_row = piece[:whole].view(-1, NORM_ROW)
        rows = torch.linalg.vector_norm(by_row, dim=1, dtype=torch.float32)
        rest = torch.linalg.vector_norm(piece[whole:], dtype=torch.float32)
        total += rows.double().square().sum() + rest.double().square()
    return total


def _pieces(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """A flat vector, in pieces where torch would take long for the whole: asked for an fp32 norm of
    a 16-bit vector on a CPU, ten times as long as for its fp32 copy. A piece holds until the next.
    On a GPU one kernel widens what it reads."""
    if values.dtype == torch.float32 or values.device.type != "cpu":
        yield values
        return
    scratch = torch.empty(min(values.numel(), PIECE), dtype=torch.float32)
    for piece in values.split(scratch.numel()):
        yield scratch[: piece.numel()].copy_(piece)
