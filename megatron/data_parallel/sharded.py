"""Means of which each data-parallel rank keeps a part, for optimizer states that are sharded.

ZeRO-1 (Rajbhandari et al. 2020): a rank updates its own part of every bucket, so of the mean it
needs no more, and of the others' parts it gets the updated values. By the ring model the halves of
an all-reduce, before and after the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.data_parallel.bucket import BucketShard, GradBucket, Slice
from megatron.data_parallel.bucket_plan import ring_all_reduce_bytes, shard_length
from megatron.data_parallel.dense import AllReduceReducer
from megatron.data_parallel.interface import BucketLayout, Reduced, StepContext, Work
from megatron.parallel.groups import ProcessGroups

if TYPE_CHECKING:
    from megatron.config import Config


SUMMABLE = ("dense", "samo")
"""Gradient paths that take plain means, and sums as well."""


def sums_gradients(config: Config) -> bool:
    """Whether losses are divided by the whole global batch before backward, and gradients of ranks
    only summed. In fp16 a gradient must not be larger, and overflow sooner, for being one of
    several ranks'; paths that keep something back measure it against means."""
    precision = config.precision
    if precision.param_dtype != "float16":
        return precision.predivide_loss
    return precision.predivide_loss or config.gradient.grad_path in SUMMABLE


def mean_reducer(config: Config, groups: ProcessGroups) -> AllReduceReducer:
    """The reducer of a path that takes plain means of whole buckets."""
    divides = not sums_gradients(config)
    if config.parallel.use_distributed_optimizer and groups.dp.size > 1:
        return ReduceScatterReducer(groups.dp, divides)
    most = config.offload.chunk if config.offload.optimizer_cpu_offload else None
    return AllReduceReducer(groups.dp, divides, most)


@dataclass
class _PartWork:
    values: torch.Tensor
    part: Slice
    pending: dist.Work | None
    reducer: ReduceScatterReducer

    def wait(self) -> Reduced:
        self.reducer.block_on(self.pending, self.values.device)
        return Reduced(values=self.values, part=self.part)

    def drop(self) -> None:
        self.wait()


@dataclass
class _Gathering:
    pending: list[dist.Work | None]
    device: torch.device
    reducer: ReduceScatterReducer

    def wait(self) -> None:
        for work in self.pending:
            self.reducer.block_on(work, self.device)


@dataclass
class ReduceScatterReducer(AllReduceReducer):
    """Mean of buckets over `group` of which each rank keeps its shard; also the `ShardExchange` of
    those shards. In place, one asynchronous collective each, in bucket order.

    `scatter`: whether a rank gets no more than its part. None: on a GPU it does; on a CPU the whole
    bucket is all-reduced. gloo has no reduce-scatter: torch makes one of an all-reduce of a copy,
    which sends as much, holds the bucket twice and takes 2.4 times as long (64 MB, 2 and 4 ranks:
    108 against 259 ms, 166 against 442 ms). An exchange of all parts with all sends half, in 0.8 of
    the time, but what it receives needs memory beside the gradients until the step is agreed on,
    and to save memory is what shards are for. So on a CPU every sum is the plain path's, to the
    last bit, for any number of ranks, and so is the norm. Where parts are scattered, sums of two
    terms are equal too, longer ones to rounding: a ring adds up in an order that depends on the
    place. Their norm, the sum of norms of parts, is equal to rounding.
    """

    scatter: bool | None = None

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        ranks = self.group.size
        if ranks == 1:
            return
        for bucket in buckets:
            length = shard_length(bucket.numel, ranks)
            own = Slice(self.group.rank * length, length)
            bucket.shard = BucketShard(where=own, length=ranks * length, exchange=self)
            bucket.room = bucket.grad.new_zeros(ranks * length)
            # Its length stays: by it a ring orders its sums.
            bucket.grad = bucket.room[: bucket.numel]

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        scatter = self.scatter if self.scatter is not None else bucket.grad.is_cuda
        if bucket.shard is None or bucket.room is None or not scatter:
            return super().reduce(bucket, step)
        own, ranks = bucket.shard.where, self.group.size
        op = self.prepare(bucket.grad)
        mine = own.of(bucket.room)
        pending = self.group.reduce_scatter(mine, bucket.room, op, async_op=True)
        self.bytes_sent += (ranks - 1) * mine.nbytes
        return _PartWork(own.of(bucket.grad), own, pending, self)

    def gather(self, parts: torch.Tensor) -> _Gathering:
        by_rank = parts.chunk(self.group.size)
        own = by_rank[self.group.rank]
        self.bytes_sent += (self.group.size - 1) * own.nbytes
        if parts.is_cuda:
            sent = [self.group.all_gather(parts, own, async_op=True)]
            return _Gathering(sent, parts.device, self)
        # gloo's all-gather copies what comes and goes and takes four times as long (64 MB, 2 and 4
        # ranks: 227 against 56 ms, 343 against 78 ms); on average the ranks send the same.
        sent = [
            self.group.broadcast(part, rank, async_op=True) for rank, part in enumerate(by_rank)
        ]
        return _Gathering(sent, parts.device, self)

    def fill(self, flat: torch.Tensor) -> None:
        # As integers: a sum of numbers would lose the sign of a zero.
        pending = self.group.all_reduce(
            flat.view(torch.int32), dist.ReduceOp.SUM, async_op=True, about="collect"
        )
        self.bytes_sent += ring_all_reduce_bytes(flat.nbytes, self.group.size)
        self.block_on(pending, flat.device)
