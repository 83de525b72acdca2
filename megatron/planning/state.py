"""Bytes of model and path state on a rank, by kind, as they lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.data_parallel.bucket_plan import RankShapes, shard_length
from megatron.data_parallel.path import BYTES
from megatron.optimizer.chunks import CPU_CHUNK, CUDA_CHUNK, SETS, offload_piece
from megatron.planning.layout import Grid

CHUNK = {"cpu": CPU_CHUNK, "cuda": CUDA_CHUNK}
"""Entries that the optimizer takes at a time at most."""


@dataclass(frozen=True)
class StateBytes:
    """`kept` from step to step, `passing` while a step is under way, on the device; on the `host`
    where the optimizer is offloaded."""

    kept: Mapping[str, int]
    passing: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def total(self) -> int:
        """On the device."""
        return sum(self.kept.values()) + sum(self.passing.values())


def state_bytes(grid: Grid, rank: RankShapes) -> StateBytes:
    """Model state and the gradient path's of a rank."""
    config = grid.config
    own = grid.path.plan_bytes(config, rank)
    grad, param = BYTES[config.precision.grad_dtype], BYTES[config.precision.param_dtype]
    moments = config.optimizer.num_moments
    sharded = config.parallel.use_distributed_optimizer and rank.ranks > 1
    shards = [
        shard_length(bucket.numel, rank.ranks) if sharded else bucket.numel
        for bucket in rank.buckets
    ]
    held = sum(bucket.numel for bucket in rank.buckets)
    kept = {
        "parameters": _parameters(rank, param, views=param == 4 and not sharded),
        "gradients": grad * (rank.ranks * sum(shards) if sharded else held),
    }
    states = {"master": 4 * sum(shards), "moments": 4 * moments * sum(shards)}
    chunk, host = CHUNK[rank.device], dict[str, int]()
    if config.offload.optimizer_cpu_offload:
        chunk = min(chunk, offload_piece(config.offload.offload_bucket_size))
        host = states
        states = {"offload buckets": SETS * 4 * (1 + moments) * min(chunk, max(shards))}
    scratch = {"scratch": 4 * min(chunk, max(shards))}
    return StateBytes(kept | states | dict(own.kept) | scratch, own.passing, host)


def _parameters(rank: RankShapes, each: int, *, views: bool) -> int:
    """`views`: parameters that are stored whole are views of their master weights."""
    return sum(
        each * param.numel
        for name, param in rank.params.items()
        if not (views and name not in rank.stored)
    )
