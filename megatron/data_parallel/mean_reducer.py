"""The choice of the reducer of a path that averages whole buckets: dense and samo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.node_reducer import NodeReducer
from megatron.data_parallel.reduce_scatter import (
    ReduceScatterReducer,
    entries_on_rank,
    sums_gradients,
)

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.parallel.groups import ProcessGroups


def mean_reducer(
    config: Config, infos: Sequence[ParamInfo], exchange: Exchange, groups: ProcessGroups
) -> AllReduceReducer:
    """Return the reducer of a path that averages whole buckets.

    Args:
        config: The configuration.
        infos: The parameters of this rank.
        exchange: The collectives over data-parallel ranks.
        groups: The process groups of the grid, which may divide the data-parallel ranks by node.
    """
    divides = not sums_gradients(config)
    if groups.shard_copies.size > 1:
        between = AllReduceReducer(Exchange(groups.shard_copies), divides)
        return NodeReducer(Exchange(groups.shards), between, divides)
    feedback = entries_on_rank(infos) if config.gradient.keeps_rounding else None
    if config.parallel.use_distributed_optimizer and exchange.ranks > 1:
        return ReduceScatterReducer(exchange, divides, feedback=feedback)
    most = config.offload.chunk if config.offload.optimizer_cpu_offload else None
    return AllReduceReducer(exchange, divides, most, feedback)
