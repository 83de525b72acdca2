"""Settings that the baselines refuse. Imports no torch."""

from __future__ import annotations

from megatron.config import RefusedPair

BASELINE_PAIRS: tuple[RefusedPair, ...] = (
    RefusedPair(
        name="grad_wire",
        holds=lambda c: c.gradient.grad_wire is not None,
        reason="the baselines encode gradients in their own way",
        instead="drop it, or give --grad-path dense, samo or radius",
    ),
)
"""Pairs of `--grad-path topk` and `--grad-path powersgd`, see `GradientPath.refused_pairs`."""
