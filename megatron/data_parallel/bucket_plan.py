"""Which parameters share a flat bucket, and what a rank keeps and sends of them. Loads no torch, so
that the planner counts with the functions that a run allocates by.

Bucketing is one pure function for every gradient path, of names, sizes and classes alone: ranks
that plan alike send alike.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron.data_parallel.bucket import ALIGNMENT, Slice
from megatron.parallel.tensor_shard import TensorShard

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.data_parallel.bucket import ParamInfo
    from megatron.data_parallel.layout import BucketLayout


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of an entry, by the name of its dtype."""


class BucketClass(NamedTuple):
    """What all parameters of a bucket have in common. 1-D parameters keep to themselves, so that
    sparse paths can leave them dense whatever the grid (contract 5). `dtype`: of the parameters,
    torch's or its name."""

    matrix: bool
    tp_sharded: bool
    partial: bool
    tied: bool
    weight_decay: bool
    dtype: object


class PlannedParam(NamedTuple):
    """A parameter as the planner sees it: `numel` of its `entries` are stored; of a class."""

    name: str
    numel: int
    entries: int
    kind: BucketClass


@dataclass(frozen=True)
class BucketPlan:
    """Slices of one bucket to be; `numel` includes the gaps that align each slice."""

    kind: BucketClass
    slices: dict[str, Slice]
    numel: int


def plan_buckets(entries: Iterable[PlannedParam], *, cap: int) -> list[BucketPlan]:
    """Cut parameters, given in order of arrival, into buckets of at most `cap` entries, stored or
    not: a pruned network sends the same parameters together as a dense one, and overlaps as much.

    A parameter larger than the cap has a bucket of its own; so has a tied embedding. Buckets come
    in the order in which their last gradient arrives, but those that are summed over other groups
    first, which waits for the end of backward, come last, and tied ones very last (contract 8).
    """
    open_buckets: dict[BucketClass, list[PlannedParam]] = {}
    lengths: dict[BucketClass, int] = {}
    closed: list[tuple[int, list[PlannedParam]]] = []
    last_arrival: dict[BucketClass, int] = {}
    for position, entry in enumerate(entries):
        bucket = open_buckets.setdefault(entry.kind, [])
        length = lengths.get(entry.kind, 0) + _aligned(entry.entries)
        if bucket and (entry.kind.tied or length > cap):
            closed.append((last_arrival[entry.kind], bucket))
            bucket = open_buckets[entry.kind] = []
            length = _aligned(entry.entries)
        bucket.append(entry)
        lengths[entry.kind] = length
        last_arrival[entry.kind] = position
    closed += [(last_arrival[kind], bucket) for kind, bucket in open_buckets.items()]
    closed.sort(key=lambda item: (item[1][0].kind.tied, item[1][0].kind.partial, item[0]))
    return [_lay_out(bucket) for _, bucket in closed]


def entries_of(infos: Sequence[ParamInfo], layout: BucketLayout) -> list[PlannedParam]:
    """What to plan for, in the order in which backward makes the gradients: last layer first."""
    return [
        PlannedParam(
            info.name,
            layout.numel(info.name, info.param),
            info.param.numel(),
            BucketClass(
                matrix=info.param.dim() > 1,
                tp_sharded=info.tp_sharded,
                partial=info.partial,
                tied=info.tied,
                weight_decay=info.weight_decay,
                dtype=info.param.dtype,
            ),
        )
        for info in reversed(infos)
    ]


def fingerprint(plans: Sequence[BucketPlan], layout: BucketLayout) -> str:
    """Hex digest of bucketing and layout, compared over each data-parallel group at start."""
    text = [
        [str(plan.kind), {name: [s.start, s.numel] for name, s in plan.slices.items()}]
        for plan in plans
    ]
    return hashlib.sha256(json.dumps([text, layout.fingerprint()]).encode()).hexdigest()


def shard_length(numel: int, ranks: int) -> int:
    """Positions of a bucket that each of `ranks` keeps: as few as are aligned."""
    return -(-numel // (ranks * ALIGNMENT)) * ALIGNMENT


def ring_all_reduce_bytes(payload: int, ranks: int) -> int:
    """Bytes one rank sends in a ring all-reduce of `payload` bytes: 2 (n - 1) / n of them
    (Eq. 3 of the Radius paper, its bandwidth term)."""
    return 2 * (ranks - 1) * payload // ranks


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _lay_out(bucket: list[PlannedParam]) -> BucketPlan:
    slices: dict[str, Slice] = {}
    start = 0
    for entry in bucket:
        slices[entry.name] = Slice(start, entry.numel)
        start += _aligned(entry.numel)
    return BucketPlan(kind=bucket[0].kind, slices=slices, numel=start)


# ---- a rank that is planned ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ParamShape:
    """A logical parameter as a rank would hold it: what `ParamInfo` says of one that is there.
    `rows`: of its first axis in memory, vocabulary padding included."""

    name: str
    logical_shape: tuple[int, ...]
    rows: int
    tp_shard: TensorShard | None = None
    partial: bool = False
    tied: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what is on this rank, without padding."""
        return self.logical_shape if self.tp_shard is None else self.tp_shard.local_shape

    @property
    def local_entries(self) -> int:
        """Number of entries on this rank, without padding."""
        return math.prod(self.local_shape)

    @cached_property
    def numel(self) -> int:
        """Number of entries in this rank's memory."""
        return self.rows * math.prod(self.local_shape[1:])

    @property
    def is_matrix(self) -> bool:
        """Whether it has several axes, and so decays and may be sent or stored in part."""
        return len(self.logical_shape) > 1

    def share(self, count: int) -> int:
        """Of so many entries chosen from the whole tensor those on this rank, if they are spread
        evenly; over the tensor-parallel ranks the shares add up."""
        if self.tp_shard is None:
            return count
        return (
            count * self.tp_shard.stop // self.tp_shard.block
            - count * self.tp_shard.start // self.tp_shard.block
        )

    def entry(self, stored: int, dtype: object) -> PlannedParam:
        """For `plan_buckets`, if so many of its entries are stored."""
        kind = BucketClass(
            matrix=self.is_matrix,
            tp_sharded=self.tp_shard is not None,
            partial=self.partial,
            tied=self.tied,
            weight_decay=self.is_matrix,
            dtype=dtype,
        )
        return PlannedParam(self.name, stored, self.numel, kind)


@dataclass(frozen=True, kw_only=True)
class RankShapes:
    """What a rank would hold: its parameters by name, in the order of the forward pass, and the
    buckets of their stored entries. `ranks`: data-parallel ones; `tp`: tensor-parallel ones.
    `stored`: entries of whole tensors that exist, where a path stores them in part."""

    params: Mapping[str, ParamShape]
    buckets: Sequence[BucketPlan]
    ranks: int
    tp: int = 1
    device: str = "cpu"
    stored: Mapping[str, int] = field(default_factory=dict[str, int])

    def total(self, name: str) -> int:
        """Stored entries of the whole tensor."""
        return self.stored.get(name, math.prod(self.params[name].logical_shape))


@dataclass(frozen=True)
class PathBytes:
    """What a path keeps on a rank from step to step beside gradients, master weights and moments,
    in bytes by kind, and what is there only while a step is under way. In a checkpoint, at most:
    `shared` for all data-parallel ranks together, and `own` for each of them."""

    kept: Mapping[str, int] = field(default_factory=dict[str, int])
    passing: Mapping[str, int] = field(default_factory=dict[str, int])
    shared: int = 0
    own: int = 0


class PlannedCollective(NamedTuple):
    """A collective over data-parallel ranks: `nbytes` is what an all-reduce or a reduce-scatter
    goes over, of an all-gather this rank's own part. `bucket`: which one it is of; `piece`: of the
    pieces of a bucket, which leave together. A second one of a piece waits for the first."""

    kind: Literal["all-reduce", "reduce-scatter", "all-gather"]
    nbytes: int
    bucket: int
    piece: int = 0

    def bytes_sent(self, ranks: int) -> int:
        """By the ring model, as a run counts it."""
        if ranks == 1:
            return 0
        if self.kind == "all-reduce":
            return ring_all_reduce_bytes(self.nbytes, ranks)
        return (ranks - 1) * (self.nbytes if self.kind == "all-gather" else self.nbytes // ranks)


@dataclass(frozen=True)
class StepTraffic:
    """Steps of a run that send alike: what they are called, how many there are, what each sends."""

    name: str
    steps: int
    sent: Sequence[PlannedCollective]

    def bytes_sent(self, ranks: int) -> int:
        """On the data-parallel group by this rank in one of these steps."""
        return sum(each.bytes_sent(ranks) for each in self.sent)


def mean_traffic(
    rank: RankShapes,
    *,
    steps: int,
    grad_bytes: int,
    param_bytes: int,
    sharded: bool,
    most: int | None = None,
) -> list[StepTraffic]:
    """Of a path that takes plain means of whole buckets, as `sharded.mean_reducer` does. `most`:
    entries of an all-reduce (None: of any number)."""
    sent: list[PlannedCollective] = []
    for number, bucket in enumerate(rank.buckets):
        nbytes = grad_bytes * bucket.numel
        if sharded and rank.ranks > 1:
            own = shard_length(bucket.numel, rank.ranks)
            scattered = PlannedCollective("reduce-scatter", grad_bytes * own * rank.ranks, number)
            # gloo has none: there the whole bucket is all-reduced.
            sent.append(
                scattered
                if rank.device == "cuda"
                else PlannedCollective("all-reduce", nbytes, number)
            )
            sent.append(PlannedCollective("all-gather", param_bytes * own, number))
        else:
            longest = most or max(bucket.numel, 1)
            for piece, start in enumerate(range(0, bucket.numel, longest)):
                entries = min(longest, bucket.numel - start)
                sent.append(PlannedCollective("all-reduce", grad_bytes * entries, number, piece))
    return [StepTraffic("every step", steps, sent)]


def plan_means(config: Config, rank: RankShapes) -> list[StepTraffic]:
    """Traffic of a path whose reducer is `sharded.mean_reducer`'s."""
    return mean_traffic(
        rank,
        steps=config.total_iterations(),
        grad_bytes=BYTES[config.precision.grad_dtype],
        param_bytes=BYTES[config.precision.param_dtype],
        sharded=config.parallel.use_distributed_optimizer,
        most=config.offload.chunk if config.offload.optimizer_cpu_offload else None,
    )
