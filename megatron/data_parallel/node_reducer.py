"""Reduction in two levels: to shards within a node, and of each shard between nodes.

Data-parallel ranks in a row, as the ranks of a node, shard the optimizer states (as ZeRO-1). The
ranks with one shard, one of each node, reduce it by another reducer, dense or sparse:

    within a node    mean of a bucket, of which each rank needs its shard
    between nodes    reduction of the shard                                (thread or stream)
    within a node    all-gather of the updated values, after the update

Between nodes a rank sends one shard, and all ranks of a node together about what a ring over all
data-parallel ranks sends across its network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from megatron.data_parallel.bucket import GradBucket, Slice
from megatron.data_parallel.exchange import Exchange, Transfer
from megatron.data_parallel.layout import BucketLayout
from megatron.data_parallel.reduce_scatter import ReduceScatterReducer
from megatron.data_parallel.reducer import (
    GradientReducer,
    PerEntryState,
    ReducedGrad,
    ReducerStats,
    StepContext,
    Work,
)


class _Pending(Protocol):
    def result(self) -> ReducedGrad: ...


@dataclass
class _OnStream:
    reduced: ReducedGrad
    end: torch.cuda.Event

    def result(self) -> ReducedGrad:
        torch.cuda.current_stream().wait_event(self.end)
        return self.reduced


@dataclass
class _ShardWork:
    bucket: GradBucket
    pending: _Pending
    exchange: Exchange

    def wait(self) -> ReducedGrad:
        with self.exchange.waits.on(self.bucket.grad.device):
            reduced = self.pending.result()
        values = reduced.values
        if reduced.index is None:
            values = values[: self.bucket.num_kept]  # without the padding of the last shards
        return dataclasses.replace(reduced, values=values, part=self.bucket.kept)

    def drop(self) -> None:
        self.wait()


class _CutTensors(Mapping[str, torch.Tensor]):
    """Tensors of whole parameters, cut to the entries `kept` when they are read."""

    def __init__(self, whole: Mapping[str, torch.Tensor], kept: Mapping[str, Slice]) -> None:
        self._whole, self._kept = whole, kept

    def __getitem__(self, name: str) -> torch.Tensor:
        kept = self._kept.get(name.rpartition("/")[2])
        return self._whole[name] if kept is None else kept.of(self._whole[name])

    def __contains__(self, name: object) -> bool:
        return name in self._whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


class NodeReducer(ReduceScatterReducer):
    """Reducer that gives each rank of a node its shard of what all nodes have reduced.

    No hook may wait for the mean within the node, so on a CPU one thread waits for it and reduces
    the shard over connections that no other thread uses, in bucket order. On a GPU both reductions
    are enqueued at once on one stream beside the computation.

    The state is that of the reducer between nodes: each node has one copy, in shards.

    Args:
        inner: Collectives over the ranks of this node.
        between: Reducer of shards over the ranks with this rank's shard, one of each node. It gets
            buckets from `GradBucket.own_shard`, and is the only user of its exchange.
        divides: If False, sum within the node instead of averaging.

    Attributes:
        thread: Runs the reductions between nodes on a CPU, one at a time.
    """

    def __init__(self, inner: Exchange, between: GradientReducer, divides: bool = True) -> None:
        super().__init__(inner, divides)
        self.between = between
        self._shards: list[GradBucket] = []
        self.thread: Executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="between nodes"
        )

    @property
    def overflow_bound(self) -> float | None:
        # The sums between nodes are those of other ranks, and Radius adds a residual there.
        return None

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        for bucket in buckets:
            self.shard(bucket)
            bucket.lends_grad = self.between.lends_grad(bucket)
        self._shards = [bucket.own_shard() for bucket in buckets]
        self.between.attach(self._shards, layout)

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        if bucket.grad.is_cuda:
            pending: _Pending = self._on_stream(bucket, step)
        else:
            # gloo has no reduce-scatter (`ReduceScatterReducer.reduce`).
            within = self._mean(bucket.grad) if bucket.numel else None
            pending = self.thread.submit(self._reduce_between, within, bucket, step)
        return _ShardWork(bucket, pending, self.exchange)

    def wants_update(self, step: StepContext) -> bool:
        return self.between.wants_update(step)

    def commit(self, bucket: GradBucket, update: torch.Tensor | None) -> None:
        self.between.commit(self._shards[bucket.index], update)

    def abort(self, bucket: GradBucket) -> None:
        self.between.abort(self._shards[bucket.index])

    def inactive_reason(self, first: int, last: int) -> str:
        return self.between.inactive_reason(first, last)

    def stats(self, *, full: bool = False) -> ReducerStats:
        # Waits of the thread or stream between nodes do not block the computation.
        between = self.between.stats(full=full)
        sent, waited = self.exchange.take_counters()
        return dataclasses.replace(
            between, bytes_sent=between.bytes_sent + sent, wait_seconds=waited
        )

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor | PerEntryState]]:
        for name, state in self.between.shared_tensors():
            yield name, _sharded(state) if isinstance(state, PerEntryState) else state

    def state_tensors(self) -> Iterator[tuple[str, PerEntryState]]:
        for name, state in self.between.state_tensors():
            yield name, _sharded(state)

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        kept = {
            name: shard.whole.kept_of(name)
            for shard in self._shards
            if shard.whole is not None
            for name in shard.slices
        }
        self.between.load_state_tensors(_CutTensors(own, kept), _CutTensors(shared, kept))

    def _reduce_between(
        self, within: Transfer | None, bucket: GradBucket, step: StepContext
    ) -> ReducedGrad:
        if within is not None:
            within.arrive()
        return self.between.reduce(self._shards[bucket.index], step).wait()

    def _on_stream(self, bucket: GradBucket, step: StepContext) -> _OnStream:
        assert bucket.storage is not None
        shard = self._shards[bucket.index]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            within = None
            if bucket.numel:
                within = self.exchange.mean_of_part(
                    shard.grad, bucket.storage, used=bucket.grad, divides=self.divides
                )
            reduced = self._reduce_between(within, bucket, step)
            end = torch.cuda.Event()
            end.record()
        return _OnStream(reduced, end)

    def _mean(self, values: torch.Tensor) -> Transfer:
        return self.exchange.mean(values) if self.divides else self.exchange.sum(values)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()


def _sharded(state: PerEntryState) -> PerEntryState:
    return dataclasses.replace(state, sharded=True)
