"""Ranks of a plan, out of shapes alone."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.data_parallel.bucket import ALIGNMENT
from megatron.data_parallel.bucket_plan import ParamShape, RankShapes, plan_buckets


def rank_of(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    ranks: int = 1,
    device: str = "cpu",
    alignment: int = ALIGNMENT,
) -> RankShapes:
    """One rank that holds parameters of these shapes whole."""
    params = {
        name: ParamShape(name=name, logical_shape=shape, rows=shape[0])
        for name, shape in shapes.items()
    }
    entries = [param.entry(param.numel, "float32") for param in params.values()]
    buckets = plan_buckets(reversed(entries), cap=10**9, alignment=alignment)
    return RankShapes(params=params, buckets=buckets, ranks=ranks, device=device)
