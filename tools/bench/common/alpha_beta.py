"""The time of a step by the alpha-beta model of the Radius paper, with overlap.

Nothing is fitted to predicted steps: alpha and beta come from all-reduces of two sizes, and the
times of gradients from steps that send nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AlphaBetaLink:
    """Latency in seconds, and seconds per byte, between any two of `ranks`."""

    alpha: float
    beta: float
    ranks: int

    def all_reduce(self, payload: float) -> float:
        """Return the seconds of a ring all-reduce of `payload` bytes (Radius paper, Eq. 3)."""
        n = self.ranks
        return 2 * self.alpha * (n - 1) + 2 * payload * self.beta * (n - 1) / n

    def all_gather(self, payload: float) -> float:
        """Return the seconds of a ring all-gather in which each rank gives `payload` bytes (Eq. 4).

        The paper's D is the total of all ranks.
        """
        n = self.ranks
        return self.alpha * n + n * payload * self.beta * (n - 1) / n


def fit(ranks: int, *, small: tuple[int, float], large: tuple[int, float]) -> AlphaBetaLink:
    """Fit the link to all-reduces of two sizes, each given as (bytes, seconds).

    A latency below zero, which only noise can cause, becomes zero.
    """
    slope = (large[1] - small[1]) / (large[0] - small[0])
    constant = max(0.0, small[1] - slope * small[0])
    return AlphaBetaLink(
        alpha=constant / (2 * (ranks - 1)), beta=slope * ranks / (2 * (ranks - 1)), ranks=ranks
    )


@dataclass(frozen=True, kw_only=True)
class AlphaBetaTimeline:
    """The times of a step that sends nothing, in seconds from its start.

    `ready` is the time at which the gradient of each parameter is complete, `backward` the end of
    backward and `step` the end of the step.
    """

    ready: Mapping[str, float]
    backward: float
    step: float


@dataclass(frozen=True, kw_only=True)
class AlphaBetaMessage:
    """A collective that takes `seconds` and may start when the gradients of `names` are complete.

    Without names it starts when backward ends.
    """

    seconds: float
    names: Sequence[str] = ()


def predict(
    timeline: AlphaBetaTimeline, messages: Iterable[AlphaBetaMessage], *, overlap: bool = True
) -> float:
    """Return the seconds of a step that sends these messages one after another.

    It is the step without communication, plus the communication left after backward.
    """
    end = 0.0
    for message in messages:
        start = timeline.backward
        if overlap and message.names:
            start = max(timeline.ready[name] for name in message.names)
        end = max(end, start) + message.seconds
    return timeline.step + max(0.0, end - timeline.backward)


def greedy_buckets(
    sizes: Iterable[tuple[str, float]], *, caps: Sequence[int]
) -> list[tuple[str, ...]]:
    """Return DDP's buckets of parameters (name, bytes), in order of arrival.

    A bucket is closed once it has reached its cap; the first caps are for the first buckets, the
    last for all others.
    """
    buckets: list[tuple[str, ...]] = []
    names: list[str] = []
    filled = 0.0
    for name, size in sizes:
        names.append(name)
        filled += size
        if filled >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(tuple(names))
            names, filled = [], 0
    return [*buckets, tuple(names)] if names else buckets
