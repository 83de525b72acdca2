"""Tensors of which each rank holds parts: counts that all ranks of one model agree on.

A mask belongs to a whole tensor. Tensor-parallel ranks hold a part of it each, other stages hold
other tensors, and a tied table lies on two of them; what is decided by comparing or counting is
decided by numbers of the whole, so that every grid draws the masks that one rank would.
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

    Without groups, or for names it does not know, tensors are whole. Methods that say so are
    collective: over the tensor-parallel ranks of a stage, which have the same tensors, or over all
    ranks of a copy of the model.
    """

    @property
    def cut_names(self) -> frozenset[str]:
        """The parameters of which this rank holds a part."""
        return frozenset(name for name, info in self._by_name.items() if info.tp_sharded)

    def shard(self, name: str) -> FlatShard | None:
        """The part of a tensor that is here, by places of the flattened tensor."""
        part = self.tp_shard(name)
        return None if part is None else FlatShard.of(part)

    def raise_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank of the world and fail together, if at all."""
        return work() if self._groups is None else self._groups.world.raise_on_all_ranks(work)

    def raise_on_holders(self, name: str, work: Callable[[], T]) -> T:
        """Run `work` on the ranks that hold parts of a tensor.

        Raise on all of them if one rank raises.
        """
        tp = self.holders(name)
        return work() if tp is None else tp.raise_on_all_ranks(work)

    def summed(self, rows: Rows) -> dict[str, list[int]]:
        """Numbers of tensors' parts, as many of each, as those of the whole tensors.

        Collective over the stage.
        """
        return self._reduced(rows, dist.ReduceOp.SUM)

    def greatest(self, rows: Rows) -> dict[str, list[int]]:
        """The largest of each number over a tensor's parts. Collective over the stage."""
        return self._reduced(rows, dist.ReduceOp.MAX)

    def table(self, rows: Rows) -> dict[str, list[int]]:
        """Return numbers of this rank's parts as numbers of every tensor, in the order of names.

        Collective over a copy of the model.
        """
        return self.everywhere(self.summed(rows))

    def everywhere(self, rows: Rows) -> dict[str, list[int]]:
        """Sum rows that describe whole tensors already. Collective over the pipeline."""
        found = {name: list(numbers) for name, numbers in rows.items()}
        if self._groups is not None:
            # Both copies of a tied tensor say the same.
            for text in self._groups.pp.all_gather_str(json.dumps(found)):
                found |= json.loads(text)
        return dict(sorted(found.items()))

    def counted(self, name: str) -> bool:
        """Return whether this rank owns its part of a tensor, see `owns`."""
        return self._groups is None or self.owns(self._by_name[name])

    def speaks(self, name: str) -> bool:
        """Return whether this rank adds what is said of a tensor once to a sum over its parts."""
        tp = self.holders(name)
        return tp is None or tp.rank == 0

    def counted_once(self, name: str) -> bool:
        """Return whether it is the one rank of the model that counts the tensor as a whole."""
        return self.counted(name) and self.speaks(name)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A whole mask, flattened, of its flattened parts. Collective over the stage."""
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
        """Return this rank's part of a whole tensor, flattened both."""
        shard = self.tp_shard(name)
        return whole if shard is None else shard.of(whole.view(shard.shape)).view(-1)

    def first_of_largest(self, name: str, value: float, place: int) -> bool:
        """Return whether this rank's largest value of a tensor is the whole tensor's first largest.

        `place` is its place in this rank's part. `value` < 0: it has none. Collective over the
        stage.
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
    """Read this rank's part of a tensor of a checkpoint, and nothing else of it."""
    if shard is None:
        return saved.read(name)
    shares = [saved.read(name, *there) for there, _ in shard.boxes()]
    return shares[0] if len(shares) == 1 else torch.cat(shares, dim=shard.axis)


def _reduce(group: Group, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
    group.all_reduce(tensor, op)


def _within(box: tuple[Corner, Corner]) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(*box, strict=True))
