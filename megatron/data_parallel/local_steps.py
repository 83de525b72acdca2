"""`--grad-path diloco`: each copy of the model takes local steps, then the copies are averaged.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", and
Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", for fragments.
Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo", for
`--outer-compression topk`.

A replica is a copy of the model, on one or on several tensor- and pipeline-parallel ranks. This
file has settings and planned bytes, and loads no torch; `outer_step` has the reducer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from megatron.config import RefusedPair, at_least, option, options_of, refused_pair, section
from megatron.config.fields import ValueRange, between
from megatron.config.rules import nearest_multiples
from megatron.data_parallel.bucket_plan import (
    BucketPlan,
    PathBytes,
    PlannedCollective,
    RankShapes,
    StepTraffic,
    payload,
    plan_wire,
)
from megatron.data_parallel.gradient_path import GradientPath
from megatron.data_parallel.rounds import Rounds
from megatron.data_parallel.wire_format import TopKCompression
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.data_parallel.bucket import ParamInfo
    from megatron.data_parallel.exchange import Exchange
    from megatron.data_parallel.outer_step import LocalReducer
    from megatron.parallel.groups import ProcessGroups


LARGEST_CHUNK = 1 << 15
"""Number of entries of a chunk whose positions are 16-bit integers."""


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
    outer_compression: Literal["none", "topk"] = option(
        default="none",
        help="none: average the whole change of each copy; topk (SparseLoCo): average the largest "
        "entries of the change of each matrix, add the others to the next change, and set "
        "outer_momentum to 0 unless it is given.",
    )
    outer_topk_chunk: int = option(
        default=4096,
        help="Consecutive entries of which outer_compression topk sends the largest.",
        within=between(1, LARGEST_CHUNK),
    )
    outer_topk_k: int = option(
        default=64,
        help="Entries that outer_compression topk sends of each chunk.",
        within=at_least(1),
    )
    outer_decay: float = option(
        default=0.95,
        help="Factor by which outer_compression topk multiplies, in each round, what earlier "
        "rounds did not send.",
        within=between(0, 1),
    )
    outer_values: Literal["fp32", "bf16", "int8", "int4", "2bit"] = option(
        default="2bit",
        help="Format of the values that outer_compression topk sends; int8, int4 and 2bit have "
        "scales for each 128 values.",
    )

    @property
    def compression(self) -> TopKCompression | None:
        """The entries of matrices that are sent, and their format; None for all entries."""
        if self.outer_compression == "none":
            return None
        return TopKCompression(
            chunk=self.outer_topk_chunk,
            k=self.outer_topk_k,
            values=self.outer_values,
            decay=self.outer_decay,
        )


def _changes_top_k(options: DilocoConfig) -> bool:
    plain = DilocoConfig(outer_compression="topk")
    return dataclasses.replace(options, outer_compression="topk").compression != plain.compression


DILOCO_PAIRS: tuple[RefusedPair, ...] = (
    refused_pair(
        "grad_path diloco with skip_loss_spikes",
        lambda c: c.training.skip_loss_spikes is not None,
        "replicas skip steps on their own, and a mean loss does not tell whose loss is too far out",
        "drop --skip-loss-spikes",
    ),
    refused_pair(
        "grad_path diloco with main_params_dtype, exp_avg_dtype or exp_avg_sq_dtype",
        lambda c: {c.optimizer.main_params_dtype, *c.optimizer.moment_dtypes} != {"fp32"},
        "differences of weights are smaller than the rounding of 16-bit weights, and states of "
        "replicas are saved in fp32",
        "drop them",
    ),
    refused_pair(
        "outer_compression topk with grad_wire",
        lambda c: (
            options_of(c, DilocoConfig).outer_compression == "topk"
            and c.gradient.grad_wire is not None
        ),
        "a message of the largest entries has a format of its own",
        "give --outer-values, and drop --grad-wire",
    ),
    refused_pair(
        "outer_topk_chunk, outer_topk_k, outer_decay or outer_values without outer_compression",
        lambda c: (
            (o := options_of(c, DilocoConfig)).outer_compression == "none" and _changes_top_k(o)
        ),
        "every copy sends its whole change, in the format of grad_wire",
        "give --outer-compression topk, or drop them",
    ),
)
"""Refused pairs of `--grad-path diloco`, for its check and for `--help-compat`."""


class DilocoPath(GradientPath):
    """Local steps with gradients that are not exchanged, and an outer step on averaged weights."""

    name = "diloco"
    sections = {"diloco": DilocoConfig}
    refused_pairs = DILOCO_PAIRS
    presets = {"outer_compression": {"topk": {"outer_momentum": 0.0}}}

    def check(self, config: Config) -> None:
        options = options_of(config, DilocoConfig)
        if options.local_fragments > options.local_steps:
            raise ConfigError(
                f"local_fragments {options.local_fragments} is more than local_steps "
                f"{options.local_steps}, so that fragments would share a turn; give at most "
                f"--local-fragments {options.local_steps}"
            )
        compression = options.compression
        if compression is not None and compression.k > compression.chunk:
            raise ConfigError(
                f"outer_topk_k {compression.k} is more than outer_topk_chunk {compression.chunk}; "
                f"give at most --outer-topk-k {compression.chunk}"
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
        from megatron.parallel.tensor_shard import ModelShard

        options = options_of(config, DilocoConfig)
        return LocalReducer(
            exchange,
            rounds=_rounds(config),
            outer=OuterSGD(lr=options.outer_lr, momentum=options.outer_momentum),
            entries={info.name: info.local_entries for info in infos},
            compression=options.compression,
            keeps_rounding=config.gradient.keeps_rounding,
            model_shard=ModelShard(infos, groups),
        )

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        """Return the bytes of anchor, outer momentum and differences, and of what is sent of these.

        In a checkpoint each replica has its moments and, inside a round, its weights.
        """
        compression = options_of(config, DilocoConfig).compression
        sent = plan_wire(config, rank) if compression is None else _messages(compression, rank)
        size = 4 * sum(bucket.numel for bucket in rank.buckets)
        momentum = size if options_of(config, DilocoConfig).outer_momentum else 0
        # fp32 gradients are consumed by then, and differences take their memory.
        differences = 0 if config.precision.grad_dtype == "float32" else size
        return dataclasses.replace(
            sent,
            kept={**sent.kept, "anchor": size, "outer momentum": momentum},
            passing={**sent.passing, "differences": differences},
            shared=momentum,
            own=sent.own + size * (1 + config.optimizer.num_moments),
        )

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        """Return the traffic of steps that average nothing, one fragment, or the whole model."""
        rounds, count = _rounds(config), len(rank.buckets)
        found: list[StepTraffic] = []
        for ended, steps in sorted(rounds.counts().items()):
            sent = [
                _collective(config, rank, number, rounds.fragment_of(number, count) in ended)
                for number in range(count)
            ]
            found.append(StepTraffic(_kind(ended, rounds), steps, sent, overlaps=False))
        return found


def _collective(
    config: Config, rank: RankShapes, number: int, is_averaged: bool
) -> PlannedCollective:
    """Return the collective of a bucket at the end of a step."""
    bucket, compression = rank.buckets[number], options_of(config, DilocoConfig).compression
    if compression is not None and bucket.kind.matrix:
        nbytes = _message_bytes(compression, bucket) if is_averaged else 0
        return PlannedCollective("all-gather", nbytes, number)
    nbytes = payload(
        bucket,
        bucket.numel if is_averaged else 0,
        ranks=rank.ranks,
        grad_bytes=4,
        wire=config.gradient.grad_wire,
    )
    return PlannedCollective("all-reduce", nbytes, number)


def _message_bytes(compression: TopKCompression, bucket: BucketPlan) -> int:
    return compression.message_bytes(where.numel for where in bucket.slices.values())


def _messages(compression: TopKCompression, rank: RankShapes) -> PathBytes:
    """Return the bytes of unsent changes, and of the messages of this rank and all ranks."""
    matrices = [bucket for bucket in rank.buckets if bucket.kind.matrix]
    unsent = 4 * sum(bucket.numel for bucket in matrices)
    messages = sum(_message_bytes(compression, bucket) for bucket in matrices)
    copies = 1 + rank.ranks * (rank.ranks > 1)
    return PathBytes({"unsent": unsent}, {"messages": copies * messages}, own=unsent)


def _kind(ended: tuple[int, ...], rounds: Rounds) -> str:
    """Return the name of a step after which these fragments are averaged."""
    if not ended:
        return "local"
    if len(ended) == rounds.fragments:
        return "average"
    return f"average of fragment {', '.join(str(each + 1) for each in ended)}"


def _rounds(config: Config) -> Rounds:
    options = options_of(config, DilocoConfig)
    return Rounds(options.local_steps, options.local_fragments, config.total_iterations())
