"""The peak of a process's memory."""

from __future__ import annotations

import resource

import torch


def restart_peak_memory(device: torch.device) -> None:
    """Reset a GPU's peak to the memory in use now.

    Does nothing on the CPU, where the kernel's peak of a process cannot be reset.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak in bytes: of tensors on a GPU, of resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
