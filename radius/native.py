"""The functions of `reference.py`, except `write_bits`, by `native.c`, with bit-identical results.

The reference handles tensors whose entries do not have 2 or 4 bytes. The functions raise
`ValueError` for tensors that do not fit the bitmap or are not contiguous on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from megatron.sparse.reference import BLOCK, GROUP, Bits
from radius import reference
from radius.native_library import INSTRUCTION_SETS, instruction_sets, native_library

FUSED_ADAMW = ("frozen",)
"""Values of `ReducedGrad.unselected` for which there is an AdamW kernel.

With zeros elsewhere, torch's own kernel on expanded chunks is as fast.
"""
SIZES = (2, 4)
"""Sizes of an entry, in bytes, for which there are kernels."""
_library: Any = native_library()
_BEST = len(instruction_sets())
_in_use: ContextVar[int] = ContextVar("instruction set", default=_BEST)
"""Number of the instruction set in use, as in `native.c`; the best one by default."""


@contextmanager
def using(instruction_set: str) -> Iterator[None]:
    """Use another of `instruction_sets()`, so that tests can cover each of them."""
    token = _in_use.set(1 + INSTRUCTION_SETS.index(instruction_set))
    try:
        yield
    finally:
        _in_use.reset(token)


def compact(bits: Bits, flat: torch.Tensor, out: torch.Tensor) -> None:
    """Compact as `reference.compact` does."""
    if flat.element_size() not in SIZES:
        reference.compact(bits, flat, out)
        return
    _compact(bits, flat, out)


def clear(bits: Bits, flat: torch.Tensor) -> None:
    """Clear as `reference.clear` does."""
    if flat.element_size() not in SIZES:
        reference.clear(bits, flat)
        return
    _compact(bits, flat, None)


def clear_range(bits: Bits, flat: torch.Tensor, start: int, stop: int) -> None:
    """Clear as `reference.clear_range` does."""
    group = GROUP * BLOCK
    first, last = -(-start // group), stop // group
    if first >= last:
        reference.clear_range(bits, flat, start, stop)
        return
    clear(bits.part(first * GROUP, last * GROUP), flat[first * group : last * group])
    reference.clear_range(bits, flat, start, first * group)
    reference.clear_range(bits, flat, last * group, stop)


def expand(
    bits: Bits, values: torch.Tensor, out: torch.Tensor, *, first: int = 0, scale: float = 1.0
) -> None:
    """Expand as `reference.expand` does."""
    if out.dtype == torch.float32:
        _expand(bits, values, out, first=first, zeros=True, scale=scale)
        return
    _expand(bits, values, out, first=first, zeros=True)
    if scale != 1.0:
        out.mul_(scale)


def place(bits: Bits, values: torch.Tensor, out: torch.Tensor) -> None:
    """Place values as `reference.place` does."""
    _expand(bits, values, out, first=0, zeros=False)


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

    Up to rounding this is `AdamW.apply` on the selected entries alone. The weights of the other
    entries, which are `frozen`, only decay.
    """
    assert frozen, "torch's kernel updates all entries as fast"
    beta1, beta2 = betas
    length, grad = weight.numel(), values.float()
    counts = steps_accumulated
    states = (weight, exp_avg, exp_avg_sq)
    _require(length <= bits.blocks * BLOCK and all(state.numel() == length for state in states))
    _require(all(state.dtype == torch.float32 for state in states))
    _require(counts is None or (counts.dtype, counts.shape) == (torch.float32, grad.shape))
    done = _library.sparsetron_adamw(
        *(_in_use.get(), _at(bits.words), _at(bits.patch), _at(bits.patches)),
        *(_at(grad), _at(counts), grad.numel(), *(_at(state) for state in states), length),
        *(factor, beta1, beta2, 1.0 - lr * weight_decay, lr / (1.0 - beta1**t)),
        *(math.sqrt(1.0 - beta2**t), eps),
    )
    _require(done == grad.numel())


def count_blocks(words: torch.Tensor) -> torch.Tensor:
    """Count the bits of each block as `megatron.sparse.reference.count_blocks` does."""
    counts = torch.empty(words.shape[0], dtype=torch.int64)
    _library.sparsetron_count(_at(words), words.shape[0], _at(counts))
    return counts


def _compact(bits: Bits, flat: torch.Tensor, out: torch.Tensor | None) -> None:
    """Write the selected entries of `flat` to `out`; None: set them to 0."""
    count = flat.numel() if out is None else out.numel()
    _require(flat.numel() <= bits.blocks * BLOCK and (out is None or out.dtype == flat.dtype))
    done = _library.sparsetron_compact(
        *(_in_use.get(), _at(bits.words), _at(bits.patch), _at(bits.patches)),
        *(_at(flat), flat.numel(), _at(out), count, flat.element_size(), out is None),
    )
    _require(done >= 0 and (out is None or done == count))


def _expand(
    bits: Bits,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    first: int,
    zeros: bool,
    scale: float = 1.0,
) -> None:
    size = out.element_size()
    if size not in SIZES:
        if zeros:
            reference.expand(bits, values, out, first=first)
        else:
            reference.place(bits, values, out)
        return
    last = first + -(-out.numel() // BLOCK)
    _require(last <= bits.blocks)
    if first:
        values = values[int(bits.offsets[first]) :]
    if values.dtype != out.dtype:
        values = values[: int(bits.counts[first:last].sum())].to(out.dtype)
    done = _library.sparsetron_expand(
        *(_in_use.get(), _at(bits.words), _at(bits.patch), _at(bits.patches), first * BLOCK),
        *(_at(values), values.numel(), _at(out), out.numel(), size, zeros, scale),
    )
    _require(done >= 0)


def _at(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's data."""
    if tensor is None:
        return None
    _require(tensor.is_contiguous() and tensor.device.type == "cpu")
    return tensor.data_ptr()


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError("the tensors are not of the bitmap's length, count, device or dtype")
