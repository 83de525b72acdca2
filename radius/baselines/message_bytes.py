"""Bytes that the baselines send and hold. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.data_parallel.bucket_plan import (
    BucketPlan,
    ParamShape,
    PathBytes,
    PlannedCollective,
    RankShapes,
    StepTraffic,
)
from radius.index import num_selected


def count(density: float, entries: int) -> int:
    """Return k = ceil(d n), the entries to send of n, so that top-k leaves no parameter out.

    The density is taken as a decimal fraction: in floating point ceil(0.07 * 100) is 8.
    """
    return num_selected(Fraction(str(density)), entries)


def is_smaller(rows: int, columns: int, rank: int) -> bool:
    """Return whether factors of this rank have fewer entries than the matrix.

    If they have, the rank is also below both sides of the matrix.
    """
    return rank * (rows + columns) < rows * columns


@dataclass(frozen=True)
class FactorRank:
    """The rank of a matrix's two factors: `rank`, or `share` of the matrix's shorter side."""

    rank: int = 4
    share: float | None = None

    def of(self, shape: Sequence[int]) -> int:
        """Return the rank for a parameter of this logical shape, at least 1.

        The logical shape decides, so that parts on tensor-parallel ranks have the same rank.
        """
        if self.share is None:
            return self.rank
        return math.ceil(Fraction(str(self.share)) * min(shape[0], math.prod(shape[1:])))


RESIDUAL_BYTES = 8
"""Bytes of the residual per entry: the fp32 residual and the buffer of its next value."""
FACTOR_BYTES = 4
POSITION_BYTES = 4
"""Bytes of a position in a message, an int32."""
ALIGNED_BYTES = 4
"""Bytes of the widest number in a message."""


def message_bytes(entries: int, value_bytes: int, position_bytes: int = POSITION_BYTES) -> int:
    """Return the bytes of a message of positions and values.

    The message is padded so that the numbers of the next rank's message are aligned.
    """
    used = entries * (position_bytes + value_bytes)
    return -(-used // ALIGNED_BYTES) * ALIGNED_BYTES


def gathered_bytes(message: int, ranks: int) -> int:
    """Return the bytes that a rank holds of an all-gather: its message, and those of all ranks."""
    return message * (1 + ranks * (ranks > 1))


def gathered_plan(rank: RankShapes, message: Callable[[BucketPlan], int] | None) -> PathBytes:
    """Return the bytes of residuals, and of the messages of this rank and all ranks.

    `message` returns the bytes of a rank's message for a bucket of matrices; None: everything is
    sent, and there are none.
    """
    if message is None:
        return PathBytes({"residual": 0}, {"messages": 0})
    residual = messages = 0
    for bucket in matrices(rank):
        residual += RESIDUAL_BYTES * sum(rank.params[n].local_entries for n in bucket.slices)
        messages += gathered_bytes(message(bucket), rank.ranks)
    own = residual * 4 // RESIDUAL_BYTES
    return PathBytes({"residual": residual}, {"messages": messages}, own=own)


def gathered_traffic(
    rank: RankShapes,
    message: Callable[[BucketPlan], int] | None,
    *,
    start: int,
    steps: int,
    value_bytes: int,
) -> list[StepTraffic]:
    """Return the traffic: dense before step `start`, then a message to every rank per bucket.

    `message` is that of `gathered_plan`. 1-D parameters are always averaged.
    """
    sparse = dense = all_reduces(rank, value_bytes)
    if message is not None:
        sparse = [
            PlannedCollective("all-gather", message(bucket), number)
            if bucket.kind.matrix
            else dense[number]
            for number, bucket in enumerate(rank.buckets)
        ]
    return from_start(start, steps, dense, sparse)


def powersgd_bytes(rank: RankShapes, *, factors: FactorRank) -> PathBytes:
    """Return the bytes of PowerSGD's state, by kind.

    `warm start` is the Q of the last step; `factors`, which exist during a step, are P with the
    parameters that are sent whole, the basis of P, and Q.
    """
    residual = warm = passing = 0
    for bucket in matrices(rank):
        first, second, compressed = factors_of(rank, bucket, factors)
        if not compressed:
            continue
        entries = sum(param.local_entries for param in compressed)
        basis = sum(factors.of(p.logical_shape) * p.local_shape[0] for p in compressed)
        residual += RESIDUAL_BYTES * entries
        warm += FACTOR_BYTES * second
        passing += FACTOR_BYTES * (first + second + basis)
    kept = {"residual": residual, "warm start": warm}
    return PathBytes(kept, {"factors": passing}, warm, residual * 4 // RESIDUAL_BYTES)


def powersgd_traffic(
    rank: RankShapes,
    *,
    factors: FactorRank,
    start: int,
    steps: int,
    value_bytes: int,
    density: float = 0.0,
) -> list[StepTraffic]:
    """Return the traffic: dense before step `start`, then two sums of factors per bucket.

    With a `density`, every rank also sends that share of its largest remaining entries.
    """
    dense, sparse = all_reduces(rank, value_bytes), list[PlannedCollective]()
    for number, bucket in enumerate(rank.buckets):
        first, second, compressed = factors_of(rank, bucket, factors)
        if not (bucket.kind.matrix and compressed):
            sparse.append(dense[number])
            continue
        sparse.append(PlannedCollective("all-reduce", FACTOR_BYTES * first, number))
        sparse.append(PlannedCollective("all-reduce", FACTOR_BYTES * second, number))
        if density:
            message = entries_message(compressed, density, value_bytes)
            sparse.append(PlannedCollective("all-gather", message, number))
    return from_start(start, steps, dense, sparse)


def entries_message(params: Sequence[ParamShape], density: float, value_bytes: int) -> int:
    """Return the bytes of a rank's message with its largest entries of these parameters."""
    entries = sum(count(density, param.local_entries) for param in params)
    return message_bytes(entries, value_bytes)


def matrices(rank: RankShapes) -> list[BucketPlan]:
    """Return the buckets of matrices."""
    return [bucket for bucket in rank.buckets if bucket.kind.matrix]


def factors_of(
    rank: RankShapes, bucket: BucketPlan, factors: FactorRank
) -> tuple[int, int, list[ParamShape]]:
    """Return the entries of a bucket's first and second sum, and its compressed parameters."""
    first = second = 0
    compressed: list[ParamShape] = []
    for name, where in bucket.slices.items():
        param = rank.params[name]
        rows, columns = param.local_shape[0], math.prod(param.local_shape[1:])
        if _is_worth_it(param, rank, factors):
            compressed.append(param)
            first += factors.of(param.logical_shape) * rows
            second += factors.of(param.logical_shape) * columns
        else:
            first += where.numel
    return first, second, compressed


def _is_worth_it(param: ParamShape, rank: RankShapes, factors: FactorRank) -> bool:
    """Return whether `PowerSGDReducer` compresses a parameter: its smallest part decides."""
    least = list(param.local_shape)
    if param.tp_shard is not None:
        least[param.tp_shard.axis] = param.tp_shard.block // rank.tp * param.tp_shard.blocks
    return is_smaller(least[0], math.prod(least[1:]), factors.of(param.logical_shape))


def all_reduces(rank: RankShapes, value_bytes: int) -> list[PlannedCollective]:
    """Return one all-reduce for each bucket."""
    return [
        PlannedCollective("all-reduce", value_bytes * bucket.numel, number)
        for number, bucket in enumerate(rank.buckets)
    ]


def from_start(
    start: int, steps: int, dense: list[PlannedCollective], sparse: list[PlannedCollective]
) -> list[StepTraffic]:
    """Return `steps` steps, dense ones before step `start` and compressed ones from it on."""
    before = min(max(start - 1, 0), steps)
    found = [StepTraffic("dense, at the start", before, dense)] if before else []
    return [*found, StepTraffic("compressed", steps - before, sparse)]
