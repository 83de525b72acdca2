"""Which part of a model this rank has, where it is cut over ranks.

Radius chooses from whole tensors and tells of the whole model, so whoever has a part of either has
to ask the others. A reducer by itself, or under plain data parallelism, has all of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.data_parallel.bucket import GradBucket, ParamInfo
from megatron.data_parallel.layout import BucketLayout
from megatron.errors import ConfigError
from megatron.sparse.selection import SumBins
from megatron.sparse.shard import Shard

if TYPE_CHECKING:
    from megatron.parallel.cut import Cut
    from megatron.parallel.groups import Group, ProcessGroups


@dataclass(frozen=True)
class ModelShare:
    """`cuts`: how parameters are cut over the tensor-parallel group `tp`, by name; others are whole
    on each of its ranks. `sum_over_model` adds a tensor in place over the ranks that have parts of
    one copy of the model. `second_copy`: tied parameters are counted on another stage."""

    tp: Group | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict[str, "Cut"])
    sum_over_model: Callable[[torch.Tensor], torch.Tensor] | None = None
    second_copy: bool = False

    @classmethod
    def of(cls, groups: ProcessGroups, infos: Sequence[ParamInfo]) -> ModelShare:
        """This rank's in a grid."""
        if groups.tp.size * groups.pp.size == 1:
            return cls()
        return cls(
            tp=groups.tp,
            cuts={info.name: info.cut for info in infos if info.cut is not None},
            sum_over_model=groups.sum_over_model,
            second_copy=groups.embedding.rank > 0,
        )

    def counts(self, bucket: GradBucket) -> bool:
        """Whether this rank is the one to count a bucket in a sum over the model."""
        if bucket.tied and self.second_copy:
            return False
        return self.tp is None or self.tp.rank == 0 or bucket.tp_sharded

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Each of them added up over the model, on the CPU, so that the host waits for no device.
        Collective over its ranks."""
        if self.sum_over_model is None:
            return list(numbers)
        vector = torch.tensor(numbers, dtype=torch.float64)
        return self.sum_over_model(vector).tolist()

    def sum_bins(self, name: str) -> SumBins | None:
        """What adds counts over the ranks that share the tensor; None where this one has it all."""
        if self.tp is None or name not in self.cuts:
            return None
        return partial(_sum, self.tp)

    def places(self, stored: Mapping[str, int], layout: BucketLayout | None) -> dict[str, Shard]:
        """Where the stored entries of parameters on this rank, `stored` in number, lie among those
        of the whole tensors. Collective over the tensor-parallel group: raises `ConfigError` where
        its ranks would choose in different orders."""
        found = {name: Shard(numel, numel) for name, numel in stored.items()}
        shared = [name for name in stored if name in self.cuts]
        if self.tp is None or self.tp.size == 1:
            return found | {name: Shard.of(self.cuts[name]) for name in shared}
        texts = self.tp.gather_text(json.dumps([[name, stored[name]] for name in shared]))
        by_rank = [dict(json.loads(text)) for text in texts]
        odd = [rank for rank, theirs in enumerate(by_rank) if list(theirs) != shared]
        if odd:
            raise ConfigError(
                f"rank {self.tp.ranks[odd[0]]} cut its gradients into buckets of another order "
                f"than rank {self.tp.ranks[self.tp.rank]}, and would choose entries in another "
                "order; give a larger --ddp-bucket-size"
            )
        for name in shared:
            shard = Shard.of(self.cuts[name])
            if sum(theirs[name] for theirs in by_rank) < shard.total:
                shard = self._among_stored(name, stored[name], layout)
            found[name] = shard
        return found

    def _among_stored(self, name: str, stored: int, layout: BucketLayout | None) -> Shard:
        """Of a tensor of which not all is stored: ranks tell what they store of each row."""
        assert self.tp is not None
        cut = self.cuts[name]
        shard = Shard.of(cut)
        row = shard.numel if shard.is_run else shard.row
        mask = layout.mask(name) if layout is not None else None
        if mask is None:
            mask = torch.ones(shard.numel, dtype=torch.bool)
        mine = mask[: shard.numel].view(-1, row).sum(dim=1)
        assert int(mine.sum()) == stored
        everyone = mine.new_empty(self.tp.size * mine.numel())
        self.tp.all_gather(everyone, mine)
        return Shard.of_stored(everyone.view(self.tp.size, -1), self.tp.rank)


def _sum(group: Group, counts: torch.Tensor) -> None:
    group.all_reduce(counts, dist.ReduceOp.SUM)
