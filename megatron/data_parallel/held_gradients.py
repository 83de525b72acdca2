"""Accumulates gradients of many parameters together, with one launch for a few dozen of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.data_parallel.bucket import GradBucket, Slice

HELD_BYTES = 64 * 1024 * 1024
"""Gradients that are kept until one launch accumulates them all."""
LARGEST_CAST = 1 << 20
"""Entries up to which a gradient of another dtype than its bucket is kept. The cast passes through
memory once more, which a saved launch pays for in small gradients only."""


@dataclass
class Slot:
    """Where a parameter's gradient goes. `fresh`: nothing was accumulated in this step yet."""

    bucket: GradBucket
    where: Slice
    arrivals: int
    fresh: bool = True

    @property
    def out(self) -> torch.Tensor:
        """View of the bucket, whose memory may be another in each step."""
        return self.where.of(self.bucket.grad)


class HeldGradients:
    """Gradients that wait to be accumulated, by the names of their parameters."""

    def __init__(self) -> None:
        self._gradients: dict[str, tuple[Slot, torch.Tensor]] = {}
        self._bytes = 0

    def takes(self, grad: torch.Tensor, slot: Slot) -> bool:
        """Return whether to hold a gradient: on a GPU, where a launch takes longer than most
        gradients do. A layout that stores some of the entries gathers each gradient by itself."""
        small = grad.dtype == slot.bucket.grad.dtype or grad.numel() <= LARGEST_CAST
        return small and grad.numel() == slot.where.numel and launches_kernels(grad)

    def add(self, name: str, grad: torch.Tensor, slot: Slot) -> None:
        """Hold a gradient, which nobody else may write to any more."""
        if name in self._gradients:  # from the microbatch before
            self.store()
        self._gradients[name] = slot, grad
        self._bytes += grad.nbytes
        if self._bytes >= HELD_BYTES:
            self.store()

    def store(self) -> None:
        """Accumulate all that is held."""
        held = list(self._gradients.values())
        for fresh in (True, False):
            some = [(slot.out, grad.reshape(-1)) for slot, grad in held if slot.fresh == fresh]
            if some:
                outs, grads = map(list, zip(*some, strict=True))
                _store_together(outs, grads, add=not fresh)
        for slot, _ in held:
            slot.fresh = False
        self._gradients, self._bytes = {}, 0


def launches_kernels(tensor: torch.Tensor) -> bool:
    """Return whether an operation on the tensor is a launch. Tests replace this function."""
    return tensor.device.type != "cpu"


def _store_together(outs: list[torch.Tensor], grads: list[torch.Tensor], *, add: bool) -> None:
    """Copy or add gradients, 1-D, to `outs`, which may be of another dtype."""
    copy, add_ = torch._foreach_copy_, torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
    if add and any(out.dtype != grad.dtype for out, grad in zip(outs, grads, strict=True)):
        # `_foreach_add_` would launch a kernel for each gradient, `_foreach_copy_` does not.
        sizes = [out.numel() for out in outs]
        cast = torch.empty(sum(sizes), dtype=outs[0].dtype, device=outs[0].device)
        cast = list(cast.split(sizes))
        copy(cast, grads)
        grads = cast
    (add_ if add else copy)(outs, grads)
