"""The reducer of the dense gradient path, which averages every gradient by bucketed all-reduce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.data_parallel.bucket import GradBucket, Slice
from megatron.data_parallel.exchange import Exchange, Transfer
from megatron.data_parallel.layout import BucketLayout
from megatron.data_parallel.reducer import (
    GradientReducer,
    PerEntryState,
    PiecewiseWork,
    ReducedGrad,
    StepContext,
    Work,
)
from megatron.data_parallel.wire_feedback import WireFeedback


@dataclass
class TransferWork:
    """A reduction in place into `values`; `transfer` is None if nothing was sent."""

    values: torch.Tensor
    transfer: Transfer | None

    def wait(self) -> ReducedGrad:
        if self.transfer is not None:
            self.transfer.wait()
        return ReducedGrad(values=self.values)

    def drop(self) -> None:
        self.wait()


class AllReduceReducer(GradientReducer):
    """Reducer that averages whole buckets in place by asynchronous all-reduce.

    One all-reduce per bucket is Eq. 2 of the Radius paper.

    Args:
        exchange: Collectives over data-parallel ranks.
        divides: If False, sum instead of average, for losses that were divided by the global batch
            before backward (AxoNN, section IV-B).
        most: Maximum number of entries per all-reduce; longer buckets are reduced in pieces. None
            means no limit.
        feedback: Number of entries of each parameter on this rank, without padding. Each rank then
            keeps what an encoded wire loses of its matrices, and sends it with the next gradients.
            None: the reducer has no state.
    """

    def __init__(
        self,
        exchange: Exchange,
        divides: bool = True,
        most: int | None = None,
        feedback: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(exchange)
        self.divides, self.most = divides, most
        # A single rank encodes nothing, but may load what several ranks kept.
        self._entries = feedback if exchange.ranks == 1 or not exchange.is_exact else None
        self._feedback: dict[int, WireFeedback] = {}

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        if self._entries is not None:
            matrices = [bucket for bucket in buckets if bucket.matrix]
            self._feedback = {b.index: WireFeedback(b, self._entries) for b in matrices}

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        return self.average(bucket, self._joined(bucket, step))

    def average(self, bucket: GradBucket, lost: torch.Tensor | None = None) -> Work:
        """Start to average `bucket.grad` by all-reduce; `lost` is that of `Wire.mean`."""
        # A bucket may be empty on a tensor-parallel rank, and then on every data-parallel rank.
        if self.exchange.ranks == 1 or not bucket.numel:
            if lost is not None:
                lost.zero_()  # nothing is encoded
            return TransferWork(bucket.grad, None)
        most = self.most or bucket.numel
        starts = range(0, bucket.numel, most)
        pieces = [Slice(start, min(most, bucket.numel - start)) for start in starts]
        work = [(where, self._reduced(bucket, where, lost)) for where in pieces]
        return work[0][1] if len(work) == 1 else PiecewiseWork(bucket.grad, work)

    def commit(self, bucket: GradBucket, update: torch.Tensor | None) -> None:
        if bucket.index in self._feedback:
            self._feedback[bucket.index].keep()

    def abort(self, bucket: GradBucket) -> None:
        if bucket.index in self._feedback:
            self._feedback[bucket.index].forget()

    def state_tensors(self) -> Iterator[tuple[str, PerEntryState]]:
        for feedback in self._feedback.values():
            yield from feedback.states()

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        for feedback in self._feedback.values():
            feedback.load(own)

    @property
    def overflow_bound(self) -> float | None:
        if not self.exchange.is_exact:
            return None
        return 1.0 if self.divides else float(self.exchange.ranks)

    def _joined(self, bucket: GradBucket, step: StepContext) -> torch.Tensor | None:
        """Add what is kept to the gradients; return memory for what will be lost, if it is kept."""
        feedback = self._feedback.get(bucket.index)
        if feedback is None or not step.layout_is_final:
            return None
        if self.exchange.ranks == 1 and not feedback.is_pending:
            return None
        return feedback.join(bucket.grad, step.loss_scale)

    def _reduced(self, bucket: GradBucket, where: Slice, lost: torch.Tensor | None) -> TransferWork:
        grad, exchange = where.of(bucket.grad), self.exchange
        if not self.divides:
            return TransferWork(grad, exchange.sum(grad))
        part = None if lost is None else where.of(lost)
        return TransferWork(grad, exchange.mean(grad, matrix=bucket.matrix, lost=part))
