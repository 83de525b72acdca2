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

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import BucketShard, GradBucket, Slice
from megatron.data_parallel.bucket_plan import shard_length
from megatron.data_parallel.exchange import Exchange, Transfer
from megatron.data_parallel.layout import BucketLayout
from megatron.data_parallel.reducer import ReducedGrad, StepContext, Work

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


def mean_reducer(config: Config, exchange: Exchange) -> AllReduceReducer:
    """The reducer of a path that takes plain means of whole buckets."""
    divides = not sums_gradients(config)
    if config.parallel.use_distributed_optimizer and exchange.ranks > 1:
        return ReduceScatterReducer(exchange, divides)
    most = config.offload.chunk if config.offload.optimizer_cpu_offload else None
    return AllReduceReducer(exchange, divides, most)


@dataclass
class _PartWork:
    part: Slice
    values: torch.Tensor
    transfer: Transfer

    def wait(self) -> ReducedGrad:
        self.transfer.wait()
        return ReducedGrad(values=self.values, part=self.part)

    def drop(self) -> None:
        self.wait()


class ReduceScatterReducer(AllReduceReducer):
    """Mean of buckets of which each rank keeps its shard; also the `ShardExchange` of
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

    def __init__(
        self, exchange: Exchange, divides: bool = True, scatter: bool | None = None
    ) -> None:
        super().__init__(exchange, divides)
        self.scatter = scatter

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        ranks = self.exchange.ranks
        if ranks == 1:
            return
        for bucket in buckets:
            length = shard_length(bucket.numel, ranks)
            own = Slice(self.exchange.rank * length, length)
            bucket.shard = BucketShard(where=own, length=ranks * length, exchange=self)
            bucket.storage = bucket.grad.new_zeros(ranks * length)
            # Its length stays: by it a ring orders its sums.
            bucket.grad = bucket.storage[: bucket.numel]

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        scatter = self.scatter if self.scatter is not None else bucket.grad.is_cuda
        if bucket.shard is None or bucket.storage is None or not scatter:
            return super().reduce(bucket, step)
        own = bucket.shard.where
        transfer = self.exchange.mean_of_part(
            own.of(bucket.storage), bucket.storage, used=bucket.grad, divides=self.divides
        )
        return _PartWork(own, own.of(bucket.grad), transfer)

    def gather(self, parts: torch.Tensor) -> Transfer:
        return self.exchange.gather_in_place(parts)

    def fill(self, flat: torch.Tensor) -> None:
        # As integers: a sum of numbers would lose the sign of a zero.
        self.exchange.sum(flat.view(torch.int32), about="collect").wait()
