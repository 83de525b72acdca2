"""The reducer of the dense gradient path, which averages every gradient by bucketed all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.data_parallel.bucket import GradBucket, Slice
from megatron.data_parallel.exchange import Exchange, Transfer
from megatron.data_parallel.reducer import GradientReducer, ReducedGrad, StepContext, Work


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


@dataclass
class _PiecesWork:
    values: torch.Tensor
    pieces: list[tuple[Slice, TransferWork]]

    def wait(self) -> ReducedGrad:
        for _, work in self.pieces:
            work.wait()
        return ReducedGrad(values=self.values)

    def drop(self) -> None:
        self.wait()


class AllReduceReducer(GradientReducer):
    """Stateless reducer that averages whole buckets in place by asynchronous all-reduce.

    One all-reduce per bucket is Eq. 2 of the Radius paper.

    Args:
        exchange: Collectives over data-parallel ranks.
        divides: If False, sum instead of average, for losses that were divided by the global batch
            before backward (AxoNN, section IV-B).
        most: Maximum number of entries per all-reduce; longer buckets are reduced in pieces. None
            means no limit.
    """

    def __init__(self, exchange: Exchange, divides: bool = True, most: int | None = None) -> None:
        super().__init__(exchange)
        self.divides, self.most = divides, most

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        # A bucket may be empty on a tensor-parallel rank, and then on every data-parallel rank.
        if self.exchange.ranks == 1 or not bucket.numel:
            return TransferWork(bucket.grad, None)
        most = self.most or bucket.numel
        starts = range(0, bucket.numel, most)
        pieces = [Slice(start, min(most, bucket.numel - start)) for start in starts]
        work = [(where, self._reduced(where.of(bucket.grad))) for where in pieces]
        return work[0][1] if len(work) == 1 else _PiecesWork(bucket.grad, work)

    @property
    def overflow_bound(self) -> float | None:
        return 1.0 if self.divides else float(self.exchange.ranks)

    def _reduced(self, grad: torch.Tensor) -> TransferWork:
        exchange = self.exchange
        return TransferWork(grad, exchange.mean(grad) if self.divides else exchange.sum(grad))
