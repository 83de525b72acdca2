"""The part of a tensor and of a model that a rank holds, and which rank owns it.

The module imports torch in the functions that need it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from megatron.parallel.groups import Group, ProcessGroups

Corner = tuple[int, ...]


def even_share(length: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """`[start, stop)`, the `rank`-th of `ranks` shares of `length` entries, as equal as can be."""
    return length * rank // ranks, length * (rank + 1) // ranks


def padded_rows(length: int, *, rank: int, ranks: int, multiple: int) -> int:
    """Rows in a rank's memory of a table of `length` rows, of which it holds an even share."""
    start, stop = even_share(length, rank=rank, ranks=ranks)
    return -(-(stop - start) // multiple) * multiple


@dataclass(frozen=True)
class TensorShard:
    """A tensor-parallel rank's part of a tensor: entries `[start, stop)` of each block of an axis.

    `shape` is that of the whole tensor, whose `axis` consists of `blocks` equal blocks.

    Most tensors have one block. A gated MLP's first projection, gate upon value, has two: a rank
    needs the same columns of both, and the whole tensor stays the same whatever the grid is.
    """

    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int
    blocks: int = 1

    def __post_init__(self) -> None:
        assert self.shape[self.axis] % self.blocks == 0, "blocks are equal"
        assert 0 <= self.start < self.stop <= self.block, "no rank is without entries"

    @classmethod
    def evenly(
        cls, shape: tuple[int, ...], *, axis: int, rank: int, ranks: int, blocks: int = 1
    ) -> TensorShard:
        """The `rank`-th of shares of each block that are as equal as can be."""
        start, stop = even_share(shape[axis] // blocks, rank=rank, ranks=ranks)
        return cls(shape, axis, start, stop, blocks)

    @property
    def block(self) -> int:
        """Length of a block along the axis."""
        return self.shape[self.axis] // self.blocks

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part: the shares of the blocks one after another."""
        length = self.blocks * (self.stop - self.start)
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    @property
    def local_entries(self) -> int:
        """Number of entries of the part."""
        return math.prod(self.local_shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of `shape`, as a tensor of `local_shape`; contiguous."""
        inner = self.shape[self.axis + 1 :]
        folded = whole.reshape(*self.shape[: self.axis], self.blocks, self.block, *inner)
        part = folded.narrow(self.axis + 1, self.start, self.stop - self.start)
        return part.reshape(self.local_shape).contiguous()

    def boxes(self) -> Iterator[tuple[tuple[Corner, Corner], tuple[Corner, Corner]]]:
        """For each block its share, as a box (start and stop corners) of the whole tensor and as
        one of the part."""
        share = self.stop - self.start
        for number in range(self.blocks):
            first, mine = number * self.block + self.start, number * share
            yield (
                _box(self.shape, self.axis, first, first + share),
                _box(self.local_shape, self.axis, mine, mine + share),
            )


def _box(shape: tuple[int, ...], axis: int, start: int, stop: int) -> tuple[Corner, Corner]:
    low = tuple(start if number == axis else 0 for number in range(len(shape)))
    high = tuple(stop if number == axis else size for number, size in enumerate(shape))
    return low, high


class Parameter(Protocol):
    """A parameter, or a bucket of parameters of one kind, as `ModelShard.owns` sees it."""

    @property
    def tp_sharded(self) -> bool:
        """Whether tensor-parallel ranks hold different parts."""
        ...

    @property
    def tied(self) -> bool:
        """Whether the first and the last pipeline stage hold a copy each."""
        ...


class NamedParameter(Parameter, Protocol):
    """A parameter by name."""

    @property
    def name(self) -> str:
        """Logical name."""
        ...

    @property
    def tp_shard(self) -> TensorShard | None:
        """The part on this rank; None for the whole tensor."""
        ...


class ModelShard:
    """This rank's part of a model whose copy spans tensor- and pipeline-parallel ranks.

    Args:
        infos: the parameters of this rank.
        groups: the groups of this rank. Without groups every tensor is whole, and every sum over
            the ranks of a model copy is this rank's own.
    """

    def __init__(
        self, infos: Iterable[NamedParameter] = (), groups: ProcessGroups | None = None
    ) -> None:
        self._groups = groups
        self._by_name = {info.name: info for info in infos}

    @property
    def tp(self) -> Group | None:
        """The tensor-parallel group."""
        return None if self._groups is None else self._groups.tp

    def owns(self, parameter: Parameter) -> bool:
        """Return whether this rank accounts for `parameter` in a sum over a copy of the model, and
        writes it to a checkpoint: exactly one rank does so for each part of each tensor.

        The first tensor-parallel rank owns what all of them hold whole; of the copies of a tied
        parameter the first stage's counts.
        """
        if self._groups is None:
            return True
        if parameter.tied and self._groups.embedding.rank:
            return False
        return parameter.tp_sharded or self._groups.tp.rank == 0

    def tp_shard(self, name: str) -> TensorShard | None:
        """Return this rank's part of a tensor; None where this rank holds the whole tensor."""
        return self._by_name[name].tp_shard if name in self._by_name else None

    def holders(self, name: str) -> Group | None:
        """Return the ranks that hold the parts of a tensor; None where this rank holds it whole."""
        if self._groups is None or self.tp_shard(name) is None:
            return None
        return self._groups.tp

    def sum_bins(self, name: str) -> Callable[[torch.Tensor], None] | None:
        """Return a function that sums a tensor of counts in place over `holders`, or None."""
        tp = self.holders(name)
        return None if tp is None else lambda counts: _sum(tp, counts)

    def sum_over_model(self, counts: torch.Tensor) -> torch.Tensor:
        """Sum `counts` in place over the ranks of one copy of the model. Collective over these."""
        return counts if self._groups is None else self._groups.sum_over_model(counts)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sum each number over the ranks of one copy of the model. Collective over these ranks.

        The sum is of a CPU tensor, so that the host waits for no device.
        """
        import torch

        return self.sum_over_model(torch.tensor(numbers, dtype=torch.float64)).tolist()


def _sum(group: Group, counts: torch.Tensor) -> None:
    import torch.distributed as dist

    group.all_reduce(counts, dist.ReduceOp.SUM)
