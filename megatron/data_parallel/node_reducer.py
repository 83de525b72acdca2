"""Reduction in two levels: to shards within a node, and of each shard between nodes.

Data-parallel ranks in a row, as the ranks of a node, shard the optimizer states (as ZeRO-1). The
ranks with one shard, one of each node, average it:

    within a node    mean of a bucket, of which each rank needs its shard
    between nodes    mean of the shard                                     (thread or stream)
    within a node    all-gather of the updated values, after the update

Between nodes a rank sends one shard, and all ranks of a node together about what a ring over all
data-parallel ranks sends across its network.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.data_parallel.all_reduce import TransferWork
from megatron.data_parallel.bucket import GradBucket, Slice
from megatron.data_parallel.exchange import Exchange, Transfer
from megatron.data_parallel.reduce_scatter import ReduceScatterReducer
from megatron.data_parallel.reducer import ReducedGrad, ReducerStats, StepContext, Work
from megatron.data_parallel.wire import Waitable


@dataclass
class _ShardWork:
    part: Slice
    values: torch.Tensor
    pending: Waitable
    exchange: Exchange

    def wait(self) -> ReducedGrad:
        with self.exchange.waits.on(self.values.device):
            self.pending.wait()
        return ReducedGrad(values=self.values, part=self.part)

    def drop(self) -> None:
        self.wait()


@dataclass
class _OnThread:
    done: Future[None]

    def wait(self) -> None:
        self.done.result()


@dataclass
class _OnStream:
    end: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.end)


class NodeReducer(ReduceScatterReducer):
    """Reducer that gives each rank of a node its shard of the mean over all nodes.

    No hook may wait for the mean within the node, so on a CPU one thread waits for it and averages
    the shard over connections that no other thread uses, in bucket order. On a GPU both collectives
    are enqueued at once on one stream beside the computation.

    Args:
        inner: Collectives over the ranks of this node.
        outer: Collectives over the ranks with this rank's shard, one of each node.
        divides: If False, sum instead of average.
    """

    def __init__(self, inner: Exchange, outer: Exchange, divides: bool = True) -> None:
        super().__init__(inner, divides)
        self._outer = outer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="between nodes")

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        if not bucket.numel:
            return TransferWork(bucket.grad, None)
        assert bucket.shard is not None and bucket.storage is not None
        own = bucket.shard.where
        # With the padding of the last shards, so that all shards have one length.
        shard = own.of(bucket.storage)
        if bucket.grad.is_cuda:
            pending: Waitable = self._on_stream(bucket, shard)
        else:
            # gloo has no reduce-scatter (`ReduceScatterReducer.reduce`).
            within = self._mean(self.exchange, bucket.grad)
            pending = _OnThread(self._thread.submit(self._between, within, shard))
        return _ShardWork(own, own.of(bucket.grad), pending, self.exchange)

    def stats(self, *, full: bool = False) -> ReducerStats:
        within = super().stats(full=full)
        sent, _ = self._outer.take_counters()
        return dataclasses.replace(within, bytes_sent=within.bytes_sent + sent)

    def _between(self, within: Transfer, shard: torch.Tensor) -> None:
        within.arrive()
        self._mean(self._outer, shard).arrive()

    def _on_stream(self, bucket: GradBucket, shard: torch.Tensor) -> _OnStream:
        assert bucket.storage is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            within = self.exchange.mean_of_part(
                shard, bucket.storage, used=bucket.grad, divides=self.divides
            )
            self._between(within, shard)
            end = torch.cuda.Event()
            end.record()
        return _OnStream(end)

    def _mean(self, exchange: Exchange, values: torch.Tensor) -> Transfer:
        return exchange.mean(values) if self.divides else exchange.sum(values)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()
