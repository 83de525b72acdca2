"""The chunk sizes of optimizers, shared by the planner and a run. Imports no torch."""

from __future__ import annotations

from megatron.data_parallel.bucket import ALIGNMENT

CPU_CHUNK = 256 * 1024
"""Entries per chunk: five fp32 streams of this length fit in a few MiB of cache."""
CUDA_CHUNK = 64 * 1024 * 1024
SETS = 2
"""Number of sets of device buffers for offloaded states."""


def offload_piece(bucket_size: int) -> int:
    """Return the aligned number of entries per set, if all sets together hold `bucket_size`."""
    return bucket_size // SETS // ALIGNMENT * ALIGNMENT
