"""Activation checkpointing: keep the input of a run of layers, recompute the rest in backward.

"full" recomputes whole layers, in spans (`recompute_spans`), with the collectives in them: ranks
that share a layer recompute in one order. "selective" recomputes, in each layer, the part of
attention whose activations grow with the square of the sequence (`recomputes_attention`;
Korthikanti et al. 2022, 4.1).

Dropout needs no stash of generator states: each layer seeds its own stream
(`tensor_parallel.rng`), also when it runs again, so the stock function's state keeping is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)`, keeping only `args`; backward calls it again.

    The function must set its own random state and give the same result both times.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
