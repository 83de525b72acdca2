"""`--grad-path topk`: naive top-k with all-gather and error feedback (Radius paper, section 6.5).

This file is the whole path: settings, reducer, and bytes for the planner. The messages are those of
`radius.baselines.largest_entries`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config import ValueRange, at_least, option, options_of, section
from megatron.data_parallel.bucket_plan import (
    BYTES,
    BucketPlan,
    PathBytes,
    RankShapes,
    StepTraffic,
)
from megatron.data_parallel.gradient_path import GradientPath
from radius.baselines.feedback import BASELINE_PAIRS, CompressedWork, FeedbackReducer, check_start
from radius.baselines.largest_entries import add_mean, check_positions, take_largest
from radius.baselines.message_bytes import entries_message, gathered_plan, gathered_traffic

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.data_parallel.bucket import GradBucket, ParamInfo
    from megatron.data_parallel.exchange import Exchange, Transfer
    from megatron.data_parallel.reducer import ReducedGrad, StepContext
    from megatron.parallel.groups import ProcessGroups
    from megatron.parallel.tensor_shard import ModelShard


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
        return gathered_plan(rank, self._message(config, rank))

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        return gathered_traffic(
            rank,
            self._message(config, rank),
            start=options_of(config, TopKConfig).topk_start_iter,
            steps=config.total_iterations(),
            value_bytes=BYTES[config.precision.grad_dtype],
        )

    def _message(self, config: Config, rank: RankShapes) -> Callable[[BucketPlan], int] | None:
        """Return the function of a bucket's message; None if everything is sent."""
        density = options_of(config, TopKConfig).topk_density
        value_bytes = BYTES[config.precision.grad_dtype]

        def message(bucket: BucketPlan) -> int:
            params = [rank.params[name] for name in bucket.slices]
            return entries_message(params, density, value_bytes)

        return message if density < 1 else None


@dataclass
class _TopKWork(CompressedWork):
    bucket: GradBucket
    message: torch.Tensor  # must not change before the collective has read it
    received: Transfer  # [ranks, bytes]
    entries: int

    def wait(self) -> ReducedGrad:
        from megatron.data_parallel.reducer import ReducedGrad

        mean = self.bucket.grad.zero_()
        add_mean(self.received.wait(), self.entries, mean)
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

    @property
    def sends_all_by(self) -> str:
        return "--topk-density 1" if self.density >= 1.0 else ""

    def plan(self, bucket: GradBucket) -> Sequence[str]:
        check_positions(bucket, self.name)
        return () if self.sends_all_by else bucket.names

    def compress(self, bucket: GradBucket, step: StepContext) -> CompressedWork:
        offered = {name: self.offer(bucket, name, step) for name in bucket.slices}
        raw, entries = take_largest(
            bucket, offered, density=self.density, loss_scale=step.loss_scale
        )
        return _TopKWork(bucket, raw, self.exchange.gather(raw), entries)
