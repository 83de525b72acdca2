"""The parts of a tensor and of a model that one rank holds, and which rank owns a part.

Imports torch lazily.
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
    """Return `[start, stop)` of one of `ranks` nearly equal shares of `length` entries."""
    return length * rank // ranks, length * (rank + 1) // ranks


def padded_rows(length: int, *, ranks: int, multiple: int) -> int:
    """Return the rows in memory of a rank's even share of `length` rows, padded to `multiple`.

    They are those of the longest share on every rank, so that ranks have equal buckets.
    """
    longest = -(-length // ranks)
    return -(-longest // multiple) * multiple


@dataclass(frozen=True)
class TensorShard:
    """A tensor-parallel rank's part of a tensor: entries `[start, stop)` of each block of an axis.

    `shape` is the shape of the whole tensor, whose `axis` consists of `blocks` equal blocks. Most
    tensors have one block. The first projection of a gated MLP (gate and value) has two, because a
    rank needs the same columns of both.
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
        """Return the `rank`-th of `ranks` nearly equal shards of each block."""
        start, stop = even_share(shape[axis] // blocks, rank=rank, ranks=ranks)
        return cls(shape, axis, start, stop, blocks)

    @property
    def block(self) -> int:
        """Length of a block along the axis."""
        return self.shape[self.axis] // self.blocks

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the shard: the shares of all blocks, concatenated."""
        length = self.blocks * (self.stop - self.start)
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    @property
    def local_entries(self) -> int:
        """Number of entries of the shard."""
        return math.prod(self.local_shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the shard of a tensor of `shape`, as a contiguous tensor of `local_shape`."""
        inner = self.shape[self.axis + 1 :]
        folded = whole.reshape(*self.shape[: self.axis], self.blocks, self.block, *inner)
        part = folded.narrow(self.axis + 1, self.start, self.stop - self.start)
        return part.reshape(self.local_shape).contiguous()

    def boxes(self) -> Iterator[tuple[tuple[Corner, Corner], tuple[Corner, Corner]]]:
        """Yield each block's box (start and stop corners) in the whole tensor and in the shard."""
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
    """The properties of a parameter, or of a bucket, that `ModelShard.owns` needs."""

    @property
    def tp_sharded(self) -> bool:
        """Whether tensor-parallel ranks hold different parts."""
        ...

    @property
    def tied(self) -> bool:
        """Whether the first and the last pipeline stage hold a copy each."""
        ...


class NamedParameter(Parameter, Protocol):
    """A parameter with its logical name and its shard."""

    @property
    def name(self) -> str:
        """Logical name."""
        ...

    @property
    def tp_shard(self) -> TensorShard | None:
        """The part on this rank; None for the whole tensor."""
        ...


class ModelShard:
    """This rank's part of a copy of the model, which tensor- and pipeline-parallel ranks share.

    Args:
        infos: Parameters of this rank.
        groups: Process groups of this rank; None if the rank holds the whole model.
        on_node: Whether the data-parallel ranks of a node (`ProcessGroups.inner`) have shards of
            the part, so that a copy of the model is on a node and not on each of its ranks.
    """

    def __init__(
        self,
        infos: Iterable[NamedParameter] = (),
        groups: ProcessGroups | None = None,
        *,
        on_node: bool = False,
    ) -> None:
        self._groups, self._on_node = groups, on_node
        self._by_name = {info.name: info for info in infos}

    @property
    def tp(self) -> Group | None:
        """The tensor-parallel group; None if the rank holds the whole model."""
        return None if self._groups is None else self._groups.tp

    def owns(self, parameter: Parameter) -> bool:
        """Return whether this rank counts `parameter` in sums over the model and saves it.

        Exactly one rank of a model copy owns each part of each tensor: the first tensor-parallel
        rank owns replicated tensors, the first stage owns tied parameters.
        """
        if self._groups is None:
            return True
        if parameter.tied and self._groups.embedding.rank:
            return False
        return parameter.tp_sharded or self._groups.tp.rank == 0

    def tp_shard(self, name: str) -> TensorShard | None:
        """Return this rank's part of a tensor; None if this rank holds the whole tensor."""
        return self._by_name[name].tp_shard if name in self._by_name else None

    def holders(self, name: str) -> Group | None:
        """Return the group of ranks that share a tensor; None if this rank holds it whole."""
        if self._groups is None or self.tp_shard(name) is None:
            return None
        return self._groups.tp

    def sum_bins(self, name: str) -> Callable[[torch.Tensor], None] | None:
        """Return a function that sums a tensor of counts in place over the `holders` of a tensor.

        None if this rank holds the tensor whole.
        """
        tp = self.holders(name)
        return None if tp is None else lambda counts: _sum(tp, counts)

    def sum_over_model(self, counts: torch.Tensor) -> torch.Tensor:
        """Sum `counts` in place over the ranks of a model copy. Collective over these ranks."""
        if self._groups is None:
            return counts
        if self._on_node:
            _sum(self._groups.shards, counts)
        return self._groups.sum_over_model(counts)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sum each number over the ranks of a model copy. Collective over these ranks."""
        import torch

        # A CPU tensor, so that the host does not wait for a device.
        return self.sum_over_model(torch.tensor(numbers, dtype=torch.float64)).tolist()


def _sum(group: Group, counts: torch.Tensor) -> None:
    import torch.distributed as dist

    group.all_reduce(counts, dist.ReduceOp.SUM)
