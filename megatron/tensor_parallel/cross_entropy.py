"""Cross-entropy over a vocabulary that may be sharded over a tensor-parallel group.

torch's function widens all 16-bit logits to fp32 and keeps a softmax of that size. Here the logits
are the only tensor of their size: statistics are fp32 over chunks of tokens that stay in cache, and
backward overwrites the logits with their gradient. On CUDA, Triton kernels do the same if Triton is
installed.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.groups import ALONE, Group
from megatron.parallel.tensor_shard import even_share
from megatron.tensor_parallel.vocabulary import check_ids

# fp32 elements of a chunk: within a core's share of the last-level cache on a CPU; on a GPU large
# enough that launches do not matter.
_CHUNK_ELEMENTS = {"cpu": 1 << 20}
_CHUNK_ELEMENTS_OTHER = 1 << 26
_LOG2_E = math.log2(math.e)


def token_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    group: Group = ALONE,
) -> torch.Tensor:
    """Return the negative log-likelihood of each target, fp32 [n].

    Takes ownership of `logits`: **backward overwrites them with their gradient**, so the caller
    must not read them again (autograd refuses a second backward by the version counter). For a
    target outside the vocabulary, `check_ids` raises if the group has several ranks, and torch's
    index operation on one rank.

    Args:
        logits: [n, columns], this rank's even share of the vocabulary. Columns past the share are
            padding, count as -inf and get gradient 0.
        targets: int64 [n], equal on all ranks.
        group: the tensor-parallel ranks; all get bitwise equal losses.
    """
    return _TokenLosses.apply(logits, targets, vocab_size, group)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, group: Group
    ) -> torch.Tensor:
        start, stop = even_share(vocab_size, rank=group.rank, ranks=group.size)
        owned, local_targets = None, targets
        if group.size > 1:
            check_ids(targets, vocab_size=vocab_size)
            owned = (targets >= start) & (targets < stop)
            local_targets = (targets - start).masked_fill_(~owned, 0)
        real = logits[:, : stop - start]

        # Three statistics per token are reduced over the group in two collectives.
        target_logit = real.gather(1, local_targets[:, None])[:, 0].float()
        if owned is not None:
            target_logit.masked_fill_(~owned, 0.0)
        maximum, exp_sum = maximum_and_exp_sum(real, group)
        if group.size > 1:
            sums = torch.stack([exp_sum, target_logit])
            group.all_reduce(sums, dist.ReduceOp.SUM)
            exp_sum, target_logit = sums

        ctx.save_for_backward(logits, maximum, exp_sum, local_targets, owned)
        ctx.columns = stop - start
        # Subtract the large numbers first, so that they cancel.
        return (maximum - target_logit).add_(exp_sum.log())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, maximum, exp_sum, local_targets, owned = ctx.saved_tensors
        real = logits[:, : ctx.columns]
        scale = grads[0] / exp_sum
        at_target = -exp_sum if owned is None else -exp_sum * owned
        if (kernels := _kernels(real)) is not None:
            kernels.write_gradient(real, maximum, scale, local_targets, at_target)
        else:
            for rows, scratch in token_chunks(real):
                exp_below(maximum[rows], real[rows], out=scratch)
                scratch.scatter_add_(1, local_targets[rows, None], at_target[rows, None])
                # Scale in fp32: fp16 would lose small probabilities before the loss scale is
                # applied.
                real[rows] = scratch.mul_(scale[rows, None])
        logits[:, ctx.columns :] = 0  # also tells autograd that the logits are overwritten
        return logits, None, None, None


def maximum_and_exp_sum(real: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's largest logit over the group, and a local sum; two fp32 tensors [n].

    The sum is that of exp(logit - largest logit) over the columns of `real` [n, columns].
    Collective over the group.
    """
    if (kernels := _kernels(real)) is not None:
        mine, exp_sum = kernels.statistics(real)
        maximum = mine.clone()
        group.all_reduce(maximum, dist.ReduceOp.MAX)
        exp_sum.mul_((mine - maximum).exp_())
    else:
        maximum = real.amax(dim=1).float()
        group.all_reduce(maximum, dist.ReduceOp.MAX)
        exp_sum = torch.empty_like(maximum)
        for rows, scratch in token_chunks(real):
            exp_below(maximum[rows], real[rows], out=scratch)
            torch.sum(scratch, dim=1, out=exp_sum[rows])
    return maximum, exp_sum


def _kernels(logits: torch.Tensor) -> ModuleType | None:
    """Return the Triton kernels on CUDA if Triton is installed, else None."""
    if logits.device.type != "cuda" or find_spec("triton") is None:
        return None
    from megatron.tensor_parallel import cross_entropy_kernels

    return cross_entropy_kernels


def exp_below(maximum: torch.Tensor, logits: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write exp(logits - maximum) to `out` (fp32) for logits [n, columns] and a maximum [n]."""
    # A power of two, since torch's CPU exp takes four times as long. One dtype per operation, as
    # mixed dtypes make a copy.
    out.copy_(logits)
    out.sub_(maximum[:, None]).mul_(_LOG2_E).exp2_()


def token_chunks(logits: torch.Tensor):
    """Yield slices of tokens, each with an fp32 scratch [tokens, columns]; all share its memory."""
    tokens, columns = logits.shape
    limit = _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS_OTHER)
    size = max(1, min(tokens, limit // max(columns, 1)))
    scratch = torch.empty(size, columns, dtype=torch.float32, device=logits.device)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        yield slice(start, stop), scratch[: stop - start]
