"""Update rules on flat chunks: AdamW (torch's or Apex's fused kernel) and SGD with momentum.

A rule knows arithmetic alone. What is stored, in which order chunks are visited and where the
result goes is `bucket_optimizer`'s business, so that a rule serves resident, compressed and
offloaded states alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megatron.errors import ConfigError, missing_extra

LEAST = 1e-38
"""Stands for a beta of 0, which has no logarithm."""


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """What may differ from step to step. `t` counts applied updates from 1."""

    t: int
    lr: float
    weight_decay: float

    @property
    def shrink(self) -> float:
        """The factor that decoupled weight decay, the decay of every rule, applies to a weight."""
        return 1.0 - self.lr * self.weight_decay


class AdamWConstants(NamedTuple):
    """What AdamW is told once."""

    beta1: float
    beta2: float
    eps: float


class UpdateRule(Protocol):
    """Arithmetic of one optimizer. Tensors are 1-D fp32 of equal length, changed in place."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the state it keeps for each entry, as checkpoints call them."""
        ...

    @property
    def adamw(self) -> AdamWConstants | None:
        """Its constants if its arithmetic is AdamW's, for those who read gradients in a form that
        `apply` does not take; else None."""
        ...

    def apply(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> None:
        """Update weight and moments from the gradient, which may be used as scratch.

        `steps_accumulated`: number of steps whose gradients each entry sums up, None for one. A
        second moment takes such a sum over c steps as c gradients of square g^2 / c each, which is
        what c noisy ones would have brought to it: beta2^c v + (1 - beta2^c) g^2 / c. It then is as
        old as the step count says, by which its bias is corrected."""
        ...

    def direction(
        self,
        old_weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The corrected update that `apply` has just multiplied by the learning rate, from the
        new moments and the weight before it (Algorithm 2, line 5 of the Radius paper).

        With `steps_accumulated` as in `apply`, the update that entries would have of single
        gradients: a first moment of sums over c steps is divided by sqrt(c), since noise makes it
        that much larger than one that missed no step."""
        ...


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), torch's fused kernel: lines
    1 to 4 of Algorithm 2 of the Radius paper, whose line 5 is `direction`."""

    beta1: float
    beta2: float
    eps: float
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    @property
    def adamw(self) -> AdamWConstants:
        return AdamWConstants(self.beta1, self.beta2, self.eps)

    def apply(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> None:
        exp_avg, exp_avg_sq = moments
        grad = self._for_both_moments(exp_avg, exp_avg_sq, grad, steps_accumulated)
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            [weight],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            # Filled on the device: copying a number there would wait for it.
            [torch.full((), float(hyper.t), device=weight.device)],
            lr=hyper.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=hyper.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def _for_both_moments(
        self,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        steps_accumulated: torch.Tensor | None,
    ) -> torch.Tensor:
        """The gradient to give a fused kernel so that the second moment takes it as c gradients:
        less than g, and what the first moment would then lack is added to that beforehand. Where c
        is 1 no bit changes."""
        if steps_accumulated is None:
            return grad
        assert self.beta1 > 0, "a first moment that forgets at once cannot be prepared"
        exp_avg_sq.mul_(torch.pow(self.beta2, steps_accumulated - 1))
        # 1 - beta2^c without the cancellation of a beta2 near 1.
        share = torch.expm1(steps_accumulated * math.log(self.beta2 or LEAST)).neg_()
        root = share.div_(steps_accumulated).div_(1 - self.beta2).sqrt_()
        root.masked_fill_(steps_accumulated == 1, 1.0)
        exp_avg.addcmul_(grad, 1 - root, value=(1 - self.beta1) / self.beta1)
        return grad.mul_(root)

    def direction(
        self,
        old_weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        exp_avg, exp_avg_sq = moments
        mean = exp_avg / (1 - self.beta1**hyper.t)
        if steps_accumulated is not None:
            mean.mul_(steps_accumulated.rsqrt())
        scale = (exp_avg_sq / (1 - self.beta2**hyper.t)).sqrt_().add_(self.eps)
        return mean.div_(scale).add_(old_weight, alpha=hyper.weight_decay)


@dataclass(frozen=True, kw_only=True)
class ApexAdamW(AdamW):
    """The same arithmetic by Apex's multi-tensor kernel. Raises `ConfigError` if Apex is absent."""

    def __post_init__(self) -> None:
        try:
            import amp_C  # noqa: F401  # pyright: ignore[reportMissingImports]
            import apex.multi_tensor_apply  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            raise missing_extra("apex (--optimizer-impl apex)", "gpu") from None
        except ImportError as error:
            raise ConfigError(
                f"apex: does not load, as if built for another torch: {error}"
            ) from None

    def apply(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> None:
        import amp_C  # pyright: ignore[reportMissingImports]
        from apex.multi_tensor_apply import (  # pyright: ignore[reportMissingImports]
            multi_tensor_applier,
        )

        grad = self._for_both_moments(moments[0], moments[1], grad, steps_accumulated)
        adam_w_mode, bias_correction = 1, 1
        multi_tensor_applier(
            amp_C.multi_tensor_adam,
            torch.zeros(1, dtype=torch.int32, device=weight.device),
            [[grad], [weight], [moments[0]], [moments[1]]],
            hyper.lr,
            self.beta1,
            self.beta2,
            self.eps,
            hyper.t,
            adam_w_mode,
            bias_correction,
            hyper.weight_decay,
        )


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Momentum without dampening; weight decay is decoupled, as in AdamW."""

    momentum: float
    moments: tuple[str, ...] = ("momentum",)

    @property
    def adamw(self) -> None:
        return None

    def apply(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> None:
        (velocity,) = moments
        velocity.mul_(self.momentum).add_(grad)
        weight.mul_(hyper.shrink).add_(velocity, alpha=-hyper.lr)

    def direction(
        self,
        old_weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        velocity = (
            moments[0] if steps_accumulated is None else moments[0] * steps_accumulated.rsqrt()
        )
        return torch.add(velocity, old_weight, alpha=hyper.weight_decay)
