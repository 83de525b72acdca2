"""Check that values which several ranks hold are equal to the last bit.

A parameter's checksum is the sum of its bit patterns as integers. The sum does not depend on the
order, runs at memory speed, and changes with any single flipped bit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.data_parallel.buffers import NO_BUFFERS, BufferSet
from megatron.errors import NumericsError
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.parallel.groups import Group, ProcessGroups

_NAMED = 3
"""Parameters that an error lists; it counts the remaining ones."""
_PIECE = 1 << 22
"""Number of entries that are widened at a time, 32 MiB."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bit patterns of a tensor, an int64 scalar (wrapping)."""
    bits = tensor.reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # torch widens what it sums, which takes 8 bytes an entry.
    for piece in bits.split(_PIECE):
        total += piece.sum(dtype=torch.int64)
    return total


def checksums(optimizer: BucketOptimizer) -> dict[str, torch.Tensor]:
    """Return checksums of each parameter's master weights and of its 16-bit copy, if any.

    Sharded master weights have no replicas; the model's weights are summed instead.
    """
    found = {}
    for info, bucket, where in optimizer.engine.slices():
        if bucket.shard is None:
            master = where.of(optimizer.states[bucket.index].master)
            # Master weights of an offloaded optimizer are in host memory.
            found[info.name] = checksum(master).to(info.param.device)
        if bucket.shard is not None or info.param.dtype != torch.float32:
            found[f"{info.name} ({info.param.dtype})"] = checksum(info.param.detach())
    return found


def compare_replicas(
    optimizer: BucketOptimizer,
    groups: ProcessGroups,
    *,
    step: int,
    buffers: BufferSet = NO_BUFFERS,
) -> None:
    """Raise `NumericsError` on every rank, naming parameter and rank, where a copy differs.

    The values of data-parallel ranks are compared, those of tensor-parallel ranks for tensors that
    they all hold whole (buffers among them), and those of two stages for tied weights. Each
    comparison is one small all-reduce. Collective over the world.
    """
    if groups.world.size == 1:
        return
    copies = [
        _Copies(group, dict(sorted(found.items())))
        for group, found in _copies(optimizer, buffers, groups)
        if group.size > 1 and found
    ]
    odd = [_odd(copy) for copy in copies]
    device = optimizer.engine.buckets[0].grad.device
    bad = torch.tensor([int(any(odd))], device=device)
    groups.world.all_reduce(bad, dist.ReduceOp.MAX)
    if not bad.item():
        return
    lines = [line for copy, names in zip(copies, odd, strict=True) for line in _told(copy, names)]
    groups.world.raise_on_all_ranks(lambda: _raise(lines, step))


class _Copies(NamedTuple):
    """Checksums of the values that all ranks of a group hold, by name."""

    group: Group
    found: dict[str, torch.Tensor]


def _copies(
    optimizer: BucketOptimizer, buffers: BufferSet, groups: ProcessGroups
) -> Iterator[tuple[Group, dict[str, torch.Tensor]]]:
    """Yield each group with the checksums, by name, of the values that all its ranks hold."""
    found = checksums(optimizer)
    whole = {f"{name} (buffer)": checksum(tensor) for name, tensor in buffers.tensors()}
    infos = optimizer.engine.infos
    owner = {name: infos[name.split(" ")[0]] for name in found}
    yield groups.dp, found | whole
    whole |= {name: total for name, total in found.items() if owner[name].tp_shard is None}
    yield groups.tp, whole
    yield groups.embedding, {name: total for name, total in found.items() if owner[name].tied}


def _odd(copies: _Copies) -> list[str]:
    """Return the names whose checksums are not equal on all ranks."""
    mine = torch.stack(list(copies.found.values()))
    extremes = torch.stack([mine, -mine])
    copies.group.all_reduce(extremes, dist.ReduceOp.MAX)
    differs = extremes[0] != -extremes[1]
    return [name for name, odd in zip(copies.found, differs.tolist(), strict=True) if odd]


def _told(copies: _Copies, names: list[str]) -> Iterator[str]:
    """Yield a line per name with the ranks that differ. Collective over the group."""
    group, found = copies
    texts = group.all_gather_str(json.dumps([int(found[name]) for name in names]))
    everyone = [json.loads(text) for text in texts]
    for number, name in enumerate(names):
        sums = [values[number] for values in everyone]
        usual, count = Counter(sums).most_common(1)[0]
        odd = [group.ranks[i] for i, value in enumerate(sums) if value != usual]
        line = f"{name} on rank {', '.join(map(str, odd))}"
        if 2 * count <= len(sums):
            line += f", or on those that it differs from (rank {group.ranks[sums.index(usual)]})"
        yield line


def _raise(drifted: list[str], step: int) -> None:
    if drifted:
        more = f" and {len(drifted) - _NAMED} more" if len(drifted) > _NAMED else ""
        raise NumericsError(
            f"replicas have drifted apart, found after step {step}: "
            f"{'; '.join(drifted[:_NAMED])}{more}; this step is not saved; suspect that machine's "
            "memory and start the same command again from the last checkpoint"
        )
