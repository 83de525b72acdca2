"""Activation checkpointing: keep the input of a run of layers, and recompute the rest in backward.

"full" recomputes whole layers in spans (`recompute_spans`), including their collectives; ranks that
share a layer recompute in the same order. "selective" recomputes, in each layer, the part of
attention whose activations grow quadratically with the sequence (`recomputes_attention`;
Korthikanti et al. 2022, 4.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)`, keep only `args`, and call it again in backward.

    `function` must set its own random state and give the same result both times.
    """
    # Layers seed their own dropout streams (`tensor_parallel.rng`), so no generator state is
    # stashed.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
