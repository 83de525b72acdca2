"""Comparisons of SAMO's Triton kernels with plain torch on a device; `tests/gpu` uses them too.

Run as a program, this module runs all comparisons on the CPU with Triton's interpreter.
"""

from __future__ import annotations

import sys
from itertools import product

import torch

from megatron.sparse.reference import BLOCK, Bits
from samo import kernels, reference
from samo.layout import BitmapStore
from tests.triton_process import compare_all

LENGTH = 5 * BLOCK + 1000
"""Not a multiple of the block size, as for most parameters."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def some_bits(device: torch.device, kept: float) -> Bits:
    """Return the bits of a random mask with one empty block and one full block."""
    mask = torch.rand(LENGTH, generator=torch.Generator().manual_seed(1)) < kept
    mask[BLOCK : 2 * BLOCK] = False
    mask[2 * BLOCK : 3 * BLOCK] = True
    return BitmapStore(mask, device)._bits


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the tolerance between two correct casts to a dtype.

    Triton's interpreter truncates to bf16 where a GPU rounds.
    """
    return 2**-7 if dtype == torch.bfloat16 and device.type == "cpu" else 0.0


def compare_compressing(device: torch.device) -> None:
    for kept, dtype, out_dtype, add in product((0.1, 0.6), DTYPES, DTYPES, (False, True)):
        bits = some_bits(device, kept)
        dense = torch.randn(LENGTH, device=device).to(dtype)
        found = torch.randn(int(bits.counts.sum()), device=device).to(out_dtype)
        wanted = found.clone()
        kernels.compress(bits, dense, found, add=add)
        reference.compress(bits, dense, wanted, add=add)
        slack = rounding(out_dtype, device)
        torch.testing.assert_close(found, wanted, rtol=slack, atol=0.0)


def compare_expanding(device: torch.device) -> None:
    for kept, dtype in product((0.1, 0.6), DTYPES):
        bits = some_bits(device, kept)
        values = torch.randn(int(bits.counts.sum()), device=device)
        found = torch.full((LENGTH,), 7.0, dtype=dtype, device=device)
        wanted = found.clone()
        kernels.expand(bits, values, found)
        reference.expand(bits, values, wanted)
        assert torch.equal(found == 7, wanted == 7) and (wanted == 7).any()
        torch.testing.assert_close(found, wanted, rtol=rounding(dtype, device), atol=0.0)


COMPARISONS = (compare_compressing, compare_expanding)


if __name__ == "__main__":
    sys.exit(compare_all(COMPARISONS))
