"""`--grad-path lowrank+sparse`: settings, and bytes for the planner. Loads torch only to build."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.config import ValueRange, at_least, option, options_of, section
from megatron.data_parallel.bucket_plan import BYTES, PathBytes, RankShapes, StepTraffic
from megatron.data_parallel.gradient_path import GradientPath
from radius.baselines.feedback import BASELINE_PAIRS, check_start
from radius.baselines.message_bytes import (
    FactorRank,
    all_reduces,
    entries_message,
    factors_of,
    from_start,
    gathered_bytes,
    matrices,
    powersgd_bytes,
    powersgd_traffic,
)

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.data_parallel.bucket import ParamInfo
    from megatron.data_parallel.exchange import Exchange
    from megatron.parallel.groups import ProcessGroups
    from radius.baselines.lowrank_sparse import LowRankSparseReducer


@section
class LowRankSparseConfig:
    """Options of low-rank plus sparse gradients."""

    lowrank_rank: int = option(
        default=4,
        help="Rank of the approximation of each gradient matrix; matrices too small to gain "
        "are sent whole. Shards on tensor-parallel ranks are matrices of their own.",
        within=at_least(1),
    )
    lowrank_density: float = option(
        default=0.01,
        help="Share of each matrix's entries, the largest that the approximation leaves, that "
        "every rank also sends (1 = send all as the dense path).",
        within=ValueRange(low=0, high=1, low_open=True),
    )
    lowrank_start_iter: int = option(
        default=0,
        help="First compressed step; earlier steps are dense (0 = compress from the first step).",
        within=at_least(0),
    )

    @property
    def factors(self) -> FactorRank:
        """Rank of the factors of a matrix."""
        return FactorRank(self.lowrank_rank)


class LowRankSparsePath(GradientPath):
    """Gradients of matrices as a product of two thin matrices and a few entries of each rank."""

    name = "lowrank+sparse"
    sections = {"lowrank": LowRankSparseConfig}
    refused_pairs = BASELINE_PAIRS

    def check(self, config: Config) -> None:
        start = options_of(config, LowRankSparseConfig).lowrank_start_iter
        check_start(config, "lowrank_start_iter", start)

    def reducer(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        exchange: Exchange,
    ) -> LowRankSparseReducer:
        from megatron.parallel.tensor_shard import ModelShard
        from radius.baselines.lowrank_sparse import LowRankSparseReducer

        options = options_of(config, LowRankSparseConfig)
        return LowRankSparseReducer(
            infos,
            exchange,
            rank=options.lowrank_rank,
            density=options.lowrank_density,
            seed=config.training.seed,
            start_iter=options.lowrank_start_iter,
            model_shard=ModelShard(infos, groups),
        )

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        """Return the bytes of PowerSGD, and of the messages of this rank and all ranks."""
        options = options_of(config, LowRankSparseConfig)
        if options.lowrank_density == 1:
            return PathBytes()
        value_bytes, messages = BYTES[config.precision.grad_dtype], 0
        for bucket in matrices(rank):
            _, _, compressed = factors_of(rank, bucket, options.factors)
            message = entries_message(compressed, options.lowrank_density, value_bytes)
            messages += gathered_bytes(message, rank.ranks)
        found = powersgd_bytes(rank, factors=options.factors)
        passing = {**found.passing, "messages": messages}
        if value_bytes < 4:  # the sum of the product and the entries, in fp32
            passing["sum"] = 4 * max((bucket.numel for bucket in matrices(rank)), default=0)
        return dataclasses.replace(found, passing=passing)

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        """Return the traffic: dense steps, then two sums and a message per bucket of matrices."""
        options, steps = options_of(config, LowRankSparseConfig), config.total_iterations()
        value_bytes = BYTES[config.precision.grad_dtype]
        if options.lowrank_density == 1:
            dense = all_reduces(rank, value_bytes)
            return from_start(options.lowrank_start_iter, steps, dense, dense)
        return powersgd_traffic(
            rank,
            factors=options.factors,
            density=options.lowrank_density,
            start=options.lowrank_start_iter,
            steps=steps,
            value_bytes=value_bytes,
        )
