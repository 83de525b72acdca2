"""How many entries an optimizer takes at a time. Loads no torch, so that the planner counts with
the numbers that a run allocates by."""

from __future__ import annotations

from megatron.data_parallel.bucket import ALIGNMENT

CPU_CHUNK = 256 * 1024
"""Entries: five fp32 streams of this length stay within a few MiB of cache."""
CUDA_CHUNK = 64 * 1024 * 1024
SETS = 2
"""Of buffers on the device for states that are offloaded."""


def offload_piece(bucket_size: int) -> int:
    """Entries of a set, of which all together have room for `bucket_size`."""
    return bucket_size // SETS // ALIGNMENT * ALIGNMENT
