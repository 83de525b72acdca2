"""Selection of the largest entries of a bucket's parts, also by updates that ranks have in shards.

With sharded optimizer states (ZeRO-1) each data-parallel rank has the update of its shard only:

    update of this rank's shard --> counts, summed over the shards --> threshold of each part
    entries of the shard above it --> bitmap --> all-gather --> the selection, on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.parallel.tensor_shard import ModelShard
from megatron.sparse.counting import Candidates
from megatron.sparse.selection import GivenSelection, Selection, select_largest_each
from megatron.transfer import to_device
from radius.bucket import RadiusBucket
from radius.index import IndexPart

if TYPE_CHECKING:
    from megatron.data_parallel.exchange import Exchange

PartValues = tuple[IndexPart, torch.Tensor]
"""A part of a bucket, and the values of its entries on this rank."""
SumCounts = Callable[[torch.Tensor], object]


def select_parts(
    parts: Sequence[PartValues], model: ModelShard, sum_shards: SumCounts | None = None
) -> dict[str, Selection]:
    """Return the selection of the largest values of each part, by the part's name.

    Parts of tensors that this rank holds alone are selected in one batch, parts of tensors that
    tensor-parallel ranks share in another; both collectively over the ranks that share the entries.

    Args:
        parts: The parts, in equal order on all ranks.
        model: This rank's part of the model.
        sum_shards: Sums a tensor of counts in place over the data-parallel ranks if each has values
            of other entries; None if every one has all.
    """
    found: dict[str, Selection] = {}
    alone = [(part, each) for part, each in parts if model.holders(part.of) is None]
    shared = [(part, each) for part, each in parts if model.holders(part.of) is not None]
    for some in (alone, shared):
        sum_bins = _in_turn(sum_shards, model.sum_bins(some[0][0].of)) if some else None
        # A rank without entries of a shared tensor must still take part in the counting.
        held = [
            (part, each)
            for part, each in some
            if part.places.total and (part.length or sum_bins is not None)
        ]
        tensors = [Candidates(each, part.wanted, part.places) for part, each in held]
        selections = select_largest_each(tensors, sum_bins=sum_bins)
        found |= {part.name: one for (part, _), one in zip(held, selections, strict=True)}
    return found


def select_from_shards(
    parts: Sequence[PartValues], own: RadiusBucket, model: ModelShard, exchange: Exchange
) -> dict[str, Selection]:
    """Return the same selection if values are valid in this rank's shard of the bucket only.

    Collective over the data-parallel ranks; all bytes are counted.
    """
    if not parts:
        return {}
    where, device = own.bucket.kept, own.bucket.grad.device
    kept: list[PartValues] = []
    for part, values in parts:
        here, entries = part.of_shard(where)
        kept.append((here, values[entries]))
    largest = select_parts(kept, model, lambda counts: exchange.sum(counts).wait())
    mine = own.new_index()
    for part, _ in kept:
        if part.length:
            mine.choose(where.start + part.start, largest[part.name])
    octets = torch.zeros(where.numel // 8, dtype=torch.uint8)
    packed = mine.packed(where.start, own.bucket.num_kept)
    octets[: packed.numel()] = packed
    if octets.numel():
        octets = exchange.gather(to_device(octets, device)).wait().view(-1).cpu()
    return {part.name: _selected(octets, part) for part, _ in parts}


def _in_turn(
    sum_shards: SumCounts | None, sum_bins: Callable[[torch.Tensor], None] | None
) -> Callable[[torch.Tensor], None] | None:
    """Return a function that sums over the data-parallel and then the tensor-parallel ranks."""
    sums = [each for each in (sum_shards, sum_bins) if each is not None]

    def sum_all(counts: torch.Tensor) -> None:
        for each in sums:
            each(counts)

    return sum_all if sums else None


def _selected(octets: torch.Tensor, part: IndexPart) -> GivenSelection:
    """Return the selection of a part from the bitmap of its bucket."""
    assert part.start % 8 == 0, "slices are aligned"
    bits = np.unpackbits(octets[part.start // 8 :].numpy(), count=part.length)
    return GivenSelection(torch.from_numpy(bits.view(np.bool_)))
