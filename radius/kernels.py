"""Triton kernels between a flat bucket and the compact vector of its selected entries.

`reference.py` has the same functions in plain torch, except AdamW, which is torch's own.
`megatron.sparse.kernels` explains how a program finds its values. Imported on CUDA only.
"""

from __future__ import annotations

import math

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from megatron.sparse.kernels import chosen_entries, launch_moving, launch_over
from megatron.sparse.kernels import count_blocks as count_blocks
from megatron.sparse.kernels import write_bits as write_bits
from megatron.sparse.reference import BLOCK, GROUP, Bits

_UPDATED = 1
"""Blocks per program of AdamW, limited by registers so that programs share a multiprocessor."""
FUSED_ADAMW = ("zero", "frozen")
"""Values of `ReducedGrad.unselected` for which there is an AdamW kernel."""
LEAST = 1e-38
"""Replacement for a beta2 of 0, which has no logarithm."""


def compact(bits: Bits, flat: torch.Tensor, out: torch.Tensor) -> None:
    """Compact as `reference.compact` does."""
    launch_moving(_compact, bits, bits.blocks, flat, out, 0, CLEAR=False)


def clear(bits: Bits, flat: torch.Tensor) -> None:
    """Clear as `reference.clear` does."""
    launch_moving(_compact, bits, bits.blocks, flat, flat, 0, CLEAR=True)


def clear_range(bits: Bits, flat: torch.Tensor, start: int, stop: int) -> None:
    """Clear as `reference.clear_range` does."""
    first = start // (GROUP * BLOCK) * GROUP
    blocks = -(-stop // BLOCK) - first
    launch_moving(_clear_range, bits, blocks, flat, first, start, stop, 0)


def expand(
    bits: Bits, values: torch.Tensor, out: torch.Tensor, *, first: int = 0, scale: float = 1.0
) -> None:
    """Expand as `reference.expand` does; `first` is a multiple of `reference.GROUP`."""
    assert first % GROUP == 0
    blocks = -(-out.numel() // BLOCK)
    launch_moving(_expand, bits, blocks, values, out, first, out.numel(), 0, ZEROS=True)
    if scale != 1.0:
        out.mul_(scale)


def place(bits: Bits, values: torch.Tensor, out: torch.Tensor) -> None:
    """Place values as `reference.place` does."""
    launch_moving(_expand, bits, bits.blocks, values, out, 0, out.numel(), 0, ZEROS=False)


def adamw(
    bits: Bits,
    values: torch.Tensor,
    steps_accumulated: torch.Tensor | None,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    factor: float,
    frozen: bool,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    t: int,
) -> None:
    """Apply AdamW's step `t` to fp32 weight and moments, with gradients at the selected entries.

    Up to rounding this is torch's fused kernel on a gradient of `values` times `factor` at the
    selected entries and 0 elsewhere; with `frozen`, other entries keep their moments and their
    weights only decay.
    `steps_accumulated`: fp32 c for each value, which the second moment takes as c gradients of
    square g^2 / c each.
    """
    beta1, beta2 = betas
    launch_over(
        _adamw,
        _UPDATED,
        bits,
        bits.blocks,
        values,
        values if steps_accumulated is None else steps_accumulated,
        weight,
        exp_avg,
        exp_avg_sq,
        bits.length,
        factor,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.log2(max(beta2, LEAST)),
        1.0 - lr * weight_decay,
        lr / (1.0 - beta1**t),
        1.0 / math.sqrt(1.0 - beta2**t),
        eps,
        0,
        ACCUMULATED=steps_accumulated is not None,
        FROZEN=frozen,
    )


@triton.jit(do_not_specialize=["apart"])
def _compact(
    words,
    offsets,
    patch,
    patches,
    flat,
    out,
    apart,
    CLEAR: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    PATCHED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    chosen, place = chosen_entries(words, patch, patches, first, PATCHED, BLOCKS, WORDS)
    source = flat + first * WORDS * 32 + tl.arange(0, BLOCKS * WORDS * 32) + apart
    if CLEAR:
        tl.store(source, tl.zeros((BLOCKS * WORDS * 32,), flat.dtype.element_ty), mask=chosen)
    else:
        value = tl.load(source, mask=chosen)
        tl.store(out + tl.load(offsets + first) + place, value, mask=chosen)


@triton.jit(do_not_specialize=["first_block", "start", "stop", "apart"])
def _clear_range(
    words,
    offsets,
    patch,
    patches,
    flat,
    first_block,
    start,
    stop,
    apart,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    PATCHED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCKS + first_block
    chosen, _ = chosen_entries(words, patch, patches, first, PATCHED, BLOCKS, WORDS)
    at = first * WORDS * 32 + tl.arange(0, BLOCKS * WORDS * 32) + apart
    zeros = tl.zeros((BLOCKS * WORDS * 32,), flat.dtype.element_ty)
    tl.store(flat + at, zeros, mask=chosen & (at >= start) & (at < stop))


@triton.jit(do_not_specialize=["first_block", "length", "apart"])
def _expand(
    words,
    offsets,
    patch,
    patches,
    values,
    out,
    first_block,
    length,
    apart,
    ZEROS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    PATCHED: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * BLOCKS
    first = begin + first_block
    begin *= WORDS * 32
    chosen, place = chosen_entries(words, patch, patches, first, PATCHED, BLOCKS, WORDS)
    at = tl.arange(0, BLOCKS * WORDS * 32) + apart
    within = at < tl.minimum(length - begin, BLOCKS * WORDS * 32).to(tl.int32)
    value = tl.load(values + tl.load(offsets + first) + place, mask=chosen & within, other=0)
    written = within if ZEROS else chosen & within
    tl.store(out + begin + at, value.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["length", "apart"])
def _adamw(
    words,
    offsets,
    patch,
    patches,
    values,
    steps_accumulated,
    weight,
    exp_avg,
    exp_avg_sq,
    length,
    factor,
    rest1,
    beta2,
    rest2,
    log_beta2,
    shrink,
    step_size,
    unbias2,
    eps,
    apart,
    ACCUMULATED: tl.constexpr,
    FROZEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    PATCHED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    chosen, place = chosen_entries(words, patch, patches, first, PATCHED, BLOCKS, WORDS)
    at = tl.arange(0, BLOCKS * WORDS * 32) + apart
    begin, before = first * WORDS * 32, tl.load(offsets + first)
    within = at < tl.minimum(length - begin, BLOCKS * WORDS * 32).to(tl.int32)
    updated = chosen if FROZEN else within
    mean = tl.load(exp_avg + begin + at, mask=updated, other=0.0)
    square = tl.load(exp_avg_sq + begin + at, mask=updated, other=0.0)
    old = shrink * tl.load(weight + begin + at, mask=within, other=0.0)
    grad = tl.load(values + before + place, mask=chosen, other=0.0).to(tl.float32) * factor
    brought = grad * grad
    if ACCUMULATED:
        steps = tl.load(steps_accumulated + before + place, mask=chosen, other=1.0)
        aged = tl.exp2((steps - 1.0) * log_beta2)
        brought *= tl.where(steps == 1.0, 1.0, (1.0 - beta2 * aged) / (steps * rest2))
        square *= aged
    mean += rest1 * (grad - mean)
    square = beta2 * square + rest2 * brought
    new = old - step_size * mean / (tl.sqrt(square) * unbias2 + eps)
    tl.store(exp_avg + begin + at, mean, mask=updated)
    tl.store(exp_avg_sq + begin + at, square, mask=updated)
    tl.store(weight + begin + at, tl.where(updated, new, old), mask=within)
