"""`--grad-path topk` and `powersgd`, as the composition root sees them. Torch only to build."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from megatron.config import Interval, at_least, option, section
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.bucket_plan import ParamShape, PathBytes, RankShapes, StepTraffic
from megatron.data_parallel.interface import PathParts, Saved, Shapes
from megatron.data_parallel.path import BYTES
from megatron.errors import ConfigError
from radius.baselines.plan import powersgd_bytes, powersgd_traffic, topk_bytes, topk_traffic

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.parallel.groups import ProcessGroups

T = TypeVar("T")


@section
class TopKConfig:
    """Options of naive top-k."""

    topk_density: float = option(
        default=0.01,
        help="Share of each matrix's entries that every rank sends (1 = all, as the dense path). "
        "Tensor-parallel ranks each choose from their own part.",
        within=Interval(low=0, high=1, low_open=True),
    )
    topk_start_iter: int = option(
        default=0,
        help="First step that is compressed; earlier ones are dense (0 = from the first step).",
        within=at_least(0),
    )


@section
class PowerSGDConfig:
    """Options of PowerSGD."""

    powersgd_rank: int = option(
        default=4,
        help="Rank of the matrices that gradients are approximated by; those too small to gain "
        "from it are sent whole. Parts on tensor-parallel ranks are matrices of their own.",
        within=at_least(1),
    )
    powersgd_start_iter: int = option(
        default=0,
        help="First step that is compressed; earlier ones are dense (0 = from the first step).",
        within=at_least(0),
    )


class TopKPath:
    """Naive top-k: every rank's largest entries go to every other rank."""

    name = "topk"
    sections: Mapping[str, type] = {"topk": TopKConfig}
    refused_pairs = ()

    def check(self, config: Config) -> None:
        _check_start(config, "topk_start_iter", _options(config, TopKConfig).topk_start_iter)

    def check_files(self, config: Config, shapes: Callable[[], Shapes | None]) -> None:
        """Read no file."""

    def build(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        saved: Saved | None = None,
    ) -> PathParts:
        from megatron.data_parallel.buckets import DenseLayout
        from radius.baselines.topk import TopKReducer
        from radius.share import ModelShare

        options = _options(config, TopKConfig)
        reducer = TopKReducer(
            infos,
            groups.dp,
            density=options.topk_density,
            start_iter=options.topk_start_iter,
            share=ModelShare.of(groups, infos),
        )
        return PathParts(layout=DenseLayout(), reducer=reducer)

    def stored(self, config: Config, params: Iterable[ParamShape]) -> dict[str, int]:
        return {}

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        density = _options(config, TopKConfig).topk_density
        return topk_bytes(rank, density=density, value_bytes=_gradient_bytes(config))

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        options = _options(config, TopKConfig)
        return topk_traffic(
            rank,
            density=options.topk_density,
            start=options.topk_start_iter,
            steps=config.total_iterations(),
            value_bytes=_gradient_bytes(config),
        )


class PowerSGDPath:
    """PowerSGD: gradients of matrices as products of two thin ones."""

    name = "powersgd"
    sections: Mapping[str, type] = {"powersgd": PowerSGDConfig}
    refused_pairs = ()

    def check(self, config: Config) -> None:
        start = _options(config, PowerSGDConfig).powersgd_start_iter
        _check_start(config, "powersgd_start_iter", start)

    def check_files(self, config: Config, shapes: Callable[[], Shapes | None]) -> None:
        """Read no file."""

    def build(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        saved: Saved | None = None,
    ) -> PathParts:
        from megatron.data_parallel.buckets import DenseLayout
        from radius.baselines.powersgd import PowerSGDReducer
        from radius.share import ModelShare

        options = _options(config, PowerSGDConfig)
        reducer = PowerSGDReducer(
            infos,
            groups.dp,
            rank=options.powersgd_rank,
            seed=config.training.seed,
            start_iter=options.powersgd_start_iter,
            share=ModelShare.of(groups, infos),
        )
        return PathParts(layout=DenseLayout(), reducer=reducer)

    def stored(self, config: Config, params: Iterable[ParamShape]) -> dict[str, int]:
        return {}

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        options = _options(config, PowerSGDConfig)
        return powersgd_bytes(rank, rank_of_factors=options.powersgd_rank)

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        options = _options(config, PowerSGDConfig)
        return powersgd_traffic(
            rank,
            rank_of_factors=options.powersgd_rank,
            start=options.powersgd_start_iter,
            steps=config.total_iterations(),
            value_bytes=_gradient_bytes(config),
        )


def _options(config: Config, kind: type[T]) -> T:
    (found,) = (options for options in config.extensions.values() if isinstance(options, kind))
    return found


def _gradient_bytes(config: Config) -> int:
    return BYTES[config.precision.grad_dtype]


def _check_start(config: Config, name: str, start: int) -> None:
    training = config.training
    counted = training.train_iters is not None or training.global_batch_size is not None
    if training.skip_train or not counted:
        return
    if start > (last := config.total_iterations()):
        raise ConfigError(
            f"{name}: {start} is past the last step, {last}, and nothing would be compressed; "
            f"start at {last} or before, or give --grad-path dense"
        )
