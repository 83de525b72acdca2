"""Sizes used by the tests of this folder."""

from __future__ import annotations

small = False
"""Set where the CPU plays the GPU (`tests/rehearsal`)."""


def fitting(on_gpu: int, on_cpu: int) -> int:
    """Return the size for a GPU, or the one for a CPU that plays it."""
    return on_cpu if small else on_gpu
