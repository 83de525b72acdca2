"""`--grad-path radius`: settings, refused pairs, and construction. Imports torch only to build."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from megatron.config import RefusedPair, known_length, options_of, refused_pair
from megatron.config.fields import ValueRange, at_least, between, option, section
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.bucket_plan import (
    BYTES,
    BucketClass,
    PathBytes,
    RankShapes,
    StepTraffic,
    plan_rounding,
    plan_wire,
    slice_alignment,
)
from megatron.data_parallel.gradient_path import GradientPath
from megatron.errors import ConfigError
from radius.memory import PlannedRun, node_traffic, planned_bytes, planned_traffic, with_shards
from radius.schedule import fitting_interval

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.data_parallel.exchange import Exchange
    from megatron.data_parallel.reducer import GradientReducer
    from megatron.parallel.groups import ProcessGroups


def _sums_up(config: Config) -> bool:
    """Return whether a resample sends the sum of several steps."""
    options = options_of(config, RadiusConfig)
    return options.radius_residual != "none" and options.radius_density < 1


RADIUS_PAIRS: tuple[RefusedPair, ...] = (
    refused_pair(
        "radius_start_iter with radius_start_fraction",
        lambda c: options_of(c, RadiusConfig).has_two_starts,
        "Radius has one start",
        "give one of them",
    ),
    refused_pair(
        "radius_schedule rolling with adam_beta1 0",
        lambda c: (
            options_of(c, RadiusConfig).radius_schedule == "rolling"
            and c.optimizer.optimizer == "adam"
            and c.optimizer.adam_beta1 == 0
        ),
        "sums of several steps enter the two moments apart, and the first has to last for that",
        "raise adam_beta1, or give --radius-schedule paper",
    ),
    refused_pair(
        "radius_schedule rolling with exp_avg_dtype or exp_avg_sq_dtype int8",
        lambda c: (
            options_of(c, RadiusConfig).radius_schedule == "rolling"
            and "int8" in c.optimizer.moment_dtypes
        ),
        "moments of unselected entries are frozen, but int8 moments share a scale with selected "
        "ones and are rounded again in every step",
        "give bf16 instead, or --radius-schedule paper",
    ),
    refused_pair(
        "radius_schedule rolling and radius_select update with use_distributed_optimizer",
        lambda c: (
            c.parallel.use_distributed_optimizer
            and c.parallel.dp_inner_size == 1
            and (o := options_of(c, RadiusConfig)).radius_schedule == "rolling"
            and o.radius_select == "update"
        ),
        "every step selects by updates of which each data-parallel rank has a part, so that every "
        "step would count and gather them",
        "give --radius-select seeded or gradient, or --radius-schedule paper",
    ),
    refused_pair(
        "sgd_nesterov or sgd_weight_decay coupled",
        lambda c: (
            c.optimizer.optimizer == "sgd"
            and (c.optimizer.sgd_nesterov or c.optimizer.sgd_weight_decay == "coupled")
        ),
        "Radius selects by the momentum and the decoupled decay, and unselected entries have no "
        "gradient to which an L2 term could be added",
        "give --sgd-weight-decay decoupled without --sgd-nesterov, or another --grad-path",
    ),
    refused_pair(
        "radius_residual none with grad_wire int8 or int4 and grad_wire_feedback",
        lambda c: (
            c.gradient.keeps_rounding and options_of(c, RadiusConfig).radius_residual == "none"
        ),
        "there is no residual to keep what the wire rounds off",
        "give --grad-wire bf16, or --grad-wire-feedback false",
    ),
    refused_pair(
        "fp16 without accumulate_allreduce_grads_in_fp32",
        lambda c: c.precision.grad_dtype == "float16" and _sums_up(c),
        "a resample sends the sum of many steps times the loss scale, which overflows in 16 bit "
        "however far the scale falls, and no later resample would pass",
        "give --accumulate-allreduce-grads-in-fp32, or --radius-residual none",
    ),
)
"""Refused pairs of `--grad-path radius`, for its check and for `--help-compat`."""


PRESETS: dict[str, dict[str, Any]] = {
    "best": {
        "radius_schedule": "rolling",
        "radius_density": 0.35,
        "radius_interval": 20,
        "radius_clip": "per-step",
        "grad_wire": "bf16",
    }
}
"""Settings by value of `radius_preset`.

best: of the settings that send 0.19 of the bytes of a dense fp32 step, that which ended with the
least loss (tools/bench/rolling), with the clipping that lowers the loss over an int4 wire
(tools/bench/loss_by_bytes).
"""

START_FRACTION = 0.2
"""Share of the run after which large gradients keep their positions, according to the paper."""


@section
class RadiusConfig:
    """Range-based gradient sparsity."""

    radius_preset: Literal["paper", "best"] = option(
        default="paper",
        help="paper: the settings of the paper; best (ours): rolling schedule, density 0.35, "
        "interval 20, clipping per step and bf16 values, unless given otherwise. Least loss of all "
        "measured settings of Radius at 0.38 of the bytes of dense bf16.",
        saved=False,
    )
    radius_density: float = option(
        default=0.4,
        help="Share of each matrix's gradient that is sent between resamples (1 = all, as dense).",
        within=ValueRange(low=0, low_open=True, high=1),
    )
    radius_interval: int = option(
        default=200,
        help="Steps between resamples, T in the paper: each sends the whole gradient with "
        "the residual and selects the entries to send until the next.",
        within=at_least(1),
    )
    radius_start_iter: int | None = option(
        default=None,
        help="Applied step from which the first resample may come (none = by the fraction).",
        within=at_least(0),
    )
    radius_start_fraction: float | None = option(
        default=None,
        help="Share of the run before the first resample, rounded up to a step (none = "
        f"{START_FRACTION}, unless radius_start_iter is given).",
        within=between(0, 1),
    )
    radius_schedule: Literal["paper", "rolling"] = option(
        default="paper",
        help="paper: send everything every T steps; rolling (ours): send one of T parts of "
        "each matrix in every step, freeze moments of unselected entries and let their "
        "weights only decay.",
    )
    radius_select: Literal["update", "seeded", "gradient"] = option(
        default="update",
        help="Criterion of the selection: the largest update of the optimizer (the paper), a"
        " seeded random draw, or the largest mean gradient (ours).",
    )
    radius_clip: Literal["all", "per-step"] = option(
        default="all",
        help="Gradient norm for clipping and log: of all that was sent (the paper), or per-step "
        "(ours), in which the sum of c steps counts by its square over c.",
    )
    radius_residual: Literal["separate", "none"] = option(
        default="separate",
        help="Buffer of gradients that were not sent: separate (the paper), or none, which "
        "drops them.",
    )

    @property
    def density(self) -> Fraction:
        """Density as an exact decimal fraction."""
        return Fraction(str(self.radius_density))

    @property
    def has_two_starts(self) -> bool:
        """Whether the start is given as a step and as a share of the run."""
        return None not in (self.radius_start_iter, self.radius_start_fraction)

    def start(self, total: int) -> int:
        """Return the first step at which a run of `total` steps may resample."""
        if self.radius_start_iter is not None:
            return self.radius_start_iter
        fraction = self.radius_start_fraction
        return math.ceil(Fraction(str(START_FRACTION if fraction is None else fraction)) * total)


class RadiusPath(GradientPath):
    """A fixed set of entries of each matrix, selected again every T steps, with error feedback."""

    name = "radius"
    sections = {"radius": RadiusConfig}
    refused_pairs = RADIUS_PAIRS
    alternatives = ((("radius_start_iter",), ("radius_start_fraction",)),)
    presets = {"radius_preset": PRESETS}

    def check(self, config: Config) -> None:
        if (total := known_length(config)) is not None:
            _check_length(options_of(config, RadiusConfig), total)

    def reducer(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        exchange: Exchange,
    ) -> GradientReducer:
        from megatron.data_parallel.exchange import Exchange
        from megatron.data_parallel.mean_reducer import mean_reducer
        from megatron.data_parallel.node_reducer import NodeReducer
        from megatron.parallel.tensor_shard import ModelShard
        from radius.reducer import RadiusReducer, RadiusSettings

        options, total = options_of(config, RadiusConfig), config.total_iterations()
        if not config.training.skip_train:
            # Only now is the number of ranks known, on which the number of steps may depend.
            _check_length(options, total)
        if options.density == 1:
            return mean_reducer(config, infos, exchange, groups)
        settings = RadiusSettings(
            density=options.density,
            interval=options.radius_interval,
            start=options.start(total),
            schedule=options.radius_schedule,
            select=options.radius_select,
            clip=options.radius_clip,
            residual=options.radius_residual,
            seed=config.training.seed,
        )
        matrices = {info.name: info.local_entries for info in infos if info.param.dim() > 1}
        if groups.shard_copies.size > 1:
            inner, outer = Exchange(groups.shards), Exchange(groups.shard_copies)
            part = ModelShard(infos, groups, on_node=True)
            return NodeReducer(inner, RadiusReducer(outer, matrices, settings, part, shards=inner))
        return RadiusReducer(
            exchange,
            matrices,
            settings,
            ModelShard(infos, groups),
            sharded=config.parallel.use_distributed_optimizer,
            keeps_rounding=config.gradient.keeps_rounding,
        )

    def lends_grad(self, config: Config, kind: BucketClass) -> bool:
        return not kind.matrix or options_of(config, RadiusConfig).density == 1

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        """Return the bytes of index, residual and values, and of what a wire takes beside them.

        On a CPU all of them persist; on a GPU `values` exist only while they are sent.
        """
        options = options_of(config, RadiusConfig)
        rolling = options.radius_schedule == "rolling"
        found = planned_bytes(
            rank,
            density=options.density,
            residual=options.radius_residual,
            rolling_interval=options.radius_interval if rolling else None,
            value_bytes=BYTES[config.precision.grad_dtype],
            shards=config.parallel.dp_inner_size,
            alignment=slice_alignment(config),
            selects_by_gradient=options.radius_select == "gradient",
        )
        wire = plan_wire(config, rank)
        if options.density < 1:
            # A single rank, which encodes nothing, allocates the buffers too.
            wire = dataclasses.replace(plan_rounding(config, rank), passing=wire.passing)
        # The residual is one of the two buffers that keep what the wire loses.
        kept = {kind: size - found.kept["residual"] for kind, size in wire.kept.items()}
        return dataclasses.replace(
            found,
            kept={**found.kept, **kept},
            passing={**found.passing, **wire.passing},
            own=max(found.own, wire.own),
        )

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        options, total = options_of(config, RadiusConfig), config.total_iterations()
        parallel, wire = config.parallel, config.gradient.grad_wire
        grad_bytes = BYTES[config.precision.grad_dtype]
        param_bytes, alignment = BYTES[config.precision.param_dtype], slice_alignment(config)
        run = PlannedRun(
            density=options.density,
            start=options.start(total),
            interval=options.radius_interval,
            rolling=options.radius_schedule == "rolling",
            steps=total,
        )
        if parallel.dp_inner_size > 1:
            return node_traffic(
                rank,
                run,
                selects_by_values=options.radius_select != "seeded",
                inner=parallel.dp_inner_size,
                grad_bytes=grad_bytes,
                param_bytes=param_bytes,
                alignment=alignment,
            )
        found = planned_traffic(rank, run, value_bytes=grad_bytes, wire=wire)
        if not parallel.use_distributed_optimizer or rank.ranks == 1:
            return found
        return with_shards(
            found,
            rank,
            density=options.density,
            selects_by_update=options.radius_select == "update",
            grad_bytes=grad_bytes,
            param_bytes=param_bytes,
            wire=wire,
            alignment=alignment,
        )


def _check_length(options: RadiusConfig, total: int) -> None:
    """Raise `ConfigError` if Radius would never begin in a run of `total` steps."""
    start, interval = options.start(total), options.radius_interval
    if options.density == 1:
        return
    if start > total:
        raise ConfigError(
            f"radius_start_iter {start} is past the last of {total} steps; give a lower one, or "
            "--radius-start-fraction"
        )
    if interval == 1:
        return  # Every step resamples, as asked.
    # A resample in the last step would leave no step to send a part.
    fitting = fitting_interval(first := max(start, 1), total - 1, interval)
    if fitting != interval:
        way_out = "start earlier, or train longer"
        if fitting:
            way_out = f"--radius-interval {fitting} would do"
        raise ConfigError(
            f"radius_interval {interval}: no step from {first}, where Radius starts, to "
            f"{total - 1}, the last but one, is a multiple of it, so that none would send a part; "
            f"{way_out}"
        )
