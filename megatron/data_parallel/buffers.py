"""Tensors of a model that training updates without gradients, such as batch-norm statistics.

    forward (training) --> shadow --> commit: mean over data-parallel ranks --> buffer, shadow
                                  '-> abort:  buffer --> shadow

Forward passes of a step write the shadow alone, so that a skipped step changes nothing. Between
steps the shadow equals the buffer, which is equal on all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.parallel.groups import ALONE, Group


@dataclass(frozen=True, kw_only=True)
class BufferInfo:
    """A buffer of a chunk, whole on each rank that has the chunk.

    Args:
        name: The logical name, unique in the model and independent of the grid.
        buffer: fp32; evaluations and checkpoints read it. Only `BufferSet` writes it.
        shadow: fp32, of the same shape; forward passes in training read and write it.
    """

    name: str
    buffer: torch.Tensor
    shadow: torch.Tensor


class BufferSet:
    """The buffers of this rank's chunks, which are committed or aborted with the step.

    Args:
        infos: The buffers, in equal order on all ranks of `dp`.
        dp: The data-parallel group, over which buffers are averaged.
    """

    def __init__(self, infos: Sequence[BufferInfo], dp: Group) -> None:
        self.infos, self._dp = list(infos), dp
        names = [info.name for info in infos]
        assert len(set(names)) == len(names), f"buffers need names of their own: {names}"
        self.abort()

    def commit(self) -> None:
        """Set each buffer and its shadow, in place, to the mean shadow of data-parallel ranks.

        Runs one fp32 all-reduce over the data-parallel group, or none if there are no buffers.
        """
        if not self.infos:
            return
        flat = torch.cat([info.shadow.reshape(-1) for info in self.infos])
        self._dp.all_reduce(flat, dist.ReduceOp.SUM)
        flat /= self._dp.size
        sizes = [info.shadow.numel() for info in self.infos]
        for info, mean in zip(self.infos, flat.split(sizes), strict=True):
            info.buffer.copy_(mean.view_as(info.buffer))
            info.shadow.copy_(info.buffer)

    def abort(self) -> None:
        """Reset the shadows, which the forward passes of a skipped step wrote, to the buffers."""
        for info in self.infos:
            info.shadow.copy_(info.buffer)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the committed values of each buffer."""
        for info in self.infos:
            yield info.name, info.buffer

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set buffers and shadows, in place, from tensors of equal size, looked up by name."""
        for info in self.infos:
            info.buffer.copy_(values[info.name].view_as(info.buffer))
        self.abort()


NO_BUFFERS = BufferSet((), ALONE)
"""The buffers of a model that has none."""
