"""Positions of a rank's stored entries in tensors that tensor-parallel ranks share.

Radius selects entries from whole tensors, so a rank needs the positions of its part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from megatron.data_parallel.layout import BucketLayout
from megatron.errors import ConfigError
from megatron.sparse.shard import FlatShard

if TYPE_CHECKING:
    from megatron.parallel.groups import Group
    from megatron.parallel.tensor_shard import ModelShard, TensorShard


def find_places(
    model: ModelShard,
    stored: Mapping[str, int],
    buckets: Sequence[Sequence[str]],
    layout: BucketLayout | None,
) -> dict[str, FlatShard]:
    """Return the positions of this rank's stored entries among the stored entries of whole tensors.

    Collective over the tensor-parallel group.

    Args:
        model: The parameters of this rank and its groups.
        stored: Number of stored entries of each parameter.
        buckets: Names of the parameters of each bucket, in order. Ranks select from the tensors of
            a bucket together, so that it must have the same shared tensors on all of them.
        layout: Which entries are stored; None for all.

    Raises:
        ConfigError: Tensor-parallel ranks cut their gradients into different buckets.
    """
    found = {name: FlatShard(numel, numel) for name, numel in stored.items()}
    parts = {name: part for name in stored if (part := model.tp_shard(name)) is not None}
    tp = model.tp
    if tp is None or tp.size == 1:
        return found | {name: FlatShard.of(part) for name, part in parts.items()}
    cuts = [[name for name in names if name in parts] for names in buckets]
    mine = {"cuts": [cut for cut in cuts if cut], "stored": {name: stored[name] for name in parts}}
    by_rank = [json.loads(text) for text in tp.all_gather_str(json.dumps(mine))]
    odd = [rank for rank, theirs in enumerate(by_rank) if theirs["cuts"] != mine["cuts"]]
    if odd:
        raise ConfigError(
            f"rank {tp.ranks[odd[0]]} cut its gradients into other buckets than rank "
            f"{tp.ranks[tp.rank]}, and would choose entries in another order; give a larger "
            "--ddp-bucket-size"
        )
    for name, part in parts.items():
        shard = FlatShard.of(part)
        if sum(theirs["stored"][name] for theirs in by_rank) < shard.total:
            shard = _among_stored(tp, name, part, stored[name], layout)
        found[name] = shard
    return found


def _among_stored(
    tp: Group, name: str, part: TensorShard, stored: int, layout: BucketLayout | None
) -> FlatShard:
    """Return the positions of this rank's entries among all stored entries of one tensor.

    Ranks exchange how many entries of each row they store. Collective over `tp`.
    """
    shard = FlatShard.of(part)
    row = shard.numel if shard.is_run else shard.row
    mask = layout.mask(name) if layout is not None else None
    if mask is None:
        mask = torch.ones(shard.numel, dtype=torch.bool)
    mine = mask[: shard.numel].view(-1, row).sum(dim=1)
    assert int(mine.sum()) == stored
    everyone = mine.new_empty(tp.size * mine.numel())
    tp.all_gather(everyone, mine)
    return FlatShard.of_stored(everyone.view(tp.size, -1), tp.rank)
