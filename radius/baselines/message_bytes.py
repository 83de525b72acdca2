"""Bytes that top-k and PowerSGD send and hold. Loads no torch."""

from __future__ import annotations

import math

from megatron.data_parallel.bucket_plan import (
    BucketPlan,
    ParamShape,
    PathBytes,
    PlannedCollective,
    RankShapes,
    StepTraffic,
)


def count(density: float, entries: int) -> int:
    """Return k = ceil(d n), the entries to send of n, so that top-k leaves no parameter out."""
    return math.ceil(density * entries)


def is_smaller(rows: int, columns: int, rank: int) -> bool:
    """Return whether factors of this rank have fewer entries than the matrix.

    If they have, the rank is also below both sides of the matrix.
    """
    return rank * (rows + columns) < rows * columns


RESIDUAL_BYTES = 8
"""Bytes of the residual per entry: the fp32 residual and the buffer of its next value."""
FACTOR_BYTES = 4


def powersgd_bytes(rank: RankShapes, *, rank_of_factors: int) -> PathBytes:
    """Return the bytes of PowerSGD's state, by kind.

    `warm start` is the Q of the last step; `factors`, which exist during a step, are P with the
    parameters that are sent whole, the basis of P, and Q.
    """
    residual = warm = passing = 0
    for bucket in matrices(rank):
        first, second, compressed = _factors(rank, bucket, rank_of_factors)
        if not compressed:
            continue
        entries = sum(param.local_entries for param in compressed)
        rows = sum(param.local_shape[0] for param in compressed)
        residual += RESIDUAL_BYTES * entries
        warm += FACTOR_BYTES * second
        passing += FACTOR_BYTES * (first + second + rank_of_factors * rows)
    kept = {"residual": residual, "warm start": warm}
    return PathBytes(kept, {"factors": passing}, warm, residual * 4 // RESIDUAL_BYTES)


def powersgd_traffic(
    rank: RankShapes, *, rank_of_factors: int, start: int, steps: int, value_bytes: int
) -> list[StepTraffic]:
    """Return the traffic: dense before step `start`, then two sums of factors per bucket."""
    dense, sparse = all_reduces(rank, value_bytes), list[PlannedCollective]()
    for number, bucket in enumerate(rank.buckets):
        first, second, compressed = _factors(rank, bucket, rank_of_factors)
        if bucket.kind.matrix and compressed:
            sparse.append(PlannedCollective("all-reduce", FACTOR_BYTES * first, number))
            sparse.append(PlannedCollective("all-reduce", FACTOR_BYTES * second, number))
        else:
            sparse.append(dense[number])
    return from_start(start, steps, dense, sparse)


def matrices(rank: RankShapes) -> list[BucketPlan]:
    """Return the buckets of matrices."""
    return [bucket for bucket in rank.buckets if bucket.kind.matrix]


def _factors(
    rank: RankShapes, bucket: BucketPlan, rank_of_factors: int
) -> tuple[int, int, list[ParamShape]]:
    """Return the entries of a bucket's first and second sum, and its compressed parameters."""
    first = second = 0
    compressed: list[ParamShape] = []
    for name, where in bucket.slices.items():
        param = rank.params[name]
        rows, columns = param.local_shape[0], math.prod(param.local_shape[1:])
        if _is_worth_it(param, rank, rank_of_factors):
            compressed.append(param)
            first += rank_of_factors * rows
            second += rank_of_factors * columns
        else:
            first += where.numel
    return first, second, compressed


def _is_worth_it(param: ParamShape, rank: RankShapes, rank_of_factors: int) -> bool:
    """Return whether `PowerSGDReducer` compresses a parameter: its smallest part decides."""
    least = list(param.local_shape)
    if param.tp_shard is not None:
        least[param.tp_shard.axis] = param.tp_shard.block // rank.tp * param.tp_shard.blocks
    return is_smaller(least[0], math.prod(least[1:]), rank_of_factors)


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
