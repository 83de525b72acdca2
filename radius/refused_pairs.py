"""Settings that Radius cannot run with, each with its reason and the way out. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.config import RefusedPair

if TYPE_CHECKING:
    from megatron.config import Config

SEPARATE = "or leave radius_residual at separate"


def _pair(name: str, holds: Callable[[Config], object], reason: str, instead: str) -> RefusedPair:
    return RefusedPair(name=name, holds=holds, reason=reason, instead=instead)


def _in_place(
    other: str, holds: Callable[[Config], object], reason: str, instead: str
) -> RefusedPair:
    return _pair(
        f"radius_residual in-place with {other}",
        lambda c: _options(c).radius_residual == "in-place" and holds(c),
        reason,
        f"{instead}, {SEPARATE}",
    )


def _options(config: Config) -> Any:
    """Any: its class is declared where these pairs are offered."""
    return config.extensions["radius"]


def _sums_up(config: Config) -> bool:
    """Whether a resample sends the sum of several steps."""
    options = _options(config)
    return options.radius_residual != "none" and options.radius_density < 1


RADIUS_PAIRS: tuple[RefusedPair, ...] = (
    _pair(
        "radius_start_iter with radius_start_fraction",
        lambda c: None not in (_options(c).radius_start_iter, _options(c).radius_start_fraction),
        "Radius has one start",
        "give one of them",
    ),
    _pair(
        "radius_schedule rolling with adam_beta1 0",
        lambda c: (
            _options(c).radius_schedule == "rolling"
            and c.optimizer.optimizer == "adam"
            and c.optimizer.adam_beta1 == 0
        ),
        "sums of several steps enter the two moments apart, and the first has to last for that",
        "raise adam_beta1, or give --radius-schedule paper",
    ),
    _in_place(
        "radius_schedule rolling",
        lambda c: _options(c).radius_schedule == "rolling",
        "it sends a part of the residuals in every step",
        "give --radius-schedule paper",
    ),
    _in_place(
        "fp16",
        lambda c: c.precision.fp16,
        "the loss scale changes, and the gradient buffer holds several steps",
        "give --bf16",
    ),
    _in_place(
        "grad_reduce_in_bf16",
        lambda c: c.precision.grad_dtype == "bfloat16",
        "16 bit cannot sum up many steps",
        "drop --grad-reduce-in-bf16",
    ),
    _in_place(
        "skip_loss_spikes",
        lambda c: c.training.skip_loss_spikes is not None,
        "what a skipped step had added stays in the gradient buffer and is sent later",
        "drop --skip-loss-spikes",
    ),
    _in_place(
        "tensor_model_parallel_size or pipeline_model_parallel_size above 1",
        lambda c: c.parallel.model_parallel_size > 1,
        "sums over model-parallel ranks would add what waits in the gradient buffer once more in "
        "each step",
        "leave both at 1",
    ),
    _pair(
        "fp16 without accumulate_allreduce_grads_in_fp32",
        lambda c: c.precision.grad_dtype == "float16" and _sums_up(c),
        "a resample sends the sum of many steps times the loss scale, which overflows in 16 bit "
        "however far the scale falls, and no later resample would pass",
        "give --accumulate-allreduce-grads-in-fp32, or --radius-residual none",
    ),
)
"""Of `--grad-path radius`, for its check and for `--help-compat`."""
