"""Joint accumulation of the gradients of many parameters, a few dozen per launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.data_parallel.bucket import GradBucket, Slice

HELD_BYTES = 64 * 1024 * 1024
"""Bytes of held gradients after which one launch accumulates them all."""
LARGEST_CAST = 1 << 20
"""Maximum number of entries of a held gradient whose dtype differs from its bucket's.

The cast costs another pass over memory, which the saved launch outweighs for small gradients only.
"""


@dataclass
class Slot:
    """The destination of a parameter's gradient.

    `arrivals`: gradients that a backward pass delivers, one for each leaf. `fresh`: no gradient of
    this step has been stored, so the next one overwrites the old values.
    """

    bucket: GradBucket
    where: Slice
    arrivals: int
    fresh: bool = True

    @property
    def out(self) -> torch.Tensor:
        """View of the bucket; the memory of the bucket may change between steps."""
        return self.where.of(self.bucket.grad)


class HeldGradients:
    """The gradients that wait for accumulation, by parameter name."""

    def __init__(self) -> None:
        self._gradients: dict[str, tuple[Slot, torch.Tensor]] = {}
        self._bytes = 0

    def takes(self, grad: torch.Tensor, slot: Slot) -> bool:
        """Return whether to hold a gradient, which pays off on a GPU, where launches are slow.

        A layout that stores some of the entries gathers each gradient separately.
        """
        small = grad.dtype == slot.bucket.grad.dtype or grad.numel() <= LARGEST_CAST
        return small and grad.numel() == slot.where.numel and launches_kernels(grad)

    def add(self, name: str, grad: torch.Tensor, slot: Slot) -> None:
        """Hold a gradient, which the caller must not modify any more."""
        if name in self._gradients:  # held since the previous microbatch
            self.store()
        self._gradients[name] = slot, grad
        self._bytes += grad.nbytes
        if self._bytes >= HELD_BYTES:
            self.store()

    def store(self) -> None:
        """Write or add all held gradients to their slices, and release them."""
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
    """Return whether operations on the tensor launch kernels. Tests replace this function."""
    return tensor.device.type != "cpu"


def _store_together(outs: list[torch.Tensor], grads: list[torch.Tensor], *, add: bool) -> None:
    """Copy or add 1-D gradients to `outs`, which may have another dtype than the gradients."""
    copy, add_ = torch._foreach_copy_, torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
    if add and any(out.dtype != grad.dtype for out, grad in zip(outs, grads, strict=True)):
        # `_foreach_add_` would launch a kernel for each gradient, `_foreach_copy_` does not.
        sizes = [out.numel() for out in outs]
        cast = torch.empty(sum(sizes), dtype=outs[0].dtype, device=outs[0].device)
        cast = list(cast.split(sizes))
        copy(cast, grads)
        grads = cast
    (add_ if add else copy)(outs, grads)
