"""Cross-entropy over a vocabulary that may be cut over a tensor-parallel group.

The stock function widens 16-bit logits to fp32 as a whole and keeps a softmax of that size. Here
the logits are the only tensor of their size: statistics are fp32 over chunks of tokens that stay
in cache, and backward writes the gradient over the logits. On CUDA Triton kernels do the same.
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

# fp32 scratch of a chunk: inside a core's share of the last-level cache on a CPU, and on a GPU
# large enough that launches do not matter.
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
    """Negative log-likelihood of each target: logits [n, columns], targets [n] int64 -> [n] fp32.

    Takes ownership of `logits`: **backward overwrites them with their gradient**, so the caller
    must not read them again (autograd refuses a second backward by the version counter). Columns
    stand for this rank's even share of the vocabulary; those beyond it are padding, count as -inf
    and get gradient 0. `group`: the tensor-parallel ranks, which hold the other shares, have the
    same targets and find the same losses, bit for bit. A target outside the vocabulary is an error
    of the index operation where there is no group, and one of `check_ids` where there is.
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

        # Three statistics per token, each reduced over the group, in two collectives.
        target_logit = real.gather(1, local_targets[:, None])[:, 0].float()
        if owned is not None:
            target_logit.masked_fill_(~owned, 0.0)
        maximum, exp_sum = _maximum_and_exp_sum(real, group)
        if group.size > 1:
            sums = torch.stack([exp_sum, target_logit])
            group.all_reduce(sums, dist.ReduceOp.SUM)
            exp_sum, target_logit = sums

        ctx.save_for_backward(logits, maximum, exp_sum, local_targets, owned)
        ctx.columns = stop - start
        # Large numbers cancel first.
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
            for rows, scratch in _chunks(real):
                _exp_below(maximum[rows], real[rows], out=scratch)
                scratch.scatter_add_(1, local_targets[rows, None], at_target[rows, None])
                # Scaled in fp32: fp16 would lose small probabilities before the loss scale lifts
                # them.
                real[rows] = scratch.mul_(scale[rows, None])
        logits[:, ctx.columns :] = 0  # this also tells autograd that the logits are gone
        return logits, None, None, None


def _maximum_and_exp_sum(real: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's largest logit over the group, and its sum of exponentials; fp32 [n].

    The sum is of exp(logit - largest) over the columns of this rank.
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
        for rows, scratch in _chunks(real):
            _exp_below(maximum[rows], real[rows], out=scratch)
            torch.sum(scratch, dim=1, out=exp_sum[rows])
    return maximum, exp_sum


def _kernels(logits: torch.Tensor) -> ModuleType | None:
    """The Triton kernels where they serve: on CUDA, if Triton is installed."""
    if logits.device.type != "cuda" or find_spec("triton") is None:
        return None
    from megatron.tensor_parallel import cross_entropy_kernels

    return cross_entropy_kernels


def _exp_below(maximum: torch.Tensor, logits: torch.Tensor, *, out: torch.Tensor) -> None:
    """exp(logits - maximum) as a power of two: torch's CPU exp takes four times as long."""
    # One dtype in each operation: mixed ones make a copy of their own.
    out.copy_(logits)
    out.sub_(maximum[:, None]).mul_(_LOG2_E).exp2_()


def _chunks(logits: torch.Tensor):
    """Yield (rows, fp32 scratch of their shape) over runs of tokens; the scratch is reused."""
    tokens, columns = logits.shape
    limit = _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS_OTHER)
    size = max(1, min(tokens, limit // max(columns, 1)))
    scratch = torch.empty(size, columns, dtype=torch.float32, device=logits.device)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        yield slice(start, stop), scratch[: stop - start]
