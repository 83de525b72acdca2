"""Reduction to shards, for optimizer states that are sharded over data-parallel ranks.

ZeRO-1 (Rajbhandari et al. 2020): a rank updates only its own shard of every bucket, so it needs
only that shard of the mean, and receives updated values of the others. The ring model counts these
as the halves of an all-reduce, before and after the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import BucketShard, GradBucket, ParamInfo, Slice
from megatron.data_parallel.bucket_plan import shard_length
from megatron.data_parallel.exchange import Exchange, Transfer
from megatron.data_parallel.layout import BucketLayout
from megatron.data_parallel.reducer import ReducedGrad, StepContext, Work

if TYPE_CHECKING:
    from megatron.config import Config


SUMMABLE = ("dense", "samo")
"""Gradient paths whose reducer averages plainly, and can sum as well."""


def sums_gradients(config: Config) -> bool:
    """Return whether losses are divided by the global batch, so that gradients are only summed."""
    # A rank's term of a sum is smaller than its term of a mean, so in fp16 it overflows later.
    # Paths that keep a residual compare it with means.
    precision = config.precision
    if config.gradient.grad_wire is not None:
        return False  # it encodes means
    if precision.param_dtype != "float16":
        return precision.predivide_loss
    return precision.predivide_loss or config.gradient.grad_path in SUMMABLE


def entries_on_rank(infos: Sequence[ParamInfo]) -> dict[str, int]:
    """Return the number of entries of each parameter on this rank, without padding."""
    return {info.name: info.local_entries for info in infos}


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
    """Reducer that gives each rank its shard of the mean; also the `ShardExchange` of the shards.

    It runs one asynchronous collective per bucket, in place and in bucket order.

    Args:
        exchange: Collectives over data-parallel ranks.
        divides: If False, sum instead of average.
        scatter: Reduce-scatter; otherwise all-reduce whole buckets. None: reduce-scatter on a GPU
            and over an encoded wire.
        feedback: As for `AllReduceReducer`.

    With an all-reduce, every sum and the norm equal those of the plain path to the last bit. With a
    reduce-scatter, sums of more than two terms are equal up to rounding, since the order of a
    ring's additions depends on the position; so is the norm, which sums the norms of the parts.
    """

    def __init__(
        self,
        exchange: Exchange,
        divides: bool = True,
        scatter: bool | None = None,
        feedback: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(exchange, divides, feedback=feedback)
        self.scatter = scatter

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        super().attach(buckets, layout)
        for bucket in buckets:
            self.shard(bucket)

    def shard(self, bucket: GradBucket, *, lends_grad: bool = True) -> None:
        """Give this rank its shard of the states of a bucket; a single rank keeps them whole.

        `lends_grad`: updated values may overwrite the gradients. The bucket is otherwise reduced by
        all-reduce.
        """
        ranks = self.exchange.ranks
        if ranks == 1:
            return
        length = shard_length(bucket.numel, ranks, bucket.alignment)
        own = Slice(self.exchange.rank * length, length)
        bucket.shard = BucketShard(where=own, length=ranks * length, exchange=self)
        bucket.lends_grad = lends_grad
        if lends_grad:
            bucket.storage = bucket.grad.new_zeros(ranks * length)
            # The length must not change: it determines the order of a ring's additions.
            bucket.grad = bucket.storage[: bucket.numel]

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        # gloo has no reduce-scatter. torch emulates one by an all-reduce of a copy, which holds the
        # bucket twice and takes 2.4 times as long as an all-reduce (64 MB, 2 and 4 ranks: 259
        # against 108 ms, 442 against 166 ms). An all-to-all sends half as much in 0.8 of the time,
        # but needs receive buffers, and sharding is meant to save memory.
        scatter = bucket.grad.is_cuda or not self.exchange.is_exact
        if self.scatter is not None:
            scatter = self.scatter
        # `average` sends nothing of an empty bucket.
        if bucket.shard is None or bucket.storage is None or not scatter or not bucket.numel:
            return super().reduce(bucket, step)
        own = bucket.shard.where
        transfer = self.exchange.mean_of_part(
            own.of(bucket.storage),
            bucket.storage,
            used=bucket.grad,
            divides=self.divides,
            matrix=bucket.matrix,
            lost=self._joined(bucket, step),
        )
        return _PartWork(own, own.of(bucket.grad), transfer)

    def gather(self, parts: torch.Tensor) -> Transfer:
        return self.exchange.gather_in_place(parts)

    def fill(self, flat: torch.Tensor) -> None:
        # Sum as integers: a floating-point sum would lose the sign of zero.
        self.exchange.sum(flat.view(torch.int32), about="collect").wait()
