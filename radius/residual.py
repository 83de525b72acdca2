"""Gradients that were not sent yet, bucket by bucket: where they wait, and how they are sent.

Algorithm 1 of the Radius paper adds what is not selected to a residual (line 16) and sends that
with the gradient at a resample (lines 8 to 10). A residual is kept as in the paper, or not.
"""

from __future__ import annotations

import torch

from megatron.data_parallel.bucket import ALIGNMENT, GradBucket
from megatron.sparse.selection import CHUNK
from radius.index import BucketIndex, IndexPart


class Residual:
    """No error feedback: what `bucket` does not send is lost. The others build on this."""

    def __init__(self, bucket: GradBucket) -> None:
        self.bucket = bucket

    @property
    def pending(self) -> torch.Tensor | None:
        """The residual, fp32 in unscaled units, as long as the bucket.

        None where all of it is zero for certain. Entries that the index has chosen mean nothing
        there.
        """
        return None

    def open(self) -> torch.Tensor:
        """The place of `pending`, to be filled from a checkpoint."""
        raise AssertionError("nothing waits here")

    def squared_norm(self, index: BucketIndex) -> torch.Tensor | None:
        """Return the squared norm of the residual (fp64 []) at a resample before `join`.

        None without residual.
        """
        return None

    def join(self, index: BucketIndex | None, loss_scale: float) -> None:
        """Add all that waits to the gradient; saved state does not change."""

    def join_part(self, index: BucketIndex, part: IndexPart, loss_scale: float) -> None:
        """Add what waits in one part to the gradient; saved state does not change."""

    def prepare(self, loss_scale: float) -> None:
        """Find the next residual while the sent entries travel; uses up the gradient.

        It takes effect once the step is applied.

        The gradient is used up.
        """

    def keep(self, loss_scale: float) -> None:
        """The step was applied and sent what is chosen: the rest of the gradient waits from now."""

    def flush(self, part: IndexPart) -> None:
        """The step was applied and sent all of this part."""

    def empty(self) -> None:
        """The step was applied and sent everything."""


class SeparateResidual(Residual):
    """A buffer of its own, as in the paper.

    Its sum with the gradient is formed in the gradient's memory while what is sent is on its way,
    and the two trade places when the step is applied, so that a dropped step leaves it as it was.
    It cannot trade with 16-bit gradients, which are added to it then. Chosen entries are added as
    well, which is a plain sum of two vectors, and cleared when it is next sent; the index stays the
    same until then.
    """

    def __init__(self, bucket: GradBucket) -> None:
        super().__init__(bucket)
        self._waits = False
        self._trades = bucket.grad.dtype == torch.float32
        self._made: torch.Tensor | None = None

    @property
    def _buffer(self) -> torch.Tensor:
        """Made when something is first to wait: coordinates may be others before that."""
        if self._made is None:
            self._made = torch.zeros_like(self.bucket.grad, dtype=torch.float32)
        return self._made

    @property
    def pending(self) -> torch.Tensor | None:
        return self._buffer if self._waits else None

    def open(self) -> torch.Tensor:
        self._waits = True
        return self._buffer

    def squared_norm(self, index: BucketIndex) -> torch.Tensor | None:
        if not self._waits:
            return None
        index.clear(self._buffer)
        return squares(self._buffer)

    def join(self, index: BucketIndex | None, loss_scale: float) -> None:
        if self._waits:
            assert index is not None, "something waits because something else was chosen"
            index.clear(self._buffer)
            _add(self.bucket.grad, self._buffer, loss_scale)

    def join_part(self, index: BucketIndex, part: IndexPart, loss_scale: float) -> None:
        if self._waits:
            waiting = self._buffer[part.start : part.stop]
            index.clear_part(self._buffer, part.start, part.length)
            _add(self.bucket.grad[part.start : part.stop], waiting, loss_scale)

    def prepare(self, loss_scale: float) -> None:
        if self._trades:
            grad = self.bucket.grad
            torch.add(self._buffer, grad, alpha=1.0 / loss_scale, out=grad)

    def keep(self, loss_scale: float) -> None:
        self._waits = True
        if self._trades:
            self._made, self.bucket.grad = self.bucket.grad, self._buffer
        else:
            _add(self._buffer, self.bucket.grad, 1.0 / loss_scale)

    def flush(self, part: IndexPart) -> None:
        self._buffer[part.start : part.stop] = 0.0

    def empty(self) -> None:
        if self._waits:
            self._buffer.zero_()
            self._waits = False


RESIDUALS: dict[str, type[Residual]] = {
    "separate": SeparateResidual,
    "none": Residual,
}
"""The values of `--radius-residual`."""


def squares(values: torch.Tensor) -> torch.Tensor:
    """Their sum (fp64 []), by rows: one long sum in fp32 would be far off."""
    whole = values.numel() // ALIGNMENT * ALIGNMENT
    rows = torch.linalg.vector_norm(values[:whole].view(-1, ALIGNMENT), dim=1).double()
    return rows.square().sum() + values[whole:].double().square().sum()


def _add(total: torch.Tensor, more: torch.Tensor, factor: float) -> None:
    """`total` += `factor` x `more`, in fp32 whatever their types are.

    A CPU takes six times as long to add tensors of two types as to widen them in cache first.
    """
    if total.dtype == more.dtype or total.device.type != "cpu":
        total.add_(more, alpha=factor)
        return
    for part, addend in zip(total.split(CHUNK), more.split(CHUNK), strict=True):
        part.copy_(part.float().add_(addend.float(), alpha=factor))
