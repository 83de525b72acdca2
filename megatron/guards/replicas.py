"""Data-parallel copies of the model must stay equal to the last bit; this looks.

A parameter's checksum is the sum of its bit patterns as integers: exact in any order, as fast as
memory, and changed by any single flipped bit.
"""

from __future__ import annotations

import json
from collections import Counter

import torch
import torch.distributed as dist

from megatron.errors import NumericsError
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.parallel.groups import ProcessGroups

_NAMED = 3
"""Parameters that an error names before it counts the rest."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the bit patterns of a tensor, an int64 scalar (wrapping)."""
    return tensor.reshape(-1).view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)


def checksums(optimizer: BucketOptimizer) -> dict[str, torch.Tensor]:
    """Of each parameter: its master weights, and its 16-bit copy where it has one."""
    found = {}
    for info, bucket, where in optimizer.engine.slices():
        master = where.of(optimizer.states[bucket.index].master)
        found[info.name] = checksum(master)
        if info.param.dtype != master.dtype:
            found[f"{info.name} ({info.param.dtype})"] = checksum(info.param.detach())
    return found


def compare_replicas(optimizer: BucketOptimizer, groups: ProcessGroups, *, step: int) -> None:
    """Raise `NumericsError`, on every rank, naming parameter and rank, where a data-parallel copy
    differs from most. One small all-reduce; collective over the world."""
    if groups.dp.size == 1:
        return
    found = checksums(optimizer)
    mine = torch.stack(list(found.values()))
    extremes = torch.stack([mine, -mine])
    groups.dp.all_reduce(extremes, dist.ReduceOp.MAX)
    differs = extremes[0] != -extremes[1]
    bad = differs.any().to(torch.int64).view(1)
    groups.world.all_reduce(bad, dist.ReduceOp.MAX)
    if not bad.item():
        return
    names = [name for name, odd in zip(found, differs.tolist(), strict=True) if odd]
    groups.world.agreed(lambda: _name(names, found, groups, step))


def _name(
    names: list[str], found: dict[str, torch.Tensor], groups: ProcessGroups, step: int
) -> None:
    texts = groups.dp.gather_text(json.dumps([int(found[name]) for name in names]))
    everyone = [json.loads(text) for text in texts]
    drifted = []
    for number, name in enumerate(names):
        sums = [values[number] for values in everyone]
        usual, count = Counter(sums).most_common(1)[0]
        odd = [groups.dp.ranks[i] for i, value in enumerate(sums) if value != usual]
        line = f"{name} on rank {', '.join(map(str, odd))}"
        if 2 * count <= len(sums):
            line += (
                f", or on those that it differs from (rank {groups.dp.ranks[sums.index(usual)]})"
            )
        drifted.append(line)
    if drifted:
        more = f" and {len(drifted) - _NAMED} more" if len(drifted) > _NAMED else ""
        raise NumericsError(
            f"replicas have drifted apart, found after step {step}: "
            f"{'; '.join(drifted[:_NAMED])}{more}; this step is not saved; suspect that machine's "
            "memory and start the same command again from the last checkpoint"
        )
