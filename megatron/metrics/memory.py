"""The peak of a process's memory."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


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
    try:
        peak = resident("VmHWM")
    except OSError:
        peak = None
    # Linux carries ru_maxrss across exec, so that it may be the peak of the launcher.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def resident(field: str) -> int | None:
    """Return VmRSS, the resident memory of this process, or VmHWM, its peak, in bytes (Linux).

    Returns None if the system has no such field.

    Raises:
        OSError: The system has no file of the memory of a process.
    """
    for line in STATUS.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
