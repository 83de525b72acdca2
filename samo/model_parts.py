"""Counts and comparisons over whole tensors that ranks hold in parts.

Masks belong to whole tensors. Tensor-parallel ranks hold parts of them, stages hold different
tensors, and two stages hold a tied table. Every decision uses numbers of whole tensors, so that all
grids draw the masks that a single rank would.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from megatron.data_parallel.gradient_path import CheckpointView
from megatron.parallel.tensor_shard import Corner, ModelShard, TensorShard
from megatron.sparse.shard import FlatShard

if TYPE_CHECKING:
    from megatron.parallel.groups import Group


T = TypeVar("T")
Rows = Mapping[str, Sequence[int]]


class ModelParts(ModelShard):
    """This rank's part of a model, with sums and comparisons over whole tensors.

    Without groups, or for unknown names, tensors are whole. Collective methods say over which
    ranks: the tensor-parallel ranks of a stage, or all ranks of a copy of the model.
    """

    @property
    def cut_names(self) -> frozenset[str]:
        """Names of the parameters that tensor-parallel ranks share."""
        return frozenset(name for name, info in self._by_name.items() if info.tp_sharded)

    def shard(self, name: str) -> FlatShard | None:
        """Return this rank's shard of a tensor in flattened positions; None for a whole tensor."""
        part = self.tp_shard(name)
        return None if part is None else FlatShard.of(part)

    def raise_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank of the world and return its result; if one fails, all raise."""
        return work() if self._groups is None else self._groups.world.raise_on_all_ranks(work)

    def raise_on_holders(self, name: str, work: Callable[[], T]) -> T:
        """Run `work` on the ranks that hold parts of a tensor; if one of them fails, all raise."""
        tp = self.holders(name)
        return work() if tp is None else tp.raise_on_all_ranks(work)

    def summed(self, rows: Rows) -> dict[str, list[int]]:
        """Sum each tensor's numbers over its parts. Collective over the stage."""
        return self._reduced(rows, dist.ReduceOp.SUM)

    def greatest(self, rows: Rows) -> dict[str, list[int]]:
        """Return the largest of each number over a tensor's parts. Collective over the stage."""
        return self._reduced(rows, dist.ReduceOp.MAX)

    def table(self, rows: Rows) -> dict[str, list[int]]:
        """Return summed numbers of every tensor of the model, ordered by name.

        Collective over a copy of the model.
        """
        return self.everywhere(self.summed(rows))

    def everywhere(self, rows: Rows) -> dict[str, list[int]]:
        """Gather numbers of whole tensors from all stages, ordered by name.

        Collective over the pipeline.
        """
        found = {name: list(numbers) for name, numbers in rows.items()}
        if self._groups is not None:
            # A tied tensor has the same numbers on both stages.
            for text in self._groups.pp.all_gather_str(json.dumps(found)):
                found |= json.loads(text)
        return dict(sorted(found.items()))

    def counted(self, name: str) -> bool:
        """Return whether this rank owns its part of a tensor; see `owns`."""
        return self._groups is None or self.owns(self._by_name[name])

    def speaks(self, name: str) -> bool:
        """Return whether this rank adds a tensor's per-tensor terms to a sum over its parts."""
        tp = self.holders(name)
        return tp is None or tp.rank == 0

    def counted_once(self, name: str) -> bool:
        """Return whether this is the one rank of the model that counts the whole tensor."""
        return self.counted(name) and self.speaks(name)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Assemble a whole flattened mask from flattened parts. Collective over the stage."""
        shard, tp = self.tp_shard(name), self.holders(name)
        if shard is None or tp is None:
            return part
        out = torch.zeros(shard.shape, dtype=torch.uint8)
        mine = part.view(shard.local_shape)
        for there, here in shard.boxes():
            out[_within(there)] = mine[_within(here)]
        _reduce(tp, out, dist.ReduceOp.MAX)
        return out.view(torch.bool).view(-1)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's flattened part of a whole flattened tensor."""
        shard = self.tp_shard(name)
        return whole if shard is None else shard.of(whole.view(shard.shape)).view(-1)

    def first_of_largest(self, name: str, value: float, place: int) -> bool:
        """Return whether this rank holds the first occurrence of a tensor's largest value.

        Collective over the stage.

        Args:
            value: the largest value of this rank's part; negative if the rank has none.
            place: the position of `value` in the part.
        """
        tp, shard = self.holders(name), self.shard(name)
        if tp is None or shard is None:
            return True
        largest = torch.tensor([value], dtype=torch.float64)
        _reduce(tp, largest, dist.ReduceOp.MAX)
        mine = int(shard.logical(torch.tensor([place]))) if value == largest.item() else shard.total
        first = torch.tensor([mine])
        _reduce(tp, first, dist.ReduceOp.MIN)
        return mine == first.item() and mine < shard.total

    def _reduced(self, rows: Rows, op: dist.ReduceOp.RedOpType) -> dict[str, list[int]]:
        found = {name: list(numbers) for name, numbers in rows.items()}
        names = sorted(self.cut_names & rows.keys())
        if names and self._groups is not None:
            numbers = torch.tensor([found[name] for name in names], dtype=torch.int64)
            _reduce(self._groups.tp, numbers, op)
            found |= dict(zip(names, numbers.tolist(), strict=True))
        return found


def read_part(saved: CheckpointView, name: str, shard: TensorShard | None) -> torch.Tensor:
    """Read only this rank's part of a checkpoint's tensor."""
    if shard is None:
        return saved.read(name)
    shares = [saved.read(name, *there) for there, _ in shard.boxes()]
    return shares[0] if len(shares) == 1 else torch.cat(shares, dim=shard.axis)


def _reduce(group: Group, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
    group.all_reduce(tensor, op)


def _within(box: tuple[Corner, Corner]) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(*box, strict=True))
