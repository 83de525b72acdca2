"""The spans of layers that are recomputed together. Loads no torch, for the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.config.sections import RecomputeConfig


@dataclass(frozen=True)
class Span:
    """Layers [start, stop) of a stage that run as one, and are or are not recomputed as one."""

    start: int
    stop: int
    recomputed: bool


def recompute_spans(num_layers: int, recompute: RecomputeConfig | None) -> list[Span]:
    """Split the layers of a stage into spans as Megatron's full recomputation does.

    "uniform" makes every run of `recompute_num_layers` layers one recomputed span
    (CHECKPOINT-RESIDUAL-m, section 3.4 of "Low-Memory Neural Network Training"). "block" recomputes
    the first `recompute_num_layers` layers one by one. The default is uniform by one.
    """
    if recompute is None or recompute.recompute_granularity != "full":  # see `runs_by_operators`
        return [Span(i, i + 1, False) for i in range(num_layers)]
    assert recompute.recompute_method != "sqrt", "Config.resolve makes it uniform"
    size = recompute.recompute_num_layers or 1
    if recompute.recompute_method == "block":
        return [Span(i, i + 1, i < size) for i in range(num_layers)]
    return [Span(i, min(i + size, num_layers), True) for i in range(0, num_layers, size)]


def runs_by_operators(recompute: RecomputeConfig | None) -> bool:
    """Return whether `activation_checkpoint.run_blocks` runs the layers, instead of spans."""
    return recompute is not None and recompute.recompute_granularity not in (
        None,
        "full",
        "selective",
    )


def layers_again(num_layers: int, recompute: RecomputeConfig) -> tuple[int, int]:
    """Return how many layers of a chunk run again, and at how many ends of recomputed runs.

    A layer that runs again twice counts twice. Its collectives run again with it. `ops`, `no-norm`
    and `selective` recompute parts of a layer and no collective, and count none.
    """
    if not runs_by_operators(recompute):
        spans = [span for span in recompute_spans(num_layers, recompute) if span.recomputed]
        return sum(span.stop - span.start for span in spans), len(spans)
    if recompute.recompute_granularity in ("ops", "no-norm"):
        return 0, 0
    if recompute.recompute_granularity == "every":
        return num_layers, 0
    segments = -(-num_layers // (recompute.recompute_num_layers or 1))
    if recompute.recompute_granularity == "residual":
        return num_layers, segments
    # residual-star first finds the inputs of a segment's layers, then each layer once more.
    return num_layers + num_layers - segments, num_layers


def recomputes_attention(recompute: RecomputeConfig | None) -> bool:
    """Return whether each layer recomputes its attention, without the surrounding projections."""
    return recompute is not None and recompute.recompute_granularity == "selective"


def activations_kept(num_layers: int, interval: int) -> float:
    """Return N / ac + 1 + ac (AxoNN, Eq. 1), the layer outputs that the fullest stage keeps.

    As many microbatches as stages are in flight, each with an output for every `interval` = ac of
    the stage's N / G_inter layers: N / ac in all. Backward holds one recomputed run of ac layers
    and its input. The minimum, 2 sqrt(N) + 1, is at ac = sqrt(N).

    Eq. 1 counts one output per recomputed layer. In 16 bit it is 17, 34 sbh bytes to 2 sbh
    (Korthikanti et al. 2022, without attention scores), so shorter intervals may suit little memory
    better.
    """
    return num_layers / interval + 1 + interval


def factors(count: int) -> list[int]:
    """Return the divisors of `count` in ascending order."""
    return [factor for factor in range(1, count + 1) if count % factor == 0]


def checkpoint_interval(num_layers: int, held: int) -> int:
    """Return the factor of `held` nearest to sqrt(num_layers), of two the smaller, as AxoNN does.

    `held` is the number of layers of a stage (interleaved: of a chunk; uneven: of the fullest
    stage), at most `num_layers`. The rule misses the minimum of Eq. 1 if the root lies between the
    geometric and the arithmetic mean of the factors around it: 14 layers on 2 stages get 1 (Eq. 1:
    16), not 7 (Eq. 1: 10).
    """
    root = math.sqrt(num_layers)
    return min(factors(held), key=lambda factor: (abs(factor - root), factor))


def describe_interval(num_layers: int, held: int, interval: int) -> str:
    """Return a log line of the interval and of Eq. 1 for it and for the neighbouring factors."""
    around = [factor for factor in factors(held) if factor != interval]
    below, above = [f for f in around if f < interval][-1:], [f for f in around if f > interval][:1]
    others = [f"{f}: {activations_kept(num_layers, f):.4g}" for f in below + above]
    beside = f" (runs of {', of '.join(others)})" if others else ""
    return (
        f"runs of {interval} of {held} layers; by AxoNN's Eq. 1 a stage keeps "
        f"{activations_kept(num_layers, interval):.4g} outputs of a layer{beside}"
    )
