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

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.gradient_path import Saved
from megatron.sparse.selection import SumBins
from megatron.sparse.shard import Shard

if TYPE_CHECKING:
    from megatron.parallel.cut import Corner, Cut
    from megatron.parallel.groups import Group, ProcessGroups

T = TypeVar("T")
Rows = Mapping[str, Sequence[int]]


class Parts:
    """What this rank holds of the parameters of a model, and the ranks that hold the rest.

    Without groups, or for names it does not know, tensors are whole. Methods that say so are
    collective: over the tensor-parallel ranks of a stage, which have the same tensors, or over all
    ranks of a copy of the model.
    """

    def __init__(
        self, infos: Sequence[ParamInfo] = (), groups: ProcessGroups | None = None
    ) -> None:
        self._groups = groups
        self._infos = {info.name: info for info in infos}

    @property
    def cut_names(self) -> frozenset[str]:
        """The parameters of which this rank holds a part."""
        return frozenset(name for name in self._infos if self.cut(name) is not None)

    def cut(self, name: str) -> Cut | None:
        """Which part of a tensor is here; None for all of it."""
        return self._infos[name].cut if name in self._infos else None

    def shard(self, name: str) -> Shard | None:
        """The same of the flattened tensor."""
        cut = self.cut(name)
        return None if cut is None else Shard.of(cut)

    def sum_bins(self, name: str) -> SumBins | None:
        """What adds up counts of a tensor over the ranks that hold parts of it."""
        tp = self._holders(name)
        return None if tp is None else lambda counts: _reduce(tp, counts, dist.ReduceOp.SUM)

    def agreed(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank of the world and fail together, if at all."""
        return work() if self._groups is None else self._groups.world.agreed(work)

    def agreed_on(self, name: str, work: Callable[[], T]) -> T:
        """The same on the ranks that hold parts of a tensor."""
        tp = self._holders(name)
        return work() if tp is None else tp.agreed(work)

    def summed(self, rows: Rows) -> dict[str, list[int]]:
        """Numbers of tensors' parts, as many of each, as those of the whole tensors. Collective
        over the stage."""
        return self._reduced(rows, dist.ReduceOp.SUM)

    def greatest(self, rows: Rows) -> dict[str, list[int]]:
        """The largest of each number over a tensor's parts. Collective over the stage."""
        return self._reduced(rows, dist.ReduceOp.MAX)

    def table(self, rows: Rows) -> dict[str, list[int]]:
        """Numbers of the parts here as those of every tensor of the model, which are in the order
        of their names. Collective over a copy of the model."""
        return self.everywhere(self.summed(rows))

    def everywhere(self, rows: Rows) -> dict[str, list[int]]:
        """The same of numbers that are of whole tensors already. Collective over the pipeline."""
        found = {name: list(numbers) for name, numbers in rows.items()}
        if self._groups is not None:
            # Both copies of a tied tensor say the same.
            for text in self._groups.pp.gather_text(json.dumps(found)):
                found |= json.loads(text)
        return dict(sorted(found.items()))

    def counted(self, name: str) -> bool:
        """Whether this rank counts its part of a tensor in a sum over the ranks of the model."""
        if self._groups is None:
            return True
        if name in self._infos and self._infos[name].tied and self._groups.embedding.rank:
            return False
        return self.cut(name) is not None or self._groups.tp.rank == 0

    def speaks(self, name: str) -> bool:
        """Whether this rank adds what is said of a tensor once to a sum over its parts."""
        tp = self._holders(name)
        return tp is None or tp.rank == 0

    def counted_once(self, name: str) -> bool:
        """Whether it is the one rank of the model that counts the tensor as a whole."""
        return self.counted(name) and self.speaks(name)

    def add_up(self, counts: torch.Tensor) -> torch.Tensor:
        """Counts of this rank, in place, as those of the model. Collective over a copy of it."""
        return counts if self._groups is None else self._groups.sum_over_model(counts)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A whole mask, flattened, of its flattened parts. Collective over the stage."""
        cut, tp = self.cut(name), self._holders(name)
        if cut is None or tp is None:
            return part
        out = torch.zeros(cut.shape, dtype=torch.uint8)
        mine = part.view(cut.local_shape)
        for there, here in cut.boxes():
            out[_within(there)] = mine[_within(here)]
        _reduce(tp, out, dist.ReduceOp.MAX)
        return out.view(torch.bool).view(-1)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What is here of a whole tensor, flattened both."""
        cut = self.cut(name)
        return whole if cut is None else cut.of(whole.view(cut.shape)).view(-1)

    def first_of_largest(self, name: str, value: float, place: int) -> bool:
        """Whether this rank's largest value of a tensor, at `place` of its part, is the whole
        tensor's: the first of equal ones. `value` < 0: it has none. Collective over the stage."""
        tp, shard = self._holders(name), self.shard(name)
        if tp is None or shard is None:
            return True
        largest = torch.tensor([value], dtype=torch.float64)
        _reduce(tp, largest, dist.ReduceOp.MAX)
        mine = int(shard.logical(torch.tensor([place]))) if value == largest.item() else shard.total
        first = torch.tensor([mine])
        _reduce(tp, first, dist.ReduceOp.MIN)
        return mine == first.item() and mine < shard.total

    def _holders(self, name: str) -> Group | None:
        """Those that hold parts of a tensor; None where each has all of it."""
        if self._groups is None or self.cut(name) is None:
            return None
        return self._groups.tp

    def _reduced(self, rows: Rows, op: dist.ReduceOp.RedOpType) -> dict[str, list[int]]:
        found = {name: list(numbers) for name, numbers in rows.items()}
        names = sorted(self.cut_names & rows.keys())
        if names and self._groups is not None:
            numbers = torch.tensor([found[name] for name in names], dtype=torch.int64)
            _reduce(self._groups.tp, numbers, op)
            found |= dict(zip(names, numbers.tolist(), strict=True))
        return found


def read_part(saved: Saved, name: str, cut: Cut | None) -> torch.Tensor:
    """What a cut leaves to this rank of a tensor of a checkpoint, read alone."""
    if cut is None:
        return saved.read(name)
    shares = [saved.read(name, *there) for there, _ in cut.boxes()]
    return shares[0] if len(shares) == 1 else torch.cat(shares, dim=cut.axis)


def _reduce(group: Group, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
    group.all_reduce(tensor, op)


def _within(box: tuple[Corner, Corner]) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(*box, strict=True))
