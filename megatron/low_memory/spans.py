"""Which layers are recomputed together. Loads no torch: the planner asks too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.config import RecomputeConfig


@dataclass(frozen=True)
class Span:
    """Layers [start, stop) of a stage that run as one; recomputed as one in backward or not."""

    start: int
    stop: int
    recomputed: bool


def recompute_spans(num_layers: int, recompute: RecomputeConfig | None) -> list[Span]:
    """Cut the layers of a stage into spans as Megatron's full recomputation does
    (CHECKPOINT-RESIDUAL-m in section 3.4 of "Low-Memory Neural Network Training").

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
