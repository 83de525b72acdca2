"""`--grad-path powersgd`: settings, and bytes for the planner. Loads torch only to build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.config import ValueRange, at_least, option, options_of, refused_pair, section
from megatron.data_parallel.bucket_plan import BYTES, PathBytes, RankShapes, StepTraffic
from megatron.data_parallel.gradient_path import GradientPath
from radius.baselines.feedback import BASELINE_PAIRS, check_start
from radius.baselines.message_bytes import FactorRank, powersgd_bytes, powersgd_traffic

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.data_parallel.bucket import ParamInfo
    from megatron.data_parallel.exchange import Exchange
    from megatron.parallel.groups import ProcessGroups
    from radius.baselines.powersgd import PowerSGDReducer


@section
class PowerSGDConfig:
    """Options of PowerSGD."""

    powersgd_rank: int = option(
        default=FactorRank.rank,
        help="Rank of the approximation of each gradient matrix; matrices too small to gain "
        "are sent whole. Shards on tensor-parallel ranks are matrices of their own.",
        within=at_least(1),
    )
    powersgd_rank_share: float | None = option(
        default=None,
        help="Rank as a share of the shorter side of each matrix, rounded up, instead of "
        "powersgd_rank (none = powersgd_rank).",
        within=ValueRange(low=0, low_open=True, high=1),
    )
    powersgd_start_iter: int = option(
        default=0,
        help="First compressed step; earlier steps are dense (0 = compress from the first step).",
        within=at_least(0),
    )

    @property
    def has_two_ranks(self) -> bool:
        """Whether a share is given beside a rank; the default rank counts as not given."""
        return self.powersgd_rank != FactorRank.rank and self.powersgd_rank_share is not None

    @property
    def factors(self) -> FactorRank:
        """Rank of the factors of a matrix."""
        return FactorRank(self.powersgd_rank, self.powersgd_rank_share)


class PowerSGDPath(GradientPath):
    """PowerSGD: gradients of matrices as products of two thin matrices."""

    name = "powersgd"
    sections = {"powersgd": PowerSGDConfig}
    refused_pairs = (
        *BASELINE_PAIRS,
        refused_pair(
            "powersgd_rank with powersgd_rank_share",
            lambda c: options_of(c, PowerSGDConfig).has_two_ranks,
            "a matrix has one rank",
            "give one of them",
        ),
    )
    alternatives = ((("powersgd_rank",), ("powersgd_rank_share",)),)

    def check(self, config: Config) -> None:
        start = options_of(config, PowerSGDConfig).powersgd_start_iter
        check_start(config, "powersgd_start_iter", start)

    def reducer(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        exchange: Exchange,
    ) -> PowerSGDReducer:
        from megatron.parallel.tensor_shard import ModelShard
        from radius.baselines.powersgd import PowerSGDReducer

        options = options_of(config, PowerSGDConfig)
        return PowerSGDReducer(
            infos,
            exchange,
            rank=options.powersgd_rank,
            rank_share=options.powersgd_rank_share,
            seed=config.training.seed,
            start_iter=options.powersgd_start_iter,
            model_shard=ModelShard(infos, groups),
        )

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        return powersgd_bytes(rank, factors=options_of(config, PowerSGDConfig).factors)

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        options = options_of(config, PowerSGDConfig)
        return powersgd_traffic(
            rank,
            factors=options.factors,
            start=options.powersgd_start_iter,
            steps=config.total_iterations(),
            value_bytes=BYTES[config.precision.grad_dtype],
        )
