"""Copies of tensors from the host to a device."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on `device`, without making the host wait for a GPU.

    CUDA copies asynchronously from page-locked memory only; from other memory the host first waits
    for all earlier work of the stream. The page-locked copy belongs to torch's caching host
    allocator, which reuses its memory only after the device has read it.
    """
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
