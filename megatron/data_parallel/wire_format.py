"""The sizes of values on an encoded wire, by the value of `--grad-wire`. Imports no torch."""

from __future__ import annotations

BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
"""Bits of a value."""
BLOCK = 128
"""Number of 8- or 4-bit values that share a scale of 16 bits."""


def format_of(wire: str, *, matrix: bool) -> str:
    """Return the format of a parameter's values: 1-D parameters travel in at least 16 bits."""
    return wire if matrix or BITS[wire] >= 16 else "bf16"


def block_of(form: str) -> int:
    """Return the number of values that are encoded together."""
    return BLOCK if BITS[form] < 16 else 1


def encoded_bytes(form: str, count: int) -> int:
    """Return the bytes of `count` values, a multiple of `block_of`."""
    scales = 2 * (count // BLOCK) if BITS[form] < 16 else 0
    return scales + count * BITS[form] // 8


def chunk_length(form: str, count: int, ranks: int) -> int:
    """Return the number of values of each rank's chunk of `count` values, padding included."""
    block = block_of(form)
    return max(-(-count // (ranks * block)), 1) * block


def part_bytes(form: str, count: int) -> int:
    """Return the bytes of `count` values that are padded to whole blocks."""
    block = block_of(form)
    return encoded_bytes(form, max(-(-count // block), 1) * block)


def mean_bytes(form: str, count: int, ranks: int) -> int:
    """Return the bytes of all chunks; a mean sends 2 (n - 1) / n of them from each of n ranks."""
    return ranks * encoded_bytes(form, chunk_length(form, count, ranks))
