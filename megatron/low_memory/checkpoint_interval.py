"""Which layers are recomputed together, and how many. Loads no torch: the planner uses it too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.config.sections import RecomputeConfig


@dataclass(frozen=True)
class Span:
    """Layers [start, stop) of a stage that run as one; recomputed as one in backward or not."""

    start: int
    stop: int
    recomputed: bool


def recompute_spans(num_layers: int, recompute: RecomputeConfig | None) -> list[Span]:
    """Cut the layers of a stage into spans, as Megatron's full recomputation does.

    This is CHECKPOINT-RESIDUAL-m in section 3.4 of "Low-Memory Neural Network Training".

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
    """Return whether each layer recomputes its attention, without the projections around it."""
    return recompute is not None and recompute.recompute_granularity == "selective"


def activations_kept(num_layers: int, interval: int) -> float:
    """Eq. 1 of AxoNN, N / ac + 1 + ac: what the fullest stage keeps, in outputs of one layer.

    As many microbatches as stages are in flight, each with one output kept for every `interval` =
    ac of the stage's N / G_inter layers, N / ac in all; and backward holds one run of ac layers,
    made again, with its input. The derivative 1 - N / ac^2 is 0 at ac = sqrt(N) and the second one
    positive: no interval keeps less than that one, 2 sqrt(N) + 1.

    Eq. 1 takes what a layer that is made again holds for one output. In 16 bit it is 17 of them,
    34 sbh bytes to 2 sbh (Korthikanti et al. 2022, without attention scores), so with little memory
    shorter intervals than the root are worth a try.
    """
    return num_layers / interval + 1 + interval


def factors(count: int) -> list[int]:
    """What divides `count`, rising."""
    return [factor for factor in range(1, count + 1) if count % factor == 0]


def checkpoint_interval(num_layers: int, held: int) -> int:
    """Layers in a run that is recomputed as one.

    The factor of `held` nearest to the root of `num_layers`, of two the smaller.

    `held`: layers of a stage (interleaved: of a chunk; uneven stages: of the fullest), at most
    `num_layers`. Where sqrt(num_layers) lies between the geometric and the arithmetic mean of the
    two factors around it, the smaller is nearest and the larger the one that Eq. 1 wants: 14 layers
    on 2 stages get 1 (Eq. 1: 16) and not 7 (Eq. 1: 10); the rule is kept as the paper states it.
    """
    root = math.sqrt(num_layers)
    return min(factors(held), key=lambda factor: (abs(factor - root), factor))


def describe_interval(num_layers: int, held: int, interval: int) -> str:
    """For the log: the interval, what Eq. 1 says of it, and of the factors of `held` beside it."""
    around = [factor for factor in factors(held) if factor != interval]
    below, above = [f for f in around if f < interval][-1:], [f for f in around if f > interval][:1]
    others = [f"{f}: {activations_kept(num_layers, f):.4g}" for f in below + above]
    beside = f" (runs of {', of '.join(others)})" if others else ""
    return (
        f"runs of {interval} of {held} layers; by AxoNN's Eq. 1 a stage keeps "
        f"{activations_kept(num_layers, interval):.4g} outputs of a layer{beside}"
    )
