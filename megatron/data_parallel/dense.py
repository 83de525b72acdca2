"""The dense gradient path: every gradient, averaged by bucketed all-reduce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron.data_parallel.bucket_plan import ring_all_reduce_bytes
from megatron.data_parallel.interface import (
    BucketLayout,
    BucketUpdate,
    Entries,
    GradBucket,
    Reduced,
    ReducerStats,
    Slice,
    StepContext,
    Work,
)
from megatron.data_parallel.waits import Waits
from megatron.parallel.groups import Group


@dataclass
class _AllReduceWork:
    values: torch.Tensor
    pending: dist.Work | None
    reducer: AllReduceReducer

    def wait(self) -> Reduced:
        self.reducer.block_on(self.pending, self.values.device)
        return Reduced(values=self.values)

    def drop(self) -> None:
        self.wait()


@dataclass
class _PiecesWork:
    values: torch.Tensor
    pieces: list[tuple[Slice, _AllReduceWork]]

    def wait(self) -> Reduced:
        for _, work in self.pieces:
            work.wait()
        return Reduced(values=self.values)

    def drop(self) -> None:
        self.wait()


@dataclass
class AllReduceReducer:
    """Mean of whole buckets over `group`, in place, one asynchronous all-reduce each (Eq. 2 of the
    Radius paper). Keeps no state, so that commit and abort have nothing to do.

    Unless it `divides`, what it finds is the sum: of gradients of a loss that was divided by the
    whole global batch before backward, so that no pass over them is needed for it (AxoNN IV-B).
    `most`: entries of an all-reduce; of a longer bucket there are several (None: one each)."""

    group: Group
    divides: bool = True
    most: int | None = None
    carries: bool = field(default=False, init=False)
    bytes_sent: int = field(default=0, init=False)
    waits: Waits = field(default_factory=Waits, init=False)

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        pass

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        # A tensor-parallel rank may have none of what is sent of a bucket, and its copies neither.
        if self.group.size == 1 or not bucket.numel:
            return _AllReduceWork(bucket.grad, None, self)
        most = self.most or bucket.numel
        starts = range(0, bucket.numel, most)
        pieces = [Slice(start, min(most, bucket.numel - start)) for start in starts]
        work = [(where, self._all_reduce(where.of(bucket.grad))) for where in pieces]
        return work[0][1] if len(work) == 1 else _PiecesWork(bucket.grad, work)

    def _all_reduce(self, grad: torch.Tensor) -> _AllReduceWork:
        pending = self.group.all_reduce(grad, self.prepare(grad), async_op=True)
        self.bytes_sent += ring_all_reduce_bytes(grad.nbytes, self.group.size)
        return _AllReduceWork(grad, pending, self)

    @property
    def growth(self) -> float:
        """See `PathParts.growth`."""
        return 1.0 if self.divides else float(self.group.size)

    def prepare(self, grad: torch.Tensor) -> dist.ReduceOp.RedOpType:
        """Divide a gradient if that comes before the sum, and tell by which operation to reduce."""
        if not self.divides:
            return dist.ReduceOp.SUM
        if grad.dtype == torch.float32:
            return dist.ReduceOp.AVG
        # A 16-bit sum can overflow where its mean does not, so the division comes first.
        grad.div_(self.group.size)
        return dist.ReduceOp.SUM

    def block_on(self, pending: dist.Work | None, device: torch.device) -> None:
        """Wait for what was sent of a tensor on `device`, if anything was, and count the time."""
        if pending is not None:
            with self.waits.on(device):
                pending.wait()

    def wants_update(self, step: StepContext) -> bool:
        return False

    def commit(self, bucket: GradBucket, update: BucketUpdate | None) -> None:
        pass

    def abort(self, bucket: GradBucket) -> None:
        pass

    def why_idle(self, first: int, last: int) -> str:
        return ""

    def stats(self, *, full: bool = False) -> ReducerStats:
        stats = ReducerStats(bytes_sent=self.bytes_sent, wait_seconds=self.waits.take())
        self.bytes_sent = 0
        return stats

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor | Entries]]:
        return iter(())

    def state_tensors(self) -> Iterator[tuple[str, Entries]]:
        return iter(())

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        assert not own, "the dense path has no state of its own"
