"""Error feedback of an encoded wire: what rounding lost is sent with the next gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from megatron.data_parallel.bucket import GradBucket, Slice
from megatron.data_parallel.reducer import PerEntryState


class WireFeedback:
    """The rounding errors of a wire for one bucket on this rank: fp32, in unscaled units.

    The mean over ranks of what they keep is the part of the gradient that is still due, so a run on
    another number of ranks continues from the mean. A step needs a second buffer, since a dropped
    step must leave the first one unchanged.

    Args:
        bucket: The bucket.
        entries: Number of entries of each parameter on this rank, which come first in its slice.
    """

    def __init__(self, bucket: GradBucket, entries: Mapping[str, int]) -> None:
        self._bucket = bucket
        self._slices = {
            name: Slice(where.start, min(where.numel, entries[name]))
            for name, where in bucket.slices.items()
        }
        self._kept: torch.Tensor | None = None
        self._lost: torch.Tensor | None = None
        self._scale = 0.0

    @property
    def is_pending(self) -> bool:
        """True if something was kept, or loaded from a checkpoint."""
        return self._kept is not None

    def join(self, grad: torch.Tensor, loss_scale: float) -> torch.Tensor:
        """Add the kept rounding errors to `grad` in place, and return a buffer for the next ones.

        Args:
            grad: Gradients of the bucket, multiplied by `loss_scale`.
            loss_scale: The loss scale of the step.

        Returns:
            fp32 memory of the length of `grad`, which this object owns. The caller writes to it
            what the wire rounds off the sum; `keep` or `forget` ends the step.
        """
        self._scale = loss_scale
        if self._kept is not None:
            grad.add_(self._kept, alpha=loss_scale)
        if self._lost is None:
            self._lost = torch.zeros_like(grad, dtype=torch.float32)
        return self._lost

    def keep(self) -> None:
        """Keep what the applied step lost."""
        if self._scale:
            assert self._lost is not None, "join made it"
            if self._scale != 1.0:
                self._lost.mul_(1.0 / self._scale)
            self._kept, self._lost, self._scale = self._lost, self._kept, 0.0

    def forget(self) -> None:
        """Forget what the dropped step lost."""
        self._scale = 0.0

    def states(self) -> Iterator[tuple[str, PerEntryState]]:
        """Yield what is kept by parameter."""
        if self._kept is not None:
            for name, where in self._slices.items():
                yield name, PerEntryState(param=name, values=partial(where.of, self._kept))

    def load(self, own: Mapping[str, torch.Tensor]) -> None:
        """Load what `states` yielded."""
        found = [(where, own[name]) for name, where in self._slices.items() if name in own]
        if not found:
            self._kept = None
            return
        self._kept = torch.zeros_like(self._bucket.grad, dtype=torch.float32)
        for where, values in found:
            where.of(self._kept).copy_(values)
