"""`--grad-path roundrobin`: a T-th of the rows of each matrix in each step, in turns (ours).

Step t sends rows `[R k / T, R (k + 1) / T)` of each matrix of R rows, k = t mod T, with what waited
there since those rows were last sent. No entry is selected, so there is no index: all ranks send
the same rows by all-reduce. The optimizer freezes the other rows, as in Radius's schedule
`rolling`, which sends selected entries besides.

This file is the whole path: settings, reducer, and bytes for the planner.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config import at_least, known_length, option, options_of, refused_pair, section
from megatron.data_parallel.bucket_plan import (
    BYTES,
    BucketPlan,
    ParamShape,
    PathBytes,
    PlannedCollective,
    RankShapes,
    StepTraffic,
)
from megatron.data_parallel.gradient_path import GradientPath
from megatron.errors import ConfigError
from megatron.parallel.tensor_shard import even_share
from radius.baselines.feedback import BASELINE_PAIRS, CompressedWork, FeedbackReducer, check_start
from radius.baselines.message_bytes import RESIDUAL_BYTES, all_reduces, from_start, matrices
from radius.index import index_bytes, new_index

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.data_parallel.bucket import GradBucket, ParamInfo
    from megatron.data_parallel.exchange import Exchange
    from megatron.data_parallel.reducer import (
        PerEntryState,
        ReducedGrad,
        SparseIndex,
        StepContext,
        Work,
    )
    from megatron.parallel.groups import ProcessGroups
    from megatron.parallel.tensor_shard import ModelShard, TensorShard
    from radius.bucket_index import BucketIndex

COUNT_BYTES = 4
"""Bytes of the number of steps that an entry sums, fp32."""
WAITED = "roundrobin/waited"
"""Name in a checkpoint of the number of steps that each of the T parts has waited."""


@section
class RoundRobinConfig:
    """Options of round-robin gradients."""

    roundrobin_interval: int = option(
        default=8,
        help="Steps between two sends of a row, T: each step sends one of T parts of each matrix "
        "with its residual and freezes the others (1 = send all, as the dense path).",
        within=at_least(1),
    )
    roundrobin_start_iter: int = option(
        default=0,
        help="First compressed step; earlier steps are dense (0 = compress from the first step).",
        within=at_least(0),
    )


class RoundRobinPath(GradientPath):
    """A part of the rows of each matrix in each step, the parts in turns."""

    name = "roundrobin"
    sections = {"roundrobin": RoundRobinConfig}
    refused_pairs = (
        *BASELINE_PAIRS,
        refused_pair(
            "grad_path roundrobin with adam_beta1 0",
            lambda c: c.optimizer.optimizer == "adam" and c.optimizer.adam_beta1 == 0,
            "sums of several steps enter the two moments apart, and the first has to last for that",
            "raise adam_beta1, or give another --grad-path",
        ),
        refused_pair(
            "grad_path roundrobin with exp_avg_dtype or exp_avg_sq_dtype int8",
            lambda c: "int8" in c.optimizer.moment_dtypes,
            "moments of rows that are not sent are frozen, but int8 moments share a scale with "
            "sent ones and are rounded again in every step",
            "give bf16 instead, or another --grad-path",
        ),
        refused_pair(
            "grad_path roundrobin with sgd_weight_decay coupled",
            lambda c: c.optimizer.optimizer == "sgd" and c.optimizer.sgd_weight_decay == "coupled",
            "rows that are not sent have no gradient to which an L2 term could be added",
            "give --sgd-weight-decay decoupled, or another --grad-path",
        ),
    )

    def check(self, config: Config) -> None:
        options = options_of(config, RoundRobinConfig)
        check_start(config, "roundrobin_start_iter", options.roundrobin_start_iter)
        _check_interval(config, options)

    def reducer(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        exchange: Exchange,
    ) -> RoundRobinReducer:
        from megatron.parallel.tensor_shard import ModelShard

        options = options_of(config, RoundRobinConfig)
        return RoundRobinReducer(
            infos,
            exchange,
            interval=options.roundrobin_interval,
            start_iter=options.roundrobin_start_iter,
            model_shard=ModelShard(infos, groups),
        )

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        """Return the bytes of residuals, and of the values of the largest parts with their c."""
        interval = options_of(config, RoundRobinConfig).roundrobin_interval
        if interval == 1:
            return PathBytes()
        each = BYTES[config.precision.grad_dtype] + COUNT_BYTES
        index = residual = values = 0
        for bucket in matrices(rank):
            index += index_bytes(bucket.numel, 0, bits=rank.device != "cpu")
            residual += RESIDUAL_BYTES * sum(rank.params[n].local_entries for n in bucket.slices)
            values += each * max(_entries(rank, bucket, part, interval) for part in range(interval))
        kept = {"residual": residual, "index": index}
        own = residual * 4 // RESIDUAL_BYTES
        return PathBytes(kept, {"values": values}, 8 * interval, own)

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        """Return the traffic: dense steps, then the turns of the T parts; equal ones are one."""
        options, steps = options_of(config, RoundRobinConfig), config.total_iterations()
        start, interval = options.roundrobin_start_iter, options.roundrobin_interval
        value_bytes = BYTES[config.precision.grad_dtype]
        dense = all_reduces(rank, value_bytes)
        found = from_start(start, steps, dense, dense)
        if interval == 1:
            return found
        turns: Counter[tuple[PlannedCollective, ...]] = Counter()
        for t in range(max(start, 1), max(start, 1) + interval):
            sent = tuple(
                each._replace(nbytes=value_bytes * _entries(rank, bucket, t % interval, interval))
                if bucket.kind.matrix
                else each
                for each, bucket in zip(dense, rank.buckets, strict=True)
            )
            turns[sent] += len(range(t, steps + 1, interval))
        compressed = [StepTraffic("compressed", n, sent) for sent, n in turns.items() if n]
        return [*found[:-1], *compressed]


def _check_interval(config: Config, options: RoundRobinConfig) -> None:
    """Raise `ConfigError` if the run is too short for every part to be sent."""
    first, last = max(options.roundrobin_start_iter, 1), known_length(config)
    if last is not None and options.roundrobin_interval > (left := last + 1 - first):
        raise ConfigError(
            f"roundrobin_interval {options.roundrobin_interval}: the steps {first} to {last} are "
            f"fewer, and some rows would never be sent; --roundrobin-interval {left} would do"
        )


def part_of(param: ParamInfo | ParamShape, part: int, interval: int) -> tuple[int, int]:
    """Return `[start, stop)`: the entries on this rank of part `part` of `interval`.

    The rows of the whole tensor are divided, so that the parts do not depend on the grid.
    """
    cuts = even_share(param.logical_shape[0], rank=part, ranks=interval)
    width = math.prod(param.local_shape[1:])
    start, stop = (_rows_below(row, param.tp_shard) * width for row in cuts)
    return start, stop


def _rows_below(row: int, shard: TensorShard | None) -> int:
    """Return the number of this rank's rows before row `row` of the whole tensor."""
    if shard is None or shard.axis != 0:
        return row
    block, within = divmod(row, shard.block)
    length = shard.stop - shard.start
    return block * length + min(max(within - shard.start, 0), length)


def _entries(rank: RankShapes, bucket: BucketPlan, part: int, interval: int) -> int:
    """Return the number of entries of a part of all parameters of a bucket."""
    parts = [part_of(rank.params[name], part, interval) for name in bucket.slices]
    return sum(stop - start for start, stop in parts)


@dataclass
class _RoundRobinWork(CompressedWork):
    under_way: Work
    index: SparseIndex
    steps: int
    entries: int

    def wait(self) -> ReducedGrad:
        import torch

        reduced = self.under_way.wait()
        counts = None
        if self.steps > 1:
            counts = torch.full_like(reduced.values, self.steps, dtype=torch.float32)
        return dataclasses.replace(
            reduced, index=self.index, unselected="frozen", steps_accumulated=counts
        )

    def drop(self) -> None:
        self.under_way.drop()


class RoundRobinReducer(FeedbackReducer):
    """Reducer that averages one of `interval` parts of each matrix in each step, in turns.

    Values are sent in the gradient's dtype; the rounding error stays in the residual. At interval 1
    everything is sent as on the dense path.
    """

    name = "roundrobin"

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        exchange: Exchange,
        *,
        interval: int,
        start_iter: int = 0,
        model_shard: ModelShard | None = None,
    ) -> None:
        super().__init__(infos, exchange, start_iter=start_iter, model_shard=model_shard)
        self.interval = interval
        self.waited = [0] * interval
        self._indexes: dict[int, BucketIndex] = {}
        self._part: int | None = None

    @property
    def sends_all_by(self) -> str:
        return "--roundrobin-interval 1" if self.interval == 1 else ""

    def plan(self, bucket: GradBucket) -> Sequence[str]:
        if self.sends_all_by:
            return ()
        device = bucket.grad.device
        self._indexes[bucket.index] = new_index(bucket.numel, device, bits=device.type != "cpu")
        return bucket.names

    def compress(self, bucket: GradBucket, step: StepContext) -> CompressedWork:
        self._part = part = step.t % self.interval
        parts = {name: part_of(self.infos[name], part, self.interval) for name in bucket.slices}
        places = [
            (where.start + start, where.start + stop)
            for where, (start, stop) in zip(bucket.slices.values(), parts.values(), strict=True)
        ]
        values = bucket.grad.new_empty(sum(stop - start for start, stop in places))
        at = 0
        for name, (start, stop) in parts.items():
            offered = self.offer(bucket, name, step)[start:stop]
            sent = values[at : at + stop - start].copy_(offered * step.loss_scale)
            offered.sub_(sent.float(), alpha=1.0 / step.loss_scale)
            at += stop - start
        index = self._indexes[bucket.index].flushed([each for each in places if each[0] < each[1]])
        work = self._dense.reduce(dataclasses.replace(bucket, grad=values), step)
        return _RoundRobinWork(work, index, self.waited[part] + 1, values.numel())

    def commit(self, bucket: GradBucket, update: torch.Tensor | None) -> None:
        super().commit(bucket, update)
        if self._part is not None:  # once in a step, for all buckets
            self.waited = [steps + 1 for steps in self.waited]
            self.waited[self._part] = 0
            self._part = None

    def abort(self, bucket: GradBucket) -> None:
        super().abort(bucket)
        self._part = None

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor | PerEntryState]]:
        import torch

        if self.began:
            yield WAITED, torch.tensor(self.waited)

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        super().load_state_tensors(own, shared)
        if WAITED in shared:
            self.waited = shared[WAITED].tolist()
