"""The chunk sizes of optimizers, shared by the planner and a run. Imports no torch."""

from __future__ import annotations

from megatron.data_parallel.bucket import ALIGNMENT, STATE_BLOCK

CPU_CHUNK = 256 * 1024
"""Entries per chunk: five fp32 streams of this length fit in a few MiB of cache."""
CUDA_CHUNK = 64 * 1024 * 1024
CPU_CODED_CHUNK, CUDA_CODED_CHUNK = 64 * 1024, 4 * 1024 * 1024
"""Entries per chunk of states that are not fp32, which an update reads into fp32 copies."""
SETS = 2
"""Number of sets of device buffers for offloaded states."""


def offload_piece(bucket_size: int) -> int:
    """Return the aligned number of entries per set, if all sets together hold `bucket_size`."""
    return bucket_size // SETS // ALIGNMENT * ALIGNMENT


def coded_chunk(chunk: int, device: str) -> int:
    """Return the number of entries of states that are not fp32 that are updated at a time.

    It is a multiple of the block that shares a scale.
    """
    most = min(chunk, CPU_CODED_CHUNK if device == "cpu" else CUDA_CODED_CHUNK)
    return max(most // STATE_BLOCK, 1) * STATE_BLOCK
