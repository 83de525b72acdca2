"""What Radius keeps, in bytes: for the planner, and for the log beside what the paper keeps."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from radius.index import index_bytes, quota
from radius.native_library import instruction_sets

PAPERS = 1 + 4
"""Bytes a parameter that the paper's implementation adds: a boolean and an fp32 residual."""


def radius_bytes(
    matrices: Iterable[int],
    *,
    density: Fraction,
    residual: str,
    rolling_interval: int | None,
    value_bytes: int,
    bits: bool,
) -> dict[str, int]:
    """Bytes by kind for matrices of so many entries. `bits`: see `index.keeps_bits`. `values`: what
    is sent, in `value_bytes` each, and the counts of steps that a rolling schedule adds to them; a
    CPU keeps their memory from step to step, on a GPU they are there while they are sent."""
    sizes = list(matrices)
    if density >= 1:
        return {"index": 0, "residual": 0, "values": 0}
    entries, chosen = sum(sizes), sum(quota(density, size) for size in sizes)
    sent, each = chosen, value_bytes
    if rolling_interval is not None:
        sent += -(-(entries - chosen) // rolling_interval)
        each += 4 if residual != "none" else 0
    return {
        "index": index_bytes(entries, chosen, bits=bits),
        "residual": 4 * entries if residual == "separate" else 0,
        "values": each * sent,
    }


def memory_note(entries: int, kinds: dict[str, int], device: str, *, bits: bool) -> str:
    """The sentence for the log of a rank whose matrices have so many entries."""
    index, residual, values = (_size(kinds[kind]) for kind in ("index", "residual", "values"))
    papers = f"(the paper: {_size(PAPERS * entries)} of booleans and residual)"
    if device == "cpu":
        kept = f"{index} of index, {residual} of residual and {values} of values"
        best = instruction_sets()[-1:]
        by = " with ".join(["compiled kernels", *best]) if bits else "torch"
        return f"radius: keeps {kept} for {entries:,} entries {papers}; moves them by {by}"
    return (
        f"radius: keeps {index} of index and {residual} of residual for {entries:,} entries, and "
        f"{values} of values while they are sent {papers}"
    )


def _size(size: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1000:.3g} kB"
