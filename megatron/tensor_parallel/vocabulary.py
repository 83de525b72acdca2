"""The vocabulary sharded over tensor-parallel ranks: the token table, and the check of ids.

Each rank holds an even share of the rows, and never has columns for the whole vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megatron.parallel.tensor_shard import TensorShard, padded_rows
from megatron.tensor_parallel.collectives import UNCUT, TensorParallel, add_up_terms, uncompiled
from megatron.tensor_parallel.layers import ShardedModule

_OUTSIDE = "is outside the vocabulary of"


class VocabularyTable(ShardedModule):
    """Lookup table with this rank's share of the rows of the vocabulary.

    The number of rows is padded to a multiple of `divisible_by`; the padding is in memory only.
    """

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        divisible_by: int,
        tp: TensorParallel = UNCUT,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(tp)
        self.vocab_size = vocab_size
        rows = padded_share(vocab_size, tp=tp, divisible_by=divisible_by)
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype, device=device))
        if self.is_sharded:
            self.shards["weight"] = vocabulary_shard(vocab_size, size, tp=tp)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids [b, s] as rows [b, s, h], or [b, s/tp, h] with sequence parallelism.

        Raises:
            IndexError: an id on a CPU is outside the vocabulary; on a single rank, outside the
                padded table. On CUDA the device asserts.
        """
        if not self.is_sharded:
            return F.embedding(ids, self.weight)
        check_ids(ids, vocab_size=self.vocab_size)
        terms = look_up_share(self.tp.by_rank(ids), self.weight, self.shards["weight"])
        return add_up_terms(terms, self.tp)


def padded_share(vocab_size: int, *, tp: TensorParallel, divisible_by: int) -> int:
    """Return the rows of a vocabulary table in a rank's memory, padding included."""
    return padded_rows(vocab_size, ranks=tp.size, multiple=divisible_by)


def vocabulary_shard(vocab_size: int, size: int, *, tp: TensorParallel) -> TensorShard:
    """Return this rank's shard of the table [vocab_size, size]."""
    return TensorShard.evenly((vocab_size, size), axis=0, rank=tp.rank, ranks=tp.size)


def check_ids(ids: torch.Tensor, *, vocab_size: int) -> None:
    """Raise `IndexError` for ids outside the vocabulary, on all ranks, which see the same ids.

    For ids on CUDA the device asserts instead.
    """
    if ids.device.type == "cuda":
        # A device assertion, as of CUDA's index operations, does not make the host wait.
        inside = ((ids >= 0) & (ids < vocab_size)).all()
        torch.ops.aten._assert_async.msg(inside, f"a token id {_OUTSIDE} {vocab_size} entries")
        return
    lowest, highest = (int(bound) for bound in ids.aminmax())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise IndexError(f"token id {wrong} {_OUTSIDE} {vocab_size} entries")


@uncompiled
def look_up_share(ids: torch.Tensor, weight: torch.Tensor, shard: TensorShard) -> torch.Tensor:
    """Return rows [..., h] of the ids in this rank's share, and zeros for other ids."""
    return _LookUpShare.apply(ids, weight, shard)


class _LookUpShare(torch.autograd.Function):
    """Lookup with one masked write in forward and none in backward, which skips ids by index."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, shard: TensorShard
    ) -> torch.Tensor:
        elsewhere = (ids < shard.start) | (ids >= shard.stop)
        local = ids - shard.start
        rows = F.embedding(local.masked_fill(elsewhere, 0), weight)
        ctx.save_for_backward(local.masked_fill_(elsewhere, weight.shape[0]))
        ctx.num_rows = weight.shape[0]
        return rows.masked_fill_(elsewhere[..., None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (local,) = ctx.saved_tensors
        skipped = ctx.num_rows
        grad = torch.ops.aten.embedding_dense_backward(grads[0], local, skipped, skipped, False)
        return None, grad, None
