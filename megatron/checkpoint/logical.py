"""State of a parameter, between a rank's memory and the logical tensor that a checkpoint holds.

    logical tensor --boxes--> part on this rank --mask--> stored entries --mask--> entries in a file

A tensor-parallel rank has boxes of a tensor, a pruned one exists in part, and of what exists some
may be left out. Files know boxes and masks of logical tensors, so that any grid reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.checkpoint.regions import Box, volume, within
from megatron.checkpoint.shards import Shard
from megatron.checkpoint.store import Checkpoint
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.layout import BucketLayout


@dataclass(frozen=True)
class FileMask:
    """Only entries at which the boolean tensor `name` of the checkpoint equals `value` are in the
    file: on this rank those that `kept` marks, bool [local_entries]."""

    name: str
    value: bool
    kept: torch.Tensor


@dataclass(frozen=True)
class Held:
    """What this rank has of a parameter: the part that `info` tells, of which `layout` stores some
    entries. `pruned`: some do not exist, here or on another rank that has a part."""

    info: ParamInfo
    layout: BucketLayout
    pruned: bool

    @property
    def exists(self) -> torch.Tensor:
        """Which entries of the part are stored: bool [local_entries], on the CPU. Made anew each
        time: to keep it would take a byte for each entry of a pruned model."""
        entries, mask = self.info.local_entries, self.layout.mask(self.info.name)
        return torch.ones(entries, dtype=torch.bool) if mask is None else mask[:entries]

    @property
    def boxes(self) -> list[tuple[Box, Box]]:
        """The boxes of the logical tensor, and where they lie in the part."""
        if self.info.tp_shard is not None:
            return list(self.info.tp_shard.boxes())
        box = (0,) * len(self.info.logical_shape), tuple(self.info.logical_shape)
        return [(box, box)]

    def stored(self, flat: torch.Tensor) -> torch.Tensor:
        """The stored entries of a state in a bucket, without vocabulary padding, which lies at the
        end of a slice that is stored whole and is not in one that is not. A view."""
        return flat[: self.info.local_entries]

    def pick(self, part: torch.Tensor) -> torch.Tensor:
        """The stored ones of all entries of the part, 1-D on the CPU."""
        return part[self.exists] if self.pruned else part

    def spread(self, stored: torch.Tensor, fill: bool) -> torch.Tensor:
        """All entries of the part from the stored ones (bool), `fill` for those that are not."""
        if not self.pruned:
            return stored.cpu()
        return torch.full_like(self.exists, fill).masked_scatter_(self.exists, stored.cpu())

    # ---- writing -------------------------------------------------------------------------------

    def shards(
        self, name: str, values: torch.Tensor, mask: FileMask | None = None
    ) -> Iterator[Shard]:
        """What this rank writes of the tensor `name`: `values` (1-D) are those of the part's
        entries that are in the file, which are all without a mask."""
        boxes, shape = self.boxes, tuple(self.info.logical_shape)
        whole = values
        if len(boxes) > 1 and mask is not None:
            kept = mask.kept.to(values.device)
            whole = values.new_zeros(self.info.local_entries).masked_scatter_(kept, values)
        for (start, stop), box in boxes:
            part = whole if len(boxes) == 1 else self._box(whole, box)
            if mask is None:
                yield Shard(name, part, shape, start, stop)
                continue
            if len(boxes) > 1:
                part = part[self._box(mask.kept, box).to(part.device)]
            yield Shard(name, part, shape, start, stop, mask=mask.name, mask_value=mask.value)

    def _box(self, part: torch.Tensor, box: Box) -> torch.Tensor:
        shape = self.info.local_shape
        return part.view(shape)[within(box, (0,) * len(shape))].reshape(-1)

    # ---- reading -------------------------------------------------------------------------------

    def read(self, saved: Checkpoint, name: str) -> torch.Tensor:
        """All entries of the part (1-D, on the CPU), 0 for those that are not in the file."""
        return self._read(saved, name, ())

    def read_own(self, saved: Checkpoint, name: str, rank: int, ranks: int) -> torch.Tensor:
        """The same of state that each data-parallel rank has of its own; where they were not
        `ranks`, the mean of the old ones, which keeps the update that is pending in them."""
        before = saved.shape(name)[0]
        if before == ranks:
            return self._read(saved, name, (rank,))
        total = self._read(saved, name, (0,))
        for old in range(1, before):
            total += self._read(saved, name, (old,))
        return total.div_(before)

    def _read(self, saved: Checkpoint, name: str, lead: tuple[int, ...]) -> torch.Tensor:
        after = tuple(axis + 1 for axis in lead)
        pieces = []
        for (start, stop), box in self.boxes:
            found = saved.read(name, (*lead, *start), (*after, *stop))
            pieces.append((found.view([b - a for a, b in zip(start, stop, strict=True)]), box))
        if len(pieces) == 1:
            return pieces[0][0].view(-1)
        part = pieces[0][0].new_empty(self.info.local_shape)
        for found, box in pieces:
            assert found.numel() == volume(box)
            part[within(box, (0,) * part.dim())] = found
        return part.view(-1)
