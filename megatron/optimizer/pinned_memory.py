"""Host memory that a CUDA device copies from and to by itself, and no more of it than asked for:
torch's own `pin_memory` takes the next power of two, up to twice as much."""

from __future__ import annotations

import mmap
from typing import Any

import torch


class _Pages(mmap.mmap):
    """Zeroed memory, page-locked for CUDA from `lock` until it is let go. Shared, so that a forked
    data worker does not leave its parent with copies of pages that the device still writes to."""

    locked_at = 0

    def lock(self, address: int) -> None:
        torch.cuda.check_error(_runtime().cudaHostRegister(address, len(self), 0))
        self.locked_at = address

    def __del__(self) -> None:
        # Before the pages are unmapped: their address may soon be another's.
        if self.locked_at:
            _runtime().cudaHostUnregister(self.locked_at)


def _runtime() -> Any:
    """CUDA's runtime library, as torch binds it."""
    runtime = torch.cuda.cudart()
    assert runtime is not None, "there is a CUDA device"
    return runtime


def pinned_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor in page-locked memory of its own, whole pages. Raises torch's `CudaError` where
    there is not so much."""
    room = max(1, numel)  # there is no memory of no bytes
    pages = _Pages(-1, room * dtype.itemsize)
    tensor = torch.frombuffer(pages, dtype=dtype, count=room)
    pages.lock(tensor.data_ptr())
    return tensor[:numel]
