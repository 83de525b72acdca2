"""`--grad-path topk`: naive top-k with all-gather and error feedback (Radius paper, section 6.5).

Every rank selects for itself, so ranks hold different positions and values cannot be added on the
way: each rank's message goes to every other, which is why traffic grows with their number.

    one bucket's message, K entries of all its parameters:   [ K positions | K values | padding ]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.data_parallel.bucket import GradBucket, ParamInfo
from megatron.data_parallel.interface import Reduced, StepContext
from megatron.errors import ConfigError
from radius.baselines.feedback import CompressedWork, FeedbackReducer
from radius.baselines.sizes import count
from radius.share import ModelShare

if TYPE_CHECKING:
    from megatron.parallel.groups import Group

POSITION = torch.int32
MOST_ENTRIES = torch.iinfo(POSITION).max
SAMPLED = 61
"""One of so many entries is looked at first: a prime, so that no row length is a multiple."""


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Positions (int64, ascending) of the `k` entries of largest magnitude of a 1-D tensor; of
    equal magnitudes the lower position goes first."""
    magnitude = values.abs()
    if magnitude.device.type == "cpu":
        # There `topk` takes one thread 30 ns an entry at d = 0.01, and finding candidates 5.
        likely = _candidates(magnitude, k)
        if likely.numel() >= k:
            return likely[_largest(magnitude[likely], k)]
    return _largest(magnitude, k)


def _candidates(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """Ascending positions of all entries above a bound that a sample suggests. If they are `k` or
    more, the k largest are among them; else the sample was a bad one, or too small to take."""
    sample = magnitude[::SAMPLED]
    share = k / SAMPLED
    enough = math.ceil(share + 4 * math.sqrt(share) + 4)  # four standard deviations
    if enough > sample.numel():
        return torch.empty(0, dtype=torch.int64)
    bound = sample.topk(enough, sorted=False).values.min()
    return (magnitude >= bound).nonzero().view(-1)


def _largest(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """As `largest`, without waiting for the device. `topk` alone leaves ties open."""
    top, where = magnitude.topk(k)  # in descending order: those above the k-th come first
    tied = torch.nonzero_static(magnitude == top[-1], size=k).view(-1)  # the first k of them
    place = torch.arange(k, device=magnitude.device) - (top > top[-1]).sum()  # among the tied
    return torch.where(place < 0, where, tied[place.clamp_(min=0)]).sort().values


@dataclass
class _Message:
    """A rank's bytes of a bucket, and the views that make sense of them."""

    raw: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor

    @classmethod
    def within(cls, raw: torch.Tensor, entries: int, dtype: torch.dtype) -> _Message:
        head = entries * POSITION.itemsize
        tail = head + entries * dtype.itemsize
        return cls(raw, raw[:head].view(POSITION), raw[head:tail].view(dtype))

    @staticmethod
    def length(entries: int, dtype: torch.dtype) -> int:
        """Bytes, such that the next rank's message begins where a position may."""
        used = entries * (POSITION.itemsize + dtype.itemsize)
        return -(-used // POSITION.itemsize) * POSITION.itemsize


@dataclass
class _TopKWork(CompressedWork):
    bucket: GradBucket
    message: torch.Tensor  # held until the collective has read it
    received: torch.Tensor  # [ranks, bytes]
    entries: int
    pending: dist.Work | None
    reducer: TopKReducer

    def wait(self) -> Reduced:
        self.drop()
        mean = self.bucket.grad.zero_()
        # Rank after rank, on every rank alike. Within one message no position occurs twice, so
        # each addition is the same whatever the order of its entries.
        for raw in self.received:
            theirs = _Message.within(raw, self.entries, mean.dtype)
            mean.index_add_(0, theirs.positions, theirs.values.div_(len(self.received)))
        return Reduced(values=mean)

    def drop(self) -> None:
        if self.pending is not None:
            with self.reducer.waiting(self.bucket.grad.device):
                self.pending.wait()


class TopKReducer(FeedbackReducer):
    """Sends, of each matrix, the `density` share of entries of largest |residual + gradient|.

    The sharded parts of a tensor-parallel parameter are selected from one by one. Values travel in
    the gradient's type; what that rounds off stays in the residual. At density 1 positions tell
    nothing, so everything goes as on the dense path.
    """

    name = "topk"

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        group: Group,
        *,
        density: float,
        start_iter: int = 0,
        share: ModelShare | None = None,
    ) -> None:
        super().__init__(infos, group, start_iter=start_iter, share=share)
        self.density = density

    def plan(self, bucket: GradBucket) -> Sequence[str]:
        if bucket.numel > MOST_ENTRIES:
            raise ConfigError(
                f"ddp_bucket_size: a bucket has {bucket.numel} entries; the positions that topk "
                f"sends reach to {MOST_ENTRIES}; give a smaller --ddp-bucket-size, or split the "
                "largest parameter with --tensor-model-parallel-size"
            )
        return bucket.names if self.density < 1.0 else ()

    def compress(self, bucket: GradBucket, step: StepContext) -> CompressedWork:
        counts = {
            name: count(self.density, self.infos[name].local_entries) for name in bucket.slices
        }
        entries, grad = sum(counts.values()), bucket.grad
        length = _Message.length(entries, grad.dtype)
        raw = torch.zeros(length, dtype=torch.uint8, device=grad.device)
        message = _Message.within(raw, entries, grad.dtype)
        at = 0
        for name, k in counts.items():
            offered = self.offer(bucket, name, step)
            chosen = largest(offered, k)
            picked = offered[chosen]
            sent = message.values[at : at + k].copy_(picked * step.loss_scale)
            offered[chosen] = picked - sent.float() / step.loss_scale
            message.positions[at : at + k] = chosen + bucket.slices[name].start
            at += k
        return self._gather(bucket, raw, entries)

    def _gather(self, bucket: GradBucket, raw: torch.Tensor, entries: int) -> CompressedWork:
        ranks, pending = self.group.size, None
        received = raw.unsqueeze(0)
        if ranks > 1:
            received = raw.new_empty(ranks, raw.numel())
            self.group.calls.note("gather", raw)
            pending = dist.all_gather(list(received), raw, group=self.group.handle, async_op=True)
            self.bytes_sent += (ranks - 1) * raw.nbytes
        return _TopKWork(bucket, raw, received, entries, pending, self)
