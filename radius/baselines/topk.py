"""`--grad-path topk`: naive top-k with all-gather and error feedback (Radius paper, section 6.5).

Every rank selects entries on its own, so positions differ and values cannot be added on the way:
each rank's message goes to every other rank, and traffic grows with the number of ranks.

    one bucket's message, K entries of all its parameters:   [ K positions | K values | padding ]

This file is the whole path: settings, reducer, and bytes for the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config import ValueRange, at_least, option, section
from megatron.data_parallel.bucket_plan import (
    BYTES,
    PathBytes,
    PlannedCollective,
    RankShapes,
    StepTraffic,
)
from megatron.data_parallel.gradient_path import GradientPath
from megatron.errors import ConfigError
from radius.baselines.feedback import CompressedWork, FeedbackReducer, check_start, options_of
from radius.baselines.message_bytes import RESIDUAL_BYTES, all_reduces, count, from_start, matrices
from radius.baselines.rules import BASELINE_PAIRS

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.data_parallel.bucket import GradBucket, ParamInfo
    from megatron.data_parallel.exchange import Exchange, Transfer
    from megatron.data_parallel.reducer import ReducedGrad, StepContext
    from megatron.parallel.groups import ProcessGroups
    from megatron.parallel.tensor_shard import ModelShard

POSITION_BYTES = 4
"""Bytes of a position in a message, an int32."""
MOST_ENTRIES = 2**31 - 1


@section
class TopKConfig:
    """Options of naive top-k."""

    topk_density: float = option(
        default=0.01,
        help="Share of each matrix's entries that every rank sends (1 = all, as the dense "
        "path). Each tensor-parallel rank selects from its own shard.",
        within=ValueRange(low=0, high=1, low_open=True),
    )
    topk_start_iter: int = option(
        default=0,
        help="First compressed step; earlier steps are dense (0 = compress from the first step).",
        within=at_least(0),
    )


class TopKPath(GradientPath):
    """Naive top-k: every rank's largest entries go to every other rank."""

    name = "topk"
    sections = {"topk": TopKConfig}
    refused_pairs = BASELINE_PAIRS

    def check(self, config: Config) -> None:
        check_start(config, "topk_start_iter", options_of(config, TopKConfig).topk_start_iter)

    def reducer(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        exchange: Exchange,
    ) -> TopKReducer:
        from megatron.parallel.tensor_shard import ModelShard

        options = options_of(config, TopKConfig)
        return TopKReducer(
            infos,
            exchange,
            density=options.topk_density,
            start_iter=options.topk_start_iter,
            model_shard=ModelShard(infos, groups),
        )

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        """Return the bytes of residuals and of the messages of this rank and all ranks."""
        residual = messages = 0
        for bucket in matrices(rank) if options_of(config, TopKConfig).topk_density < 1 else ():
            residual += RESIDUAL_BYTES * sum(rank.params[n].local_entries for n in bucket.slices)
            message = self._message_bytes(config, rank, bucket.slices)
            messages += message * (1 + rank.ranks * (rank.ranks > 1))
        own = residual * 4 // RESIDUAL_BYTES
        return PathBytes({"residual": residual}, {"messages": messages}, own=own)

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        """Return the traffic: dense steps, then a message to every rank per bucket of matrices."""
        options = options_of(config, TopKConfig)
        sparse = dense = all_reduces(rank, BYTES[config.precision.grad_dtype])
        if options.topk_density < 1:
            sparse = [
                PlannedCollective(
                    "all-gather", self._message_bytes(config, rank, bucket.slices), number
                )
                if bucket.kind.matrix
                else dense[number]
                for number, bucket in enumerate(rank.buckets)
            ]
        return from_start(options.topk_start_iter, config.total_iterations(), dense, sparse)

    def _message_bytes(self, config: Config, rank: RankShapes, names: Iterable[str]) -> int:
        density = options_of(config, TopKConfig).topk_density
        entries = sum(count(density, rank.params[name].local_entries) for name in names)
        return message_bytes(entries, BYTES[config.precision.grad_dtype])


def message_bytes(entries: int, value_bytes: int) -> int:
    """Return the bytes of a message, padded so that the next rank's positions are aligned."""
    used = entries * (POSITION_BYTES + value_bytes)
    return -(-used // POSITION_BYTES) * POSITION_BYTES


def split_message(
    raw: torch.Tensor, entries: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the positions (int32) and of the values of a message (uint8)."""
    import torch

    head = entries * POSITION_BYTES
    tail = head + entries * dtype.itemsize
    return raw[:head].view(torch.int32), raw[head:tail].view(dtype)


@dataclass
class _TopKWork(CompressedWork):
    bucket: GradBucket
    message: torch.Tensor  # must not change before the collective has read it
    received: Transfer  # [ranks, bytes]
    entries: int

    def wait(self) -> ReducedGrad:
        from megatron.data_parallel.reducer import ReducedGrad

        received = self.received.wait()
        mean = self.bucket.grad.zero_()
        # Every rank adds the messages in rank order. A message has no position twice, so the order
        # of its entries does not matter.
        for raw in received:
            positions, values = split_message(raw, self.entries, mean.dtype)
            mean.index_add_(0, positions, values.div_(len(received)))
        return ReducedGrad(values=mean)

    def drop(self) -> None:
        self.received.wait()


class TopKReducer(FeedbackReducer):
    """Reducer that sends the `density` share of largest |residual + gradient| of each matrix.

    Entries are selected separately in each shard of a tensor-parallel parameter. Values are sent in
    the gradient's dtype; the rounding error stays in the residual. At density 1 everything is sent
    as on the dense path.
    """

    name = "topk"

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        exchange: Exchange,
        *,
        density: float,
        start_iter: int = 0,
        model_shard: ModelShard | None = None,
    ) -> None:
        super().__init__(infos, exchange, start_iter=start_iter, model_shard=model_shard)
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
        import torch

        from megatron.sparse.selection import largest

        counts = {
            name: count(self.density, self.infos[name].local_entries) for name in bucket.slices
        }
        entries, grad = sum(counts.values()), bucket.grad
        length = message_bytes(entries, grad.element_size())
        raw = torch.zeros(length, dtype=torch.uint8, device=grad.device)
        positions, values = split_message(raw, entries, grad.dtype)
        at = 0
        for name, k in counts.items():
            offered = self.offer(bucket, name, step)
            chosen = largest(offered, k)
            picked = offered[chosen]
            sent = values[at : at + k].copy_(picked * step.loss_scale)
            offered[chosen] = picked - sent.float() / step.loss_scale
            positions[at : at + k] = chosen + bucket.slices[name].start
            at += k
        return _TopKWork(bucket, raw, self.exchange.gather(raw), entries)
