"""Copies of tensors from the host to a device."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`, without a wait of the host for the device.

    CUDA copies from page-locked memory alone beside the host's work: from other memory it first
    finishes what the stream was given before. The page-locked copy belongs to torch's caching host
    allocator, which gives its memory out again only after the device has read it.
    """
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
