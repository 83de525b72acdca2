"""Triton kernels between a dense tensor and the compressed vector of its stored entries.

`reference.py` has the same functions in plain torch. Casts are fused, so that gradients are widened
and master weights rounded without an intermediate copy. `megatron.sparse.kernels` explains how a
program finds its values. Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from megatron.sparse.kernels import chosen_entries, launch_moving
from megatron.sparse.kernels import count_blocks as count_blocks
from megatron.sparse.reference import Bits


def compress(bits: Bits, dense: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Gather stored entries as `reference.compress` does."""
    launch_moving(_compress, bits, bits.blocks, dense, out, 0, ADD=add)


def expand(bits: Bits, values: torch.Tensor, out: torch.Tensor) -> None:
    """Scatter stored entries as `reference.expand` does."""
    launch_moving(_expand, bits, bits.blocks, values, out, 0)


# `apart`: see `megatron.sparse.kernels`. No entry past a tensor's end is chosen.


@triton.jit(do_not_specialize=["apart"])
def _compress(
    words,
    offsets,
    patch,
    patches,
    dense,
    out,
    apart,
    ADD: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    PATCHED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    chosen, place = chosen_entries(words, patch, patches, first, PATCHED, BLOCKS, WORDS)
    at = tl.arange(0, BLOCKS * WORDS * 32) + apart
    value = tl.load(dense + first * WORDS * 32 + at, mask=chosen)
    target = out + tl.load(offsets + first) + place
    if ADD:
        value = value.to(tl.float32) + tl.load(target, mask=chosen).to(tl.float32)
    tl.store(target, value.to(out.dtype.element_ty), mask=chosen)


@triton.jit(do_not_specialize=["apart"])
def _expand(
    words,
    offsets,
    patch,
    patches,
    values,
    out,
    apart,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    PATCHED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    chosen, place = chosen_entries(words, patch, patches, first, PATCHED, BLOCKS, WORDS)
    at = tl.arange(0, BLOCKS * WORDS * 32) + apart
    value = tl.load(values + tl.load(offsets + first) + place, mask=chosen)
    tl.store(out + first * WORDS * 32 + at, value.to(out.dtype.element_ty), mask=chosen)
