"""The assignment of parameters to flat buckets, and a rank's planned memory and traffic.

Imports no torch, so that the planner can share it. Bucketing is one pure function of names, sizes
and classes for every gradient path: ranks with equal plans issue equal collectives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron.data_parallel.bucket import ALIGNMENT, STATE_BLOCK, Slice
from megatron.data_parallel.wire_format import (
    block_of,
    chunk_length,
    format_of,
    mean_bytes,
    padded_count,
    part_bytes,
)
from megatron.parallel.tensor_shard import TensorShard

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.data_parallel.bucket import ParamInfo
    from megatron.data_parallel.layout import BucketLayout


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per entry, by the name of the dtype."""

LEAST_BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_RANK = 1_000_000
"""Megatron's default bucket size is the larger of these two.

Each rank's share of a bucket is then long enough for the network to reach its bandwidth.
"""


class BucketClass(NamedTuple):
    """The properties that all parameters of a bucket share; `dtype` is a torch dtype or its name.

    1-D parameters have their own buckets, so that sparse paths keep them dense on any grid
    (contract 5).
    """

    matrix: bool
    tp_sharded: bool
    partial: bool
    tied: bool
    weight_decay: bool
    dtype: object


class PlannedParam(NamedTuple):
    """A parameter to assign to a bucket: `numel` of its `entries` on this rank are stored."""

    name: str
    numel: int
    entries: int
    kind: BucketClass


@dataclass(frozen=True)
class BucketPlan:
    """The planned slices of one bucket; `numel` includes the gaps that align the slices."""

    kind: BucketClass
    slices: dict[str, Slice]
    numel: int


def bucket_elements(config: Config, data_parallel_size: int) -> int:
    """Return the entries of a gradient bucket: `--ddp-bucket-size`, else Megatron's default.

    With an offloaded optimizer it is AxoNN's k x bsize (`OffloadConfig.chunk`).
    """
    if config.offload.optimizer_cpu_offload:
        return config.offload.chunk
    default = max(LEAST_BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * data_parallel_size)
    return config.parallel.ddp_bucket_size or default


def slice_alignment(config: Config) -> int:
    """Return the multiple of entries at which the slices and shards of a run begin."""
    if config.optimizer.has_state_blocks:
        return STATE_BLOCK
    # Parameters that share a block would share its scale.
    wire = config.gradient.grad_wire
    return ALIGNMENT if wire is None else max(ALIGNMENT, block_of(wire))


def plan_buckets(
    entries: Iterable[PlannedParam], *, cap: int, alignment: int = ALIGNMENT
) -> list[BucketPlan]:
    """Assign parameters, given in order of gradient arrival, to buckets of at most `cap` entries.

    The cap counts entries that are not stored, too, so that a pruned network overlaps like a dense
    one. A parameter larger than the cap and a tied embedding get buckets of their own. Buckets are
    in the order of their last gradient. Partial buckets, which other groups reduce first after the
    end of backward, come last, and tied buckets after those (contract 8). Slices begin at multiples
    of `alignment`.
    """
    open_buckets: dict[BucketClass, list[PlannedParam]] = {}
    lengths: dict[BucketClass, int] = {}
    closed: list[tuple[int, list[PlannedParam]]] = []
    last_arrival: dict[BucketClass, int] = {}
    for position, entry in enumerate(entries):
        bucket = open_buckets.setdefault(entry.kind, [])
        length = lengths.get(entry.kind, 0) + _aligned(entry.entries, alignment)
        if bucket and (entry.kind.tied or length > cap):
            closed.append((last_arrival[entry.kind], bucket))
            bucket = open_buckets[entry.kind] = []
            length = _aligned(entry.entries, alignment)
        bucket.append(entry)
        lengths[entry.kind] = length
        last_arrival[entry.kind] = position
    closed += [(last_arrival[kind], bucket) for kind, bucket in open_buckets.items()]
    closed.sort(key=lambda item: (item[1][0].kind.tied, item[1][0].kind.partial, item[0]))
    return [_lay_out(bucket, alignment) for _, bucket in closed]


def entries_of(infos: Sequence[ParamInfo], layout: BucketLayout) -> list[PlannedParam]:
    """Return the parameters for `plan_buckets` in order of gradient arrival, last layer first."""
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
    """Return a hex digest of bucketing and layout, to compare over a data-parallel group."""
    text = [
        [str(plan.kind), {name: [s.start, s.numel] for name, s in plan.slices.items()}]
        for plan in plans
    ]
    return hashlib.sha256(json.dumps([text, layout.fingerprint()]).encode()).hexdigest()


def shard_length(numel: int, ranks: int, alignment: int = ALIGNMENT) -> int:
    """Return the aligned number of bucket positions that each of `ranks` ranks keeps."""
    return -(-numel // (ranks * alignment)) * alignment


def main_bytes(config: Config, numel: int, *, matrix: bool) -> int:
    """Return the bytes of the main parameters of `numel` entries, of matrices or vectors."""
    options = config.optimizer
    if not matrix or options.main_params_dtype == "fp32":
        return 4 * numel
    return (4 if options.main_params_rounding == "kahan" else 2) * numel


def moment_bytes(config: Config, numel: int, *, matrix: bool) -> int:
    """Return the bytes of the moments of `numel` entries, with their scales."""
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
    dtypes = config.optimizer.moment_dtypes if matrix else ("fp32",) * config.optimizer.num_moments
    scaled = sum(dtype in ("fp16", "int8") for dtype in dtypes)
    return numel * sum(sizes[each] for each in dtypes) + 4 * scaled * -(-numel // STATE_BLOCK)


def ring_all_reduce_bytes(payload: int, ranks: int) -> int:
    """Return the bytes that a rank sends in a ring all-reduce (Eq. 3 of Radius, bandwidth term)."""
    return 2 * (ranks - 1) * payload // ranks


def _aligned(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment


def _lay_out(bucket: list[PlannedParam], alignment: int) -> BucketPlan:
    slices: dict[str, Slice] = {}
    start = 0
    for entry in bucket:
        slices[entry.name] = Slice(start, entry.numel)
        start += _aligned(entry.numel, alignment)
    return BucketPlan(kind=bucket[0].kind, slices=slices, numel=start)


# ---- planned ranks ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ParamShape:
    """The planned counterpart of `ParamInfo`; `rows` is the padded length of the first axis."""

    name: str
    logical_shape: tuple[int, ...]
    rows: int
    tp_shard: TensorShard | None = None
    partial: bool = False
    tied: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part on this rank, without padding."""
        return self.logical_shape if self.tp_shard is None else self.tp_shard.local_shape

    @property
    def local_entries(self) -> int:
        """Number of entries on this rank, without padding."""
        return math.prod(self.local_shape)

    @cached_property
    def numel(self) -> int:
        """Number of entries in this rank's memory, including padding."""
        return self.rows * math.prod(self.local_shape[1:])

    @property
    def is_matrix(self) -> bool:
        """True if the parameter has several axes, so that it decays and may be sparse."""
        return len(self.logical_shape) > 1

    def share(self, count: int) -> int:
        """Return this rank's share of `count` evenly spread entries of the whole tensor."""
        if self.tp_shard is None:
            return count
        return (
            count * self.tp_shard.stop // self.tp_shard.block
            - count * self.tp_shard.start // self.tp_shard.block
        )

    def entry(self, stored: int, dtype: object) -> PlannedParam:
        """Return the input of `plan_buckets` if `stored` entries of the parameter are stored."""
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
    """The parameters, in forward order, and the buckets that a planned rank would hold.

    `ranks` and `tp` count data-parallel and tensor-parallel ranks. `stored` has the number of
    stored entries of whole tensors, for parameters that a path stores partly.
    """

    params: Mapping[str, ParamShape]
    buckets: Sequence[BucketPlan]
    ranks: int
    tp: int = 1
    device: str = "cpu"
    stored: Mapping[str, int] = field(default_factory=dict[str, int])

    def total(self, name: str) -> int:
        """Return the number of stored entries of the whole tensor."""
        return self.stored.get(name, math.prod(self.params[name].logical_shape))


@dataclass(frozen=True)
class PathBytes:
    """The size in bytes of a path's own state, without gradients, master weights and moments.

    On a rank, by kind: `kept` persists between steps, `passing` exists only during a step. Upper
    bounds for a checkpoint: `shared` by all data-parallel ranks, `own` for each of them.
    """

    kept: Mapping[str, int] = field(default_factory=dict[str, int])
    passing: Mapping[str, int] = field(default_factory=dict[str, int])
    shared: int = 0
    own: int = 0


class PlannedCollective(NamedTuple):
    """A collective over data-parallel ranks; for an all-gather `nbytes` is this rank's part only.

    `piece` numbers the concurrent pieces of `bucket`; collectives of one piece run in sequence.
    `ranks` take part, consecutive ones if `inner`; None: all data-parallel ranks.
    """

    kind: Literal["all-reduce", "reduce-scatter", "all-gather"]
    nbytes: int
    bucket: int
    piece: int = 0
    ranks: int | None = None
    inner: bool = False

    def bytes_sent(self, ranks: int) -> int:
        """Return the bytes that a rank sends by the ring model, as a run counts them."""
        ranks = self.ranks or ranks
        if ranks == 1:
            return 0
        if self.kind == "all-reduce":
            return ring_all_reduce_bytes(self.nbytes, ranks)
        return (ranks - 1) * (self.nbytes if self.kind == "all-gather" else self.nbytes // ranks)


@dataclass(frozen=True)
class StepTraffic:
    """The name, the number and the collectives of steps with equal traffic.

    Every bucket has a collective, of 0 bytes if nothing is sent. `overlaps`: collectives may begin
    during backward.
    """

    name: str
    steps: int
    sent: Sequence[PlannedCollective]
    overlaps: bool = True

    def bytes_sent(self, ranks: int) -> int:
        """Return the bytes that this rank sends to its data-parallel group in one step."""
        return sum(each.bytes_sent(ranks) for each in self.sent)


def mean_traffic(
    rank: RankShapes,
    *,
    steps: int,
    grad_bytes: int,
    param_bytes: int,
    sharded: bool,
    inner: int | None = None,
    most: int | None = None,
    wire: str | None = None,
    alignment: int = ALIGNMENT,
) -> list[StepTraffic]:
    """Return the traffic of a path that averages whole buckets.

    `sharded`: optimizer states are sharded, so parameters are gathered, over `inner` ranks, or over
    all for None; each shard is then averaged between the inner groups. `most` is the maximum
    number of entries per all-reduce; None means no limit. `wire` is the value of `--grad-wire`.
    Shards begin at multiples of `alignment`.
    """
    sent: list[PlannedCollective] = []
    for number, bucket in enumerate(rank.buckets):
        each = partial(payload, bucket, ranks=rank.ranks, grad_bytes=grad_bytes, wire=wire)
        if sharded and rank.ranks > 1:
            shards = inner or rank.ranks
            own = shard_length(bucket.numel, shards, alignment)
            among = partial(PlannedCollective, bucket=number, ranks=inner, inner=inner is not None)
            # gloo has no reduce-scatter, so there a bucket without a wire is all-reduced.
            sent.append(
                among("reduce-scatter", shards * part_payload(bucket, own, grad_bytes, wire))
                if rank.device == "cuda" or wire is not None
                else among("all-reduce", each(bucket.numel))
            )
            if inner is not None:
                outer = rank.ranks // inner
                sent.append(PlannedCollective("all-reduce", grad_bytes * own, number, ranks=outer))
            sent.append(among("all-gather", param_bytes * own))
        else:
            longest = most or max(bucket.numel, 1)
            for piece, start in enumerate(range(0, bucket.numel, longest)):
                entries = min(longest, bucket.numel - start)
                sent.append(PlannedCollective("all-reduce", each(entries), number, piece))
    return [StepTraffic("every step", steps, sent)]


def plan_wire(config: Config, rank: RankShapes) -> PathBytes:
    """Return the bytes of an encoded wire, and what the reducer keeps of rounding.

    The means of all buckets may be in progress at the same time. Each holds a bucket's encoded
    values twice, as sent and as received, in padded chunks, or in padded shards if those are
    longer. Chunks in fp32 exist only while values are encoded or decoded. On a GPU, where one
    stream handles the buckets in turn, they are a mean and the chunk that is added to it. On a CPU
    there is a third, since a backward hook encodes another bucket at the same time.
    """
    wire = config.gradient.grad_wire
    if wire is None or rank.ranks == 1:
        return PathBytes()
    encoded = longest = 0
    for bucket in filter(lambda bucket: bucket.numel, rank.buckets):
        form = format_of(wire, matrix=bucket.kind.matrix)
        chunk = chunk_length(form, bucket.numel, rank.ranks)
        if config.parallel.use_distributed_optimizer:
            own = shard_length(bucket.numel, rank.ranks, slice_alignment(config))
            chunk = max(chunk, padded_count(form, own))
        encoded += rank.ranks * part_bytes(form, chunk)
        longest = max(longest, chunk)
    decoded = (3 if rank.device == "cpu" else 2) * 4 * longest
    passing = {"encoded values": 2 * encoded, "decoded values": decoded}
    return dataclasses.replace(plan_rounding(config, rank), passing=passing)


def plan_rounding(config: Config, rank: RankShapes) -> PathBytes:
    """Return the bytes that keep what an encoded wire rounds off matrices.

    They take two buffers of a bucket's length, one of which a dropped step leaves unchanged.
    """
    if not config.gradient.keeps_rounding:
        return PathBytes()
    entries = sum(bucket.numel for bucket in rank.buckets if bucket.kind.matrix)
    return PathBytes(kept={"wire feedback": 2 * 4 * entries}, own=4 * entries)


def payload(
    bucket: BucketPlan, entries: int, *, ranks: int, grad_bytes: int, wire: str | None
) -> int:
    """Return the bytes that an all-reduce of `entries` values of a bucket carries.

    An encoded mean (`wire`) sends as many bytes as an all-reduce of its encoded chunks.
    """
    if wire is None or not entries:
        return grad_bytes * entries
    return mean_bytes(format_of(wire, matrix=bucket.kind.matrix), entries, ranks)


def part_payload(bucket: BucketPlan, entries: int, grad_bytes: int, wire: str | None) -> int:
    """Return the bytes of a shard of `entries` values of a bucket in a reduce-scatter."""
    if wire is None or not entries:
        return grad_bytes * entries
    return part_bytes(format_of(wire, matrix=bucket.kind.matrix), entries)


def plan_means(config: Config, rank: RankShapes) -> list[StepTraffic]:
    """Return the traffic of a path whose reducer is `mean_reducer.mean_reducer`."""
    return mean_traffic(
        rank,
        steps=config.total_iterations(),
        grad_bytes=BYTES[config.precision.grad_dtype],
        param_bytes=BYTES[config.precision.param_dtype],
        sharded=config.parallel.num_shards(rank.ranks) > 1,
        inner=config.parallel.dp_inner_size if config.parallel.dp_inner_size > 1 else None,
        most=config.offload.chunk if config.offload.optimizer_cpu_offload else None,
        wire=config.gradient.grad_wire,
        alignment=slice_alignment(config),
    )
