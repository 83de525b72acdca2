"""Cross-entropy with label smoothing (Szegedy et al. 2016), as fairseq computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron.parallel.groups import ALONE
from megatron.tensor_parallel.cross_entropy import (
    exp_below,
    maximum_and_exp_sum,
    token_chunks,
)


def smoothed_sums(
    logits: torch.Tensor, targets: torch.Tensor, *, smoothing: float, ignored: int
) -> torch.Tensor:
    """Return the sums over tokens of smoothed loss and negative log-likelihood, fp32 [2].

    The smoothed distribution gives the target 1 - smoothing, and adds smoothing / n to every entry
    of the vocabulary, including the target:

        loss = log(sum_i exp z_i) - (1 - smoothing) z_target - smoothing / n * sum_i z_i

    Takes ownership of `logits`, as `token_losses` does: **backward overwrites them with their
    gradient**. The second sum has no gradient.

    Args:
        logits: [tokens, n], of any floating dtype; computed in fp32.
        targets: int64 [tokens].
        smoothing: share of the probability that is spread, [0, 1).
        ignored: target id of tokens that do not count; an entry of the vocabulary.
    """
    counted = targets != ignored
    sums = torch.stack(_SmoothedLosses.apply(logits, targets, smoothing))
    # A product would turn a padded row that is not finite into NaN.
    return torch.where(counted, sums, 0.0).sum(1)


class _SmoothedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        maximum, exp_sum = maximum_and_exp_sum(logits, ALONE)
        at_target = logits.gather(1, targets[:, None])[:, 0].float()
        ctx.save_for_backward(logits, targets, maximum, exp_sum)
        ctx.smoothing = smoothing
        # Subtract the large numbers first, so that they cancel.
        logarithm = exp_sum.log()
        likelihoods = (maximum - at_target).add_(logarithm)
        mean = logits.mean(1, dtype=torch.float32)
        spread = (maximum - mean).add_(logarithm)
        losses = torch.lerp(likelihoods, spread, smoothing)
        ctx.mark_non_differentiable(likelihoods)
        return losses, likelihoods

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, maximum, exp_sum = ctx.saved_tensors
        scale = grads[0] / exp_sum
        at_target = exp_sum * (ctx.smoothing - 1.0)
        everywhere = exp_sum * (ctx.smoothing / logits.shape[1])
        for rows, scratch in token_chunks(logits):
            exp_below(maximum[rows], logits[rows], out=scratch)
            scratch.sub_(everywhere[rows, None])
            scratch.scatter_add_(1, targets[rows, None], at_target[rows, None])
            # Scale in fp32: fp16 would lose small probabilities before the loss scale is applied.
            logits[rows] = scratch.mul_(scale[rows, None])
        return logits, None, None
