"""The reducer of local steps, and the outer step that averages replicas.

replica 0   anchor --> step --> step --> weights --+
                                                   +-- mean of (anchor - weights) -- outer SGD
replica 1   anchor --> step --> step --> weights --+              |
              ^                                                   |
              +------------- anchor of the next round <-----------+

With `--outer-compression topk` the mean is that of messages with the largest entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron.data_parallel.all_reduce import TransferWork
from megatron.data_parallel.bucket import GradBucket, Slice
from megatron.data_parallel.exchange import Exchange, Transfer
from megatron.data_parallel.layout import BucketLayout
from megatron.data_parallel.reducer import (
    GradientReducer,
    PerEntryState,
    ReducerStats,
    StepContext,
    Work,
)
from megatron.data_parallel.rounds import Rounds
from megatron.data_parallel.top_k_feedback import TopKFeedback
from megatron.data_parallel.wire_feedback import WireFeedback
from megatron.data_parallel.wire_format import TopKCompression
from megatron.errors import ConfigError
from megatron.parallel.tensor_shard import ModelShard

MOMENTUM = "outer_momentum/"
"""Prefix of the outer optimizer's momentum among the state of the path."""


@dataclass(frozen=True, kw_only=True)
class OuterSGD:
    """SGD with Nesterov momentum, as torch's, whose gradient is the mean of anchor - weights."""

    lr: float
    momentum: float

    @property
    def is_mean(self) -> bool:
        """True if the new anchor is the mean of the replicas' weights."""
        return self.lr == 1 and not self.momentum

    def apply(
        self, anchor: torch.Tensor, difference: torch.Tensor, velocity: torch.Tensor | None
    ) -> None:
        """Move the anchor in place; `velocity` is None without momentum.

        All tensors are fp32 [n]; `difference` is overwritten.
        """
        if velocity is not None:
            velocity.mul_(self.momentum).add_(difference)
            difference.add_(velocity, alpha=self.momentum)
        anchor.sub_(difference, alpha=self.lr)


class Anchor:
    """The weights of a bucket from which all replicas began their round, fp32, with gaps of 0.

    Attributes:
        bucket: The bucket.
        fragment: The fragment of the model that the bucket belongs to.
        weights: The anchor, as long as the bucket; equal on all data-parallel ranks.
        velocity: Momentum of the outer optimizer; None without momentum.
        feedback: What was not sent of earlier differences, if it is kept.
        is_left: Whether the replicas have taken steps since the anchor was set.
    """

    def __init__(
        self,
        bucket: GradBucket,
        fragment: int,
        *,
        momentum: bool,
        feedback: WireFeedback | TopKFeedback | None,
    ) -> None:
        self.bucket, self.fragment, self.feedback = bucket, fragment, feedback
        self.weights = torch.zeros_like(bucket.grad, dtype=torch.float32)
        self.velocity = torch.zeros_like(self.weights) if momentum else None
        self.is_left = False

    @property
    def scratch(self) -> torch.Tensor:
        """An fp32 tensor as long as the bucket: between steps, the memory of its gradients."""
        grad = self.bucket.grad
        return grad if grad.dtype == torch.float32 else torch.empty_like(self.weights)


class LocalReducer(GradientReducer):
    """Reducer that gives each replica its own gradient, and averages weights at a round's end.

    Args:
        exchange: Collectives over data-parallel ranks, one of each replica.
        rounds: The steps after which fragments are averaged.
        outer: The outer optimizer.
        entries: Number of entries of each parameter on this rank, without padding.
        compression: The entries of matrices that are sent, and their format; None for all.
        keeps_rounding: Keep what an encoded wire loses of matrices, and send it in the next round.
        model_shard: This rank's part of the model; None for a whole model.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        rounds: Rounds,
        outer: OuterSGD,
        entries: Mapping[str, int],
        compression: TopKCompression | None = None,
        keeps_rounding: bool = False,
        model_shard: ModelShard | None = None,
    ) -> None:
        super().__init__(exchange)
        self.anchors: list[Anchor] = []
        self._rounds, self._outer, self._entries = rounds, outer, entries
        self._compression, self._keeps_rounding = compression, keeps_rounding
        self._model_shard = model_shard or ModelShard()
        self._averaged = 0
        self._notes: list[str] = []

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        self.anchors = [
            Anchor(
                bucket,
                self._rounds.fragment_of(bucket.index, len(buckets)),
                momentum=self._outer.momentum > 0,
                feedback=self._feedback(bucket),
            )
            for bucket in buckets
        ]
        self._check_turns()
        filled = len({anchor.fragment for anchor in self.anchors})
        if self.anchors and filled < self._rounds.fragments:
            self._notes.append(
                f"diloco: {len(buckets)} buckets fill {filled} turns of --local-fragments "
                f"{self._rounds.fragments}, and nothing is sent in the others; lower "
                "--ddp-bucket-size"
            )

    def _check_turns(self) -> None:
        """Raise `ConfigError` if tensor-parallel ranks average copies of a parameter apart.

        Shards of unequal size may fill other buckets. Collective over tensor-parallel ranks.
        """
        copies = self._model_shard.tp
        if copies is None or self._rounds.fragments == 1 or not self.anchors:
            return
        turns = [
            f"{name} {anchor.fragment}"
            for anchor in self.anchors
            if not anchor.bucket.tp_sharded
            for name in anchor.bucket.names
        ]
        if len(set(copies.all_gather_str("\n".join(turns)))) > 1:
            raise ConfigError(
                f"local_fragments {self._rounds.fragments}: tensor-parallel ranks have other "
                "buckets, so that copies of a parameter would be averaged at different steps; give "
                "another --ddp-bucket-size, or --local-fragments 1"
            )

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        return TransferWork(bucket.grad, None)

    # ---- rounds --------------------------------------------------------------------------------

    def start(self, weights: Sequence[torch.Tensor]) -> None:
        """Begin all rounds at these master weights, fp32, one for each bucket."""
        for anchor, weight in zip(self.anchors, weights, strict=True):
            anchor.weights.copy_(weight)
            anchor.is_left = False

    def end_step(self, iteration: int, weights: Sequence[torch.Tensor]) -> list[GradBucket]:
        """Average the fragments whose rounds end with the attempted step `iteration`.

        Moves their anchors, and sets this replica's master `weights` to them, in place; gradients
        of the step are lost. Collective over the data-parallel ranks.

        Returns:
            The buckets whose weights were set.
        """
        for anchor in self.anchors:
            anchor.is_left = not self._rounds.ends(anchor.fragment, iteration)
        return self._average([not anchor.is_left for anchor in self.anchors], weights)

    @property
    def is_left(self) -> bool:
        """Whether the replicas of this rank's weights have taken steps since the last average."""
        return any(anchor.is_left for anchor in self.anchors)

    def end_round(self, weights: Sequence[torch.Tensor]) -> list[GradBucket]:
        """Average what the replicas have changed since the last average, as `end_step` does."""
        left = [anchor.is_left for anchor in self.anchors]
        for anchor in self.anchors:
            anchor.is_left = False
        return self._average(left, weights)

    def _average(self, chosen: Sequence[bool], weights: Sequence[torch.Tensor]) -> list[GradBucket]:
        pairs = zip(self.anchors, weights, strict=True)
        ended = [pair for pair, is_chosen in zip(pairs, chosen, strict=True) if is_chosen]
        sent = [self._send(anchor, weight) for anchor, weight in ended]
        for (anchor, weight), transfer in zip(ended, sent, strict=True):
            self._receive(anchor, weight, transfer)
        self._averaged += sum(
            self._entries_sent(anchor.bucket)
            for anchor, _ in ended
            if self._model_shard.owns(anchor.bucket)
        )
        return [anchor.bucket for anchor, _ in ended]

    def swap(self, weights: Sequence[torch.Tensor]) -> list[GradBucket]:
        """Exchange anchors and this replica's weights in place, where they differ.

        Returns:
            The buckets whose weights changed.
        """
        found = []
        for anchor, weight in zip(self.anchors, weights, strict=True):
            if anchor.is_left:
                held = weight.clone()
                weight.copy_(anchor.weights)
                anchor.weights.copy_(held)
                found.append(anchor.bucket)
        return found

    # ---- state ---------------------------------------------------------------------------------

    def shared_tensors(self) -> Iterator[tuple[str, PerEntryState]]:
        for anchor in self.anchors:
            if anchor.velocity is not None:
                for name, where in self._slices(anchor.bucket):
                    values = partial(where.of, anchor.velocity)
                    yield f"{MOMENTUM}{name}", PerEntryState(param=name, values=values)

    def state_tensors(self) -> Iterator[tuple[str, PerEntryState]]:
        for anchor in self.anchors:
            if anchor.feedback is not None:
                yield from anchor.feedback.states()

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        for anchor in self.anchors:
            if anchor.feedback is not None:
                anchor.feedback.load(own)
            if anchor.velocity is not None:
                for name, where in self._slices(anchor.bucket):
                    where.of(anchor.velocity).copy_(shared[f"{MOMENTUM}{name}"])

    def stats(self, *, full: bool = False) -> ReducerStats:
        sent, waited = self.exchange.take_counters()
        buckets = [anchor.bucket for anchor in self.anchors]
        entries = sum(bucket.numel for bucket in buckets if self._model_shard.owns(bucket))
        averaged, entries = self._model_shard.total([self._averaged, entries])
        self._averaged = 0
        density = averaged / entries if entries else 0.0
        notes, self._notes = tuple(self._notes), []
        return ReducerStats(bytes_sent=sent, wait_seconds=waited, density=density, notes=notes)

    # ---- internals -----------------------------------------------------------------------------

    def _feedback(self, bucket: GradBucket) -> WireFeedback | TopKFeedback | None:
        if self._compression is not None and bucket.matrix:
            return TopKFeedback(bucket, dict(self._slices(bucket)), self._compression)
        # A single rank encodes nothing, but may load what several ranks kept.
        is_kept = self._keeps_rounding and bucket.matrix
        return WireFeedback(bucket, self._entries) if is_kept else None

    def _entries_sent(self, bucket: GradBucket) -> int:
        if self._compression is not None and bucket.matrix:
            return sum(self._compression.entries(each.numel) for each in bucket.slices.values())
        return bucket.numel

    def _sends_weights(self, anchor: Anchor) -> bool:
        """Return whether the weights themselves are averaged, which saves them a rounding."""
        owes = anchor.feedback is not None and anchor.feedback.is_pending
        return self._outer.is_mean and self.exchange.is_exact and not owes

    def _send(self, anchor: Anchor, weight: torch.Tensor) -> Transfer:
        """Start to average, or to gather, what the replicas send of a bucket."""
        values, lost, feedback = anchor.scratch, None, anchor.feedback
        if self._sends_weights(anchor):
            values.copy_(weight)
            return self.exchange.mean(values)
        torch.sub(anchor.weights, weight, out=values)
        if isinstance(feedback, TopKFeedback):
            return self.exchange.gather(feedback.send(values))
        # One rank encodes nothing, but owes what several ranks kept.
        if feedback is not None and (self.exchange.ranks > 1 or feedback.is_pending):
            lost = feedback.join(values, 1.0)
            if self.exchange.ranks == 1:
                lost.zero_()
        return self.exchange.mean(values, matrix=anchor.bucket.matrix, lost=lost)

    def _receive(self, anchor: Anchor, weight: torch.Tensor, transfer: Transfer) -> None:
        """Wait for the mean, move the anchor, and begin the next round there."""
        mean, feedback = transfer.wait(), anchor.feedback
        if isinstance(feedback, TopKFeedback):
            mean = feedback.mean(mean, out=anchor.scratch)
        if self._sends_weights(anchor):
            anchor.weights.copy_(mean)
        else:
            self._outer.apply(anchor.weights, mean, anchor.velocity)
            if isinstance(feedback, WireFeedback):
                feedback.keep()
        weight.copy_(anchor.weights)

    def _slices(self, bucket: GradBucket) -> Iterator[tuple[str, Slice]]:
        """Yield the entries of each parameter, without padding."""
        for name, where in bucket.slices.items():
            yield name, Slice(where.start, min(where.numel, self._entries[name]))
