"""Tensor-parallel ranks find their entries in shared tensors, and refuse unequal buckets."""

from __future__ import annotations

import torch
from torch import nn

from megatron.data_parallel.bucket import ParamInfo
from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from megatron.parallel.tensor_shard import ModelShard, TensorShard
from radius.places import find_places
from tests.ranks import Ranks, grid

NAMES = ("a", "b", "c")
TOGETHER = [["a", "b"], ["c"]]
APART = [["a"], ["b", "c"]]


def on_rank_places(groups: ProcessGroups, cuts: list[list[list[str]]]) -> str | list[int]:
    """Return the error for the buckets of this rank, or where its entries begin."""
    both = grid(groups, tp=2)
    shard = TensorShard.evenly((4, 6), axis=0, rank=both.tp.rank, ranks=2)
    infos = [
        ParamInfo(
            name=name,
            leaves=(nn.Parameter(torch.zeros(2, 6)),),
            logical_shape=(4, 6),
            tp_shard=shard,
        )
        for name in NAMES
    ]
    stored = {info.name: info.param.numel() for info in infos}
    try:
        found = find_places(ModelShard(infos, both), stored, cuts[both.tp.rank], None)
    except ConfigError as error:
        return str(error)
    return [found[name].offset for name in NAMES]


def test_entries_of_shared_tensors_are_found(ranks: Ranks) -> None:
    assert ranks.run(2, on_rank_places, [TOGETHER, TOGETHER]) == [[0] * 3, [12] * 3]


def test_other_buckets_are_refused_though_names_have_one_order(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(2, on_rank_places, [TOGETHER, APART])):
        assert f"rank {1 - rank} cut its gradients into other buckets" in found
        assert "--ddp-bucket-size" in found
