"""Gradients that were not sent yet, bucket by bucket: where they wait, and how they are sent.

Algorithm 1 of the Radius paper adds what is not selected to a residual (line 16) and sends that
with the gradient at a resample (lines 8 to 10). There are three ways to keep it: not at all, as the
paper does, and in the gradient buffer itself.
"""

from __future__ import annotations

import torch

from megatron.data_parallel.bucket import ALIGNMENT, GradBucket
from megatron.sparse.selection import CHUNK
from radius.index import BucketIndex, IndexPart

LARGEST = 2.0**55
"""Of what an aborted step may leave in the gradient buffer: 65536 squares of it, which the norm of
the gradient adds up in fp32, are finite."""


class Residual:
    """No error feedback: what `bucket` does not send is lost. The others build on this."""

    def __init__(self, bucket: GradBucket) -> None:
        self.bucket = bucket

    @property
    def pending(self) -> torch.Tensor | None:
        """What waits, fp32 in unscaled units, as long as the bucket; None where all of it is zero
        for certain. Entries that the index has chosen mean nothing there."""
        return None

    def open(self) -> torch.Tensor:
        """The place of `pending`, to be filled from a checkpoint."""
        raise AssertionError("nothing waits here")

    def gather(self, index: BucketIndex, out: torch.Tensor) -> None:
        """Read the part of the gradient that is sent between resamples."""
        index.gather(self.bucket.grad, out)

    def squared_norm(self, index: BucketIndex) -> torch.Tensor | None:
        """Of what waits (fp64 []), at a resample before `join`; None where nothing does."""
        return None

    def join(self, index: BucketIndex | None, loss_scale: float) -> None:
        """Add all that waits to the gradient; saved state does not change."""

    def join_part(self, index: BucketIndex, part: IndexPart, loss_scale: float) -> None:
        """Add what waits in one part to the gradient; saved state does not change."""

    def prepare(self, loss_scale: float) -> None:
        """What is sent has left: find what is to wait once the step is applied. The gradient is
        used up."""

    def keep(self, loss_scale: float) -> None:
        """The step was applied and sent what is chosen: the rest of the gradient waits from now."""

    def flush(self, part: IndexPart) -> None:
        """The step was applied and sent all of this part."""

    def empty(self) -> None:
        """The step was applied and sent everything."""

    def undo(self, index: BucketIndex | None) -> None:
        """The step was dropped on every rank."""


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


class InPlaceResidual(Residual):
    """The gradient buffer itself: sent entries are cleared, the others carry over to the next step.

    What a skipped step had added stays there, but for entries that are not finite, or so large that
    no norm with them would ever be and every later resample were skipped for it. The loss scale is
    1. Buckets that are sent whole are emptied after each step.
    """

    def __init__(self, bucket: GradBucket) -> None:
        super().__init__(bucket)
        self._waits = False

    @property
    def pending(self) -> torch.Tensor | None:
        return self.bucket.grad if self._waits else None

    def open(self) -> torch.Tensor:
        self._waits = True
        return self.bucket.grad

    def gather(self, index: BucketIndex, out: torch.Tensor) -> None:
        index.take(self.bucket.grad, out)

    def squared_norm(self, index: BucketIndex) -> torch.Tensor | None:
        # This step's gradient has joined already. It lies in chosen entries too, and goes with
        # everything, so that none may be cleared here.
        chosen = self.bucket.grad.new_empty(index.numel)
        index.gather(self.bucket.grad, chosen)
        return (squares(self.bucket.grad) - squares(chosen)).clamp_(min=0)

    def keep(self, loss_scale: float) -> None:
        self._waits = True

    def empty(self) -> None:
        self.bucket.grad.zero_()
        self._waits = False

    def undo(self, index: BucketIndex | None) -> None:
        if index is None:
            self.empty()
            return
        # After a resample's mean was taken it lies here on every rank, so no rank's share is lost.
        self._waits = True
        index.clear(self.bucket.grad)
        for chunk in self.bucket.grad.split(CHUNK):
            # NaN is not below it either.
            chunk.masked_fill_(~(chunk.abs() <= LARGEST), 0.0)


RESIDUALS: dict[str, type[Residual]] = {
    "separate": SeparateResidual,
    "in-place": InPlaceResidual,
    "none": Residual,
}
"""The values of `--radius-residual`."""


def squares(values: torch.Tensor) -> torch.Tensor:
    """Their sum (fp64 []), by rows: one long sum in fp32 would be far off."""
    whole = values.numel() // ALIGNMENT * ALIGNMENT
    rows = torch.linalg.vector_norm(values[:whole].view(-1, ALIGNMENT), dim=1).double()
    return rows.square().sum() + values[whole:].double().square().sum()


def _add(total: torch.Tensor, more: torch.Tensor, factor: float) -> None:
    """`total` += `factor` x `more`, in fp32 whatever their types are. A CPU takes six times as long
    to add tensors of two types as to widen them in cache first."""
    if total.dtype == more.dtype or total.device.type != "cpu":
        total.add_(more, alpha=factor)
        return
    for part, addend in zip(total.split(CHUNK), more.split(CHUNK), strict=True):
        part.copy_(part.float().add_(addend.float(), alpha=factor))
