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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from megatron.config import RecomputeConfig


@dataclass(frozen=True)
class Span:
    """Layers [start, stop) of a stage that run as one; recomputed as one in backward or not."""

    start: int
    stop: int
    recomputed: bool


def recompute_spans(num_layers: int, recompute: RecomputeConfig | None) -> list[Span]:
    """Cut the layers of a stage into spans as Megatron's full recomputation does.

    "uniform": every run of `recompute_num_layers` layers is one recomputed span. "block": the
    first `recompute_num_layers` layers are recomputed one by one, the others not at all. Without
    a method: uniform by one.
    """
    if recompute is None or recompute.recompute_granularity != "full":
        return [Span(i, i + 1, False) for i in range(num_layers)]
    assert recompute.recompute_method != "sqrt", "Config.resolve makes it uniform"
    size = recompute.recompute_num_layers or 1
    if recompute.recompute_method == "block":
        return [Span(i, i + 1, i < size) for i in range(num_layers)]
    return [Span(i, min(i + size, num_layers), True) for i in range(0, num_layers, size)]


def recomputes_attention(recompute: RecomputeConfig | None) -> bool:
    """Whether each layer recomputes its attention, without the projections around it."""
    return recompute is not None and recompute.recompute_granularity == "selective"


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)`, keeping only `args`; backward calls it again.

    The function must set its own random state and give the same result both times.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
