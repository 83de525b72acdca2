"""Update rules on flat chunks: AdamW (torch's or Apex's fused kernel) and SGD with momentum.

A rule is arithmetic only. `bucket_optimizer` chooses storage, order of chunks and destination, so
that a rule serves resident, compressed and offloaded states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from megatron.errors import ConfigError, missing_extra


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Hyperparameters that may change between steps. `t` counts applied updates from 1."""

    t: int
    lr: float
    weight_decay: float

    @property
    def shrink(self) -> float:
        """The factor of decoupled weight decay, which a rule without coupled decay applies."""
        return 1.0 - self.lr * self.weight_decay

    def decay(self, weight: torch.Tensor) -> Hyper:
        """Apply decoupled weight decay in place; return hyperparameters for the rest of the step.

        Decay needs no gradient, so weights decay in every step, also where moments are frozen.
        """
        if not self.weight_decay:
            return self
        weight.mul_(self.shrink)
        return replace(self, weight_decay=0.0)


class AdamWConstants(NamedTuple):
    """Hyperparameters of AdamW that are constant in a run."""

    beta1: float
    beta2: float
    eps: float


class UpdateRule(Protocol):
    """The arithmetic of an optimizer on 1-D fp32 tensors of equal length, changed in place."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the state per entry, as in checkpoints."""
        ...

    @property
    def adamw(self) -> AdamWConstants | None:
        """Constants of AdamW, for kernels that replace `apply`; None if the rule is not AdamW."""
        ...

    @property
    def decays_all(self) -> bool:
        """True if weight decay applies to all parameters, False if only to those that ask for it.

        The parameters that ask are matrices (`ParamInfo.weight_decay`).
        """
        ...

    def apply(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> None:
        """Update weight and moments in place; may use `grad` as scratch.

        `steps_accumulated` is the number of steps c whose gradients each entry sums, None for one.
        The second moment treats such a sum g as c gradients of square g^2 / c each, as c noisy
        gradients would give: beta2^c v + (1 - beta2^c) g^2 / c. Its bias correction by the step
        count then remains valid.
        """
        ...

    def direction(
        self,
        old_weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the corrected update that `apply` has just multiplied by the learning rate.

        `moments` are the new moments, `old_weight` is the weight before `apply` (Algorithm 2, line
        5 of the Radius paper). With `steps_accumulated`, the first moment is divided by sqrt(c),
        since noise makes a moment of sums over c steps larger by that factor.
        """
        ...


def accumulation_factors(steps: torch.Tensor, beta2: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors of Adam's second moment and of a gradient that sums c = `steps` steps.

    They are beta2^(c - 1) and sqrt((1 - beta2^c) / (c (1 - beta2))), fp32 as `steps`, and exactly 1
    where c is 1. Counts must be whole numbers from 1.
    """
    if steps.device.type != "cpu":
        return _factors(steps, beta2)
    # A CPU takes longer for powers than for the whole update, and the counts are few numbers.
    most = float(steps.amax()) if steps.numel() else 0.0
    counts = torch.arange(1.0, most + 1.0)
    places = (steps - 1.0).int()
    aged, root = (table.index_select(0, places) for table in _factors(counts, beta2))
    return aged, root


def _factors(steps: torch.Tensor, beta2: float) -> tuple[torch.Tensor, torch.Tensor]:
    # In fp64, since 1 - beta2^c cancels for a beta2 near 1.
    wide = steps.double()
    aged = torch.pow(beta2, wide - 1.0)
    root = ((1.0 - beta2 * aged) / (wide * (1.0 - beta2))).sqrt_()
    return aged.float(), root.float()


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), by torch's fused kernel.

    `apply` is lines 1 to 4 of Algorithm 2 of the Radius paper, `direction` is line 5.
    """

    beta1: float
    beta2: float
    eps: float
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    @property
    def adamw(self) -> AdamWConstants:
        return AdamWConstants(self.beta1, self.beta2, self.eps)

    @property
    def decays_all(self) -> bool:
        return False

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
            # Filled on the device, since a copy from the host would synchronize.
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
        """Prepare the moments, and return the gradient with which a fused kernel updates both."""
        if steps_accumulated is None:
            return grad
        # The kernel gets a smaller gradient, which suits the second moment; the difference is added
        # to the first moment beforehand. Where c is 1 no bit changes.
        assert self.beta1 > 0, "a first moment that forgets at once cannot be prepared"
        aged, root = accumulation_factors(steps_accumulated, self.beta2)
        exp_avg_sq.mul_(aged)
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
    """AdamW by Apex's multi-tensor kernel. Raises `ConfigError` if Apex is not installed."""

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
    """SGD with momentum, without dampening.

    With `coupled`, weight decay is an L2 term that is added to the gradient of every parameter, as
    in torch's SGD; otherwise it is decoupled, as in AdamW. With `nesterov`, the step is
    g + momentum * v with the new velocity v, as in torch's SGD (Sutskever et al. 2013, rewritten).
    """

    momentum: float
    nesterov: bool = False
    coupled: bool = False
    moments: tuple[str, ...] = ("momentum",)

    @property
    def adamw(self) -> None:
        return None

    @property
    def decays_all(self) -> bool:
        return self.coupled

    def apply(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> None:
        (velocity,) = moments
        if self.coupled and hyper.weight_decay:
            grad.add_(weight, alpha=hyper.weight_decay)
        velocity.mul_(self.momentum).add_(grad)
        step = grad.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        if not self.coupled:
            weight.mul_(hyper.shrink)
        weight.add_(step, alpha=-hyper.lr)

    def direction(
        self,
        old_weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        steps_accumulated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert not (self.nesterov or self.coupled), "the update is more than momentum and decay"
        velocity = (
            moments[0] if steps_accumulated is None else moments[0] * steps_accumulated.rsqrt()
        )
        return torch.add(velocity, old_weight, alpha=hyper.weight_decay)
