"""Pinned host memory of the exact size; torch's `pin_memory` rounds up to a power of two."""

from __future__ import annotations

import mmap
from typing import Any

import torch


class _Pages(mmap.mmap):
    """Zeroed memory that is page-locked for CUDA from `lock` until it is freed."""

    # The mapping is shared, so that no write after a fork copies pages that the device uses.
    locked_at = 0

    def lock(self, address: int) -> None:
        torch.cuda.check_error(_runtime().cudaHostRegister(address, len(self), 0))
        self.locked_at = address

    def __del__(self) -> None:
        # Unregister before the pages are unmapped and their address is reused.
        if self.locked_at:
            _runtime().cudaHostUnregister(self.locked_at)


def _runtime() -> Any:
    """Return CUDA's runtime library, as torch binds it."""
    runtime = torch.cuda.cudart()
    assert runtime is not None, "there is a CUDA device"
    return runtime


def pinned_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-D tensor of zeros in page-locked memory of its own.

    Raises torch's `CudaError` if the memory cannot be locked.
    """
    room = max(1, numel)  # mmap refuses a length of 0
    pages = _Pages(-1, room * dtype.itemsize)
    tensor = torch.frombuffer(pages, dtype=dtype, count=room)
    pages.lock(tensor.data_ptr())
    return tensor[:numel]
