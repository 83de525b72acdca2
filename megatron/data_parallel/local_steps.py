"""`--grad-path diloco`: each copy of the model takes local steps, then the copies are averaged.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", and
Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", for fragments.

A replica is a copy of the model, on one or on several tensor- and pipeline-parallel ranks. This
file has settings and planned bytes, and loads no torch; `outer_step` has the reducer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron.config import RefusedPair, at_least, option, section
from megatron.config.fields import ValueRange
from megatron.config.rules import nearest_multiples
from megatron.data_parallel.bucket_plan import (
    PathBytes,
    PlannedCollective,
    RankShapes,
    StepTraffic,
    payload,
    plan_wire,
)
from megatron.data_parallel.gradient_path import GradientPath
from megatron.data_parallel.rounds import Rounds
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.data_parallel.bucket import ParamInfo
    from megatron.data_parallel.exchange import Exchange
    from megatron.data_parallel.outer_step import LocalReducer
    from megatron.parallel.groups import ProcessGroups


@section
class DilocoConfig:
    """Local steps of each replica, and the outer optimizer that averages replicas."""

    local_steps: int = option(
        default=100,
        help="Steps that each copy of the model takes with its own gradients between two averages "
        "of the copies (H in the DiLoCo paper).",
        within=at_least(1),
    )
    outer_lr: float = option(
        default=0.7,
        help="Learning rate of the outer SGD, which moves the shared weights by the mean change of "
        "the copies (1 with outer_momentum 0 = the plain mean of their weights).",
        within=ValueRange(low=0, low_open=True),
    )
    outer_momentum: float = option(
        default=0.9,
        help="Nesterov momentum of the outer SGD.",
        within=ValueRange(low=0, high=1, high_open=True),
    )
    local_fragments: int = option(
        default=1,
        help="Parts of the model that are averaged at different steps of a round, so that less is "
        "sent at a time.",
        within=at_least(1),
    )


def _pair(name: str, holds: Callable[[Config], object], reason: str, instead: str) -> RefusedPair:
    return RefusedPair(name=name, holds=holds, reason=reason, instead=instead)


DILOCO_PAIRS: tuple[RefusedPair, ...] = (
    _pair(
        "grad_path diloco with skip_loss_spikes",
        lambda c: c.training.skip_loss_spikes is not None,
        "replicas skip steps on their own, and a mean loss does not tell whose loss is too far out",
        "drop --skip-loss-spikes",
    ),
    _pair(
        "grad_path diloco with main_params_dtype, exp_avg_dtype or exp_avg_sq_dtype",
        lambda c: {c.optimizer.main_params_dtype, *c.optimizer.moment_dtypes} != {"fp32"},
        "differences of weights are smaller than the rounding of 16-bit weights, and states of "
        "replicas are saved in fp32",
        "drop them",
    ),
)
"""Refused pairs of `--grad-path diloco`, for its check and for `--help-compat`."""


class DilocoPath(GradientPath):
    """Local steps with gradients that are not exchanged, and an outer step on averaged weights."""

    name = "diloco"
    sections = {"diloco": DilocoConfig}
    refused_pairs = DILOCO_PAIRS

    def check(self, config: Config) -> None:
        options = _options(config)
        if options.local_fragments > options.local_steps:
            raise ConfigError(
                f"local_fragments {options.local_fragments} is more than local_steps "
                f"{options.local_steps}, so that fragments would share a turn; give at most "
                f"--local-fragments {options.local_steps}"
            )
        evaluation = config.evaluation
        intervals = {
            "check_weight_hash_across_dp_replicas_interval": (
                config.parallel.check_weight_hash_across_dp_replicas_interval
            )
        }
        if evaluation.eval_iters or evaluation.full_validation:
            intervals["eval_interval"] = evaluation.eval_interval
        for name, interval in intervals.items():
            if interval is not None and interval % options.local_steps:
                raise ConfigError(
                    f"{name} {interval} is not a multiple of local_steps {options.local_steps}, "
                    "between whose averages replicas differ; nearest: "
                    f"{nearest_multiples(interval, options.local_steps)}"
                )

    def reducer(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        exchange: Exchange,
    ) -> LocalReducer:
        from megatron.data_parallel.outer_step import LocalReducer, OuterSGD

        options = _options(config)
        return LocalReducer(
            exchange,
            rounds=_rounds(config),
            outer=OuterSGD(lr=options.outer_lr, momentum=options.outer_momentum),
            entries={info.name: info.local_entries for info in infos},
            keeps_rounding=config.gradient.keeps_rounding,
            copies=groups.tp,
        )

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        """Return the bytes of anchor, outer momentum and differences, and of the wire.

        In a checkpoint each replica has its moments and, inside a round, its weights.
        """
        wire = plan_wire(config, rank)
        size = 4 * sum(bucket.numel for bucket in rank.buckets)
        momentum = size if _options(config).outer_momentum else 0
        # fp32 gradients are consumed by then, and differences take their memory.
        differences = 0 if config.precision.grad_dtype == "float32" else size
        return dataclasses.replace(
            wire,
            kept={**wire.kept, "anchor": size, "outer momentum": momentum},
            passing={**wire.passing, "differences": differences},
            shared=momentum,
            own=wire.own + size * (1 + config.optimizer.num_moments),
        )

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        """Return the traffic of steps that average nothing, one fragment, or the whole model."""
        rounds, count = _rounds(config), len(rank.buckets)
        found: list[StepTraffic] = []
        for ended, steps in sorted(rounds.counts().items()):
            sent: list[PlannedCollective] = []
            for number, bucket in enumerate(rank.buckets):
                entries = bucket.numel if rounds.fragment_of(number, count) in ended else 0
                nbytes = payload(
                    bucket,
                    entries,
                    ranks=rank.ranks,
                    grad_bytes=4,
                    wire=config.gradient.grad_wire,
                )
                sent.append(PlannedCollective("all-reduce", nbytes, number))
            found.append(StepTraffic(_kind(ended, rounds), steps, sent, overlaps=False))
        return found


def _kind(ended: tuple[int, ...], rounds: Rounds) -> str:
    """Return the name of a step after which these fragments are averaged."""
    if not ended:
        return "local"
    if len(ended) == rounds.fragments:
        return "average"
    return f"average of fragment {', '.join(str(each + 1) for each in ended)}"


def _rounds(config: Config) -> Rounds:
    options = _options(config)
    return Rounds(options.local_steps, options.local_fragments, config.total_iterations())


def _options(config: Config) -> DilocoConfig:
    options = config.extensions["diloco"]
    assert isinstance(options, DilocoConfig)
    return options
