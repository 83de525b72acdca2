"""`--grad-path topk` and `powersgd`, as the composition root sees them. Torch only to build."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from megatron.config import Interval, at_least, option, section
from megatron.data_parallel.interface import ParamInfo, PathParts, Saved
from megatron.data_parallel.path import BYTES
from megatron.errors import ConfigError
from radius.baselines.sizes import count, is_smaller

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.parallel.groups import ProcessGroups

T = TypeVar("T")

RESIDUAL_BYTES = 8
"""Of an entry: fp32, and its successor while a step is under way."""
POSITION_BYTES = 4
FACTOR_BYTES = 4


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

    def plan_bytes(self, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """`messages` is this rank's own; those of the other data-parallel ranks lie beside it
        until they are added up."""
        density, value = _options(config, TopKConfig).topk_density, _gradient_bytes(config)
        sizes = [math.prod(shape) for shape in shapes.values() if len(shape) > 1]
        if density == 1.0:
            sizes = []
        sent = sum(count(density, size) for size in sizes)
        return {
            "gradients": value * sum(map(math.prod, shapes.values())),
            "residual": RESIDUAL_BYTES * sum(sizes),
            "messages": (POSITION_BYTES + value) * sent,
        }


class PowerSGDPath:
    """PowerSGD: gradients of matrices as products of two thin ones."""

    name = "powersgd"
    sections: Mapping[str, type] = {"powersgd": PowerSGDConfig}
    refused_pairs = ()

    def check(self, config: Config) -> None:
        start = _options(config, PowerSGDConfig).powersgd_start_iter
        _check_start(config, "powersgd_start_iter", start)

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

    def plan_bytes(self, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """`factors`: P, its basis, Q and the Q of the last step. What is sent whole beside them
        lies in their buffer for the time of the step and is not counted."""
        rank = _options(config, PowerSGDConfig).powersgd_rank
        matrices = [(s[0], math.prod(s[1:])) for s in shapes.values() if len(s) > 1]
        compressed = [(a, b) for a, b in matrices if is_smaller(a, b, rank)]
        return {
            "gradients": _gradient_bytes(config) * sum(map(math.prod, shapes.values())),
            "residual": RESIDUAL_BYTES * sum(a * b for a, b in compressed),
            "factors": FACTOR_BYTES * 2 * rank * sum(a + b for a, b in compressed),
        }


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
