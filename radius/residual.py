"""Residuals: gradients that were not sent yet, by bucket.

Algorithm 1 of the Radius paper adds unselected entries to a residual (line 16), which a resample
sends with the gradient (lines 8 to 10). `--radius-residual` keeps the residual as in the paper, or
drops unsent gradients. Over an int8 or int4 wire the residual also keeps what the wire rounds off.
"""

from __future__ import annotations

import torch

from megatron.data_parallel.bucket import ALIGNMENT, GradBucket
from megatron.sparse.selection import CHUNK
from radius.bucket_index import BucketIndex, SentIndex
from radius.index import IndexPart


class Residual:
    """Base class without error feedback: gradients that are not sent are lost."""

    keeps_sent = False
    """Whether selected entries, which are sent in every step, have values too."""

    def __init__(self, bucket: GradBucket) -> None:
        self.bucket = bucket

    def waiting(self, index: BucketIndex | None) -> torch.Tensor | None:
        """Return the residual: fp32, in unscaled units, as long as the bucket.

        None if it is certainly zero. `index` has the selected entries, if any were selected.
        """
        return None

    def open(self) -> torch.Tensor:
        """Return the memory of the residual, to be filled from a checkpoint."""
        raise AssertionError("nothing waits here")

    def join_part(self, index: BucketIndex, part: IndexPart, loss_scale: float) -> None:
        """Add the residual of one part to the gradient; saved state does not change."""

    def join_sent(self, sent: SentIndex, values: torch.Tensor, loss_scale: float) -> None:
        """Add to `values`, gathered from the gradient, what a wire has lost of those entries."""

    def lost(self, numel: int) -> torch.Tensor | None:
        """Return memory for what a wire loses of the values of this step; None to forget that."""
        return None

    def prepare(self, loss_scale: float) -> None:
        """Compute the next residual while the sent entries travel.

        It takes effect once the step is applied. The gradient is overwritten.
        """

    def keep(self, sent: SentIndex | None, loss_scale: float) -> None:
        """Keep what an applied step did not send; `sent` is None if the step sent everything."""

    def flush(self, part: IndexPart) -> None:
        """Clear the residual of a part, after an applied step that sent the whole part."""

    def empty(self) -> None:
        """Clear the residual."""


class SeparateResidual(Residual):
    """A residual in a buffer of its own, as in the paper.

    The sum of residual and gradient is computed in the gradient's memory while the selected entries
    travel. When the step is applied, the two buffers are exchanged, so a dropped step leaves the
    residual unchanged. Gradients in 16 bit, or in a part of a larger bucket's memory, cannot be
    exchanged and are added to the buffer instead.
    Selected entries are added, too, since a plain sum of two vectors is faster; they are cleared
    before the residual is next sent, while the index is still the same.
    """

    def __init__(self, bucket: GradBucket) -> None:
        super().__init__(bucket)
        self._waits = False
        self._trades = bucket.grad.dtype == torch.float32 and bucket.whole is None
        self._made: torch.Tensor | None = None

    @property
    def _buffer(self) -> torch.Tensor:
        """The buffer, allocated at first use: the layout may change before that."""
        if self._made is None:
            self._made = torch.zeros_like(self.bucket.grad, dtype=torch.float32)
        return self._made

    def waiting(self, index: BucketIndex | None) -> torch.Tensor | None:
        if not self._waits:
            return None
        assert index is not None, "something waits because something else was chosen"
        index.clear(self._buffer)
        return self._buffer

    def open(self) -> torch.Tensor:
        self._waits = True
        return self._buffer

    def join_part(self, index: BucketIndex, part: IndexPart, loss_scale: float) -> None:
        if self._waits:
            waiting = self._buffer[part.start : part.stop]
            index.clear_part(self._buffer, part.start, part.length)
            add_scaled(self.bucket.grad[part.start : part.stop], waiting, loss_scale)

    def prepare(self, loss_scale: float) -> None:
        if self._trades:
            grad = self.bucket.grad
            torch.add(self._buffer, grad, alpha=1.0 / loss_scale, out=grad)

    def keep(self, sent: SentIndex | None, loss_scale: float) -> None:
        if sent is None:
            self.empty()
            return
        self._waits = True
        if self._trades:
            self._made, self.bucket.grad = self.bucket.grad, self._buffer
        else:
            add_scaled(self._buffer, self.bucket.grad, 1.0 / loss_scale)

    def flush(self, part: IndexPart) -> None:
        self._buffer[part.start : part.stop] = 0.0

    def empty(self) -> None:
        if self._waits:
            self._buffer.zero_()
            self._waits = False


class WireResidual(SeparateResidual):
    """A residual whose selected entries keep what an encoded wire has lost of them.

    So rounding is fed back like gradients that are not sent, in memory that is otherwise
    meaningless. A second buffer takes what the current step loses until all ranks apply the step.
    """

    keeps_sent = True

    def __init__(self, bucket: GradBucket) -> None:
        super().__init__(bucket)
        self._spare: torch.Tensor | None = None
        self._lost: torch.Tensor | None = None

    def waiting(self, index: BucketIndex | None) -> torch.Tensor | None:
        return self._buffer if self._waits else None

    def join_part(self, index: BucketIndex, part: IndexPart, loss_scale: float) -> None:
        """Do nothing: `join_sent` adds the residual of all entries that are sent."""

    def join_sent(self, sent: SentIndex, values: torch.Tensor, loss_scale: float) -> None:
        if self._waits:
            waiting = self._memory[: sent.numel]  # `lost` is not in use yet
            sent.gather(self._buffer, waiting)
            values.add_(waiting, alpha=loss_scale)

    def lost(self, numel: int) -> torch.Tensor | None:
        self._lost = self._memory[:numel]
        return self._lost

    def keep(self, sent: SentIndex | None, loss_scale: float) -> None:
        lost, self._lost = self._lost, None
        if lost is None:
            return
        if sent is None:
            self._made, self._spare = lost.mul_(1.0 / loss_scale), self._made
            self._waits = True
            return
        super().keep(sent, loss_scale)
        sent.clear(self._buffer)
        for start in range(0, self._buffer.numel(), CHUNK):
            part = self._buffer[start : start + CHUNK]
            stop = start + part.numel()
            part.add_(sent.expand(lost, start, stop, scale=1.0 / loss_scale))

    def flush(self, part: IndexPart) -> None:
        """Do nothing: `keep` has replaced the residual of all entries that were sent."""

    @property
    def _memory(self) -> torch.Tensor:
        """Memory as long as the buffer, allocated at first use."""
        if self._spare is None:
            self._spare = torch.zeros_like(self.bucket.grad, dtype=torch.float32)
        return self._spare


RESIDUALS: dict[str, type[Residual]] = {
    "separate": SeparateResidual,
    "none": Residual,
}
"""The values of `--radius-residual`."""


def squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares (fp64 []), by rows: one long sum in fp32 would be inaccurate."""
    whole = values.numel() // ALIGNMENT * ALIGNMENT
    rows = torch.linalg.vector_norm(values[:whole].view(-1, ALIGNMENT), dim=1).double()
    return rows.square().sum() + values[whole:].double().square().sum()


def add_scaled(total: torch.Tensor, more: torch.Tensor, factor: float) -> None:
    """Add `factor` x `more` to `total` in place, in fp32 whatever their dtypes are.

    Adding tensors of two dtypes takes a CPU six times as long as widening them in cache first.
    """
    if total.dtype == more.dtype or total.device.type != "cpu":
        total.add_(more, alpha=factor)
        return
    for part, addend in zip(total.split(CHUNK), more.split(CHUNK), strict=True):
        part.copy_(part.float().add_(addend.float(), alpha=factor))
