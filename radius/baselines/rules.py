"""Settings that the baselines refuse. Imports no torch."""

from __future__ import annotations

from typing import Any

from megatron.config import RefusedPair
from radius.baselines.message_bytes import FactorRank


def _has_two_ranks(config: Any) -> bool:
    """Return whether PowerSGD's options have a rank that is not the default, and a share."""
    options = config.extensions["powersgd"]
    return options.powersgd_rank != FactorRank.rank and options.powersgd_rank_share is not None


def _takes_sign(config: Any) -> bool:
    """Return whether the optimizer gets DeMo's sign."""
    return config.extensions["demo"].demo_sign


BASELINE_PAIRS: tuple[RefusedPair, ...] = (
    RefusedPair(
        name="grad_wire",
        holds=lambda c: c.gradient.grad_wire is not None,
        reason="the baselines encode gradients in their own way",
        instead="drop it, or give --grad-path dense, samo or radius",
    ),
)
"""Pairs of every baseline, see `GradientPath.refused_pairs`."""

POWERSGD_PAIRS: tuple[RefusedPair, ...] = (
    *BASELINE_PAIRS,
    RefusedPair(
        name="powersgd_rank with powersgd_rank_share",
        holds=_has_two_ranks,
        reason="a matrix has one rank",
        instead="give one of them",
    ),
)
"""Pairs of `--grad-path powersgd`. The default of powersgd_rank counts as not given."""

ROUNDROBIN_PAIRS: tuple[RefusedPair, ...] = (
    *BASELINE_PAIRS,
    RefusedPair(
        name="grad_path roundrobin with adam_beta1 0",
        holds=lambda c: c.optimizer.optimizer == "adam" and c.optimizer.adam_beta1 == 0,
        reason="sums of several steps enter the two moments apart, and the first has to last for "
        "that",
        instead="raise adam_beta1, or give another --grad-path",
    ),
    RefusedPair(
        name="grad_path roundrobin with exp_avg_dtype or exp_avg_sq_dtype int8",
        holds=lambda c: "int8" in c.optimizer.moment_dtypes,
        reason="moments of rows that are not sent are frozen, but int8 moments share a scale with "
        "sent ones and are rounded again in every step",
        instead="give bf16 instead, or another --grad-path",
    ),
    RefusedPair(
        name="grad_path roundrobin with sgd_weight_decay coupled",
        holds=lambda c: (
            c.optimizer.optimizer == "sgd" and c.optimizer.sgd_weight_decay == "coupled"
        ),
        reason="rows that are not sent have no gradient to which an L2 term could be added",
        instead="give --sgd-weight-decay decoupled, or another --grad-path",
    ),
)
"""Pairs of `--grad-path roundrobin`."""

DEMO_PAIRS: tuple[RefusedPair, ...] = (
    *BASELINE_PAIRS,
    RefusedPair(
        name="demo_sign with optimizer adam",
        holds=lambda c: _takes_sign(c) and c.optimizer.optimizer != "sgd",
        reason="Adam would divide signs by the root of their mean square, which is about 1",
        instead="give --optimizer sgd --sgd-momentum 0 --clip-grad 0, or --demo-sign false",
    ),
    RefusedPair(
        name="demo_sign with sgd_momentum",
        holds=lambda c: (
            _takes_sign(c) and c.optimizer.optimizer == "sgd" and c.optimizer.sgd_momentum != 0
        ),
        reason="DeMo has a momentum of its own, and the sign is the update",
        instead="give --sgd-momentum 0, or --demo-sign false",
    ),
    RefusedPair(
        name="demo_sign with clip_grad",
        holds=lambda c: _takes_sign(c) and c.optimizer.clip_grad > 0,
        reason="a sign has no length to clip, and the norm is that of the mean before the sign",
        instead="give --clip-grad 0, or --demo-sign false",
    ),
    RefusedPair(
        name="grad_path demo with fp16 without accumulate_allreduce_grads_in_fp32",
        holds=lambda c: c.precision.grad_dtype == "float16",
        reason="a coefficient sums a chunk of the momentum of many steps times the loss scale, "
        "which overflows in 16 bit however far the scale falls",
        instead="give --accumulate-allreduce-grads-in-fp32, or another --grad-path",
    ),
)
"""Pairs of `--grad-path demo`."""
