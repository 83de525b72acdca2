"""The most memory that a process has held."""

from __future__ import annotations

import resource

import torch


def restart_peak_memory(device: torch.device) -> None:
    """Let the peak start again from the memory that is held now.

    The peak of a process on the CPU is the kernel's, which goes on rising from the start of the
    process.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak: of tensors on a GPU, or of the resident memory of a process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
