"""Bytes of model state under SAMO: as counted here, and as the paper's Eq. 2 has them. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.sparse.sizes import bitmap_bytes

POSITION_BYTES = 4
"""Of a stored entry on a CPU: its place, int32."""
MASTER_BYTES = MOMENT_BYTES = 4


def state_bytes(
    entries: int, stored: int, *, index: int, param_bytes: int, grad_bytes: int, moments: int = 2
) -> dict[str, int]:
    """Model state by kind, of `entries` parameters of which `stored` exist, beside an index of so
    many bytes: Eq. 1 of the paper without the fp32 copy of the gradients and the 16-bit one of the
    new weights, which are made chunk by chunk. The parameters themselves are dense."""
    return {
        "parameters": param_bytes * entries,
        "gradients": grad_bytes * stored,
        "master weights": MASTER_BYTES * stored,
        "moments": MOMENT_BYTES * moments * stored,
        "index": index,
    }


def index_bytes(sizes: Mapping[str, int], stored: Mapping[str, int], *, device: str) -> int:
    """Of all parameters that are not stored whole, `sizes` in memory: a position for each entry
    that exists on a CPU, on a GPU a bitmap."""
    indexed = [name for name in sizes if stored[name] < sizes[name]]
    if device == "cpu":
        return POSITION_BYTES * sum(stored[name] for name in indexed)
    return sum(bitmap_bytes(sizes[name]) for name in indexed)


def paper_bytes(entries: int, stored: int) -> int:
    """Eq. 2: (24 f + 2) bytes a parameter."""
    return 24 * stored + 2 * entries


def memory_note(kinds: Mapping[str, int], entries: int, stored: int, *, beside_paper: bool) -> str:
    """One line that says what is kept, a parameter; beside the paper's figure, which is for 16-bit
    parameters."""
    each = ", ".join(f"{kind} {size / entries:.2f}" for kind, size in kinds.items() if size)
    text = f"samo: {sum(kinds.values()) / entries:.2f} bytes a parameter are kept ({each})"
    paper = f"; the paper's 24 f + 2 is {paper_bytes(entries, stored) / entries:.2f}"
    return text + paper * beside_paper
