"""The update of one chunk whose states were read into fp32, with a dense or a sparse gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.data_parallel.reducer import ReducedGrad, SparseIndex
from megatron.optimizer.update_rules import Hyper, UpdateRule


@dataclass(frozen=True)
class GradChunk:
    """The gradient of a chunk.

    Attributes:
        values: fp32 [n], 0 where nothing was sent; an update may overwrite them.
        sent: bool [n]: which entries have a gradient; the others are frozen. None for all.
        steps_accumulated: fp32 [n]: the number of steps that each value sums; None for one.
    """

    values: torch.Tensor
    sent: torch.Tensor | None = None
    steps_accumulated: torch.Tensor | None = None


class SparseGrad:
    """The gradient times `factor` of a bucket that was sent in part, chunk by chunk."""

    def __init__(self, index: SparseIndex, reduced: ReducedGrad, factor: float) -> None:
        self._index, self._reduced, self._factor = index, reduced, factor
        self._counts = reduced.steps_accumulated
        if self._counts is None and reduced.unselected == "frozen":
            self._counts = torch.ones_like(reduced.values, dtype=torch.float32)

    def cut(self, cut: slice) -> GradChunk:
        """Return the gradient of positions `cut` of the bucket."""
        index, start, stop = self._index, cut.start, cut.stop
        values = index.expand(self._reduced.values, start, stop, scale=self._factor)
        if self._reduced.unselected == "zero":
            return GradChunk(values)
        assert self._counts is not None
        counts = index.expand(self._counts, start, stop)
        sent = counts > 0
        if self._reduced.steps_accumulated is None:
            return GradChunk(values, sent)
        return GradChunk(values, sent, counts.clamp_(min=1))


def update_chunk(
    rule: UpdateRule, states: Sequence[torch.Tensor], grad: GradChunk, hyper: Hyper
) -> None:
    """Update the weight and the moments, fp32 [n] each, in place; frozen weights only decay."""
    weight, *moments = states
    if grad.sent is None:
        rule.apply(weight, grad.values, moments, hyper)
        return
    hyper = hyper.decay(weight)
    new = [state.clone() for state in states]
    rule.apply(new[0], grad.values, new[1:], hyper, grad.steps_accumulated)
    for state, changed in zip(states, new, strict=True):
        torch.where(grad.sent, changed, state, out=state)


def fill_runs(index: SparseIndex, reduced: ReducedGrad, cut: slice, update: torch.Tensor) -> None:
    """Overwrite the sent values of runs by the corrected update of positions `cut`."""
    for run in index.runs:
        start, stop = max(run.start, cut.start), min(run.stop, cut.stop)
        if start < stop:
            at = run.at - run.start
            reduced.values[start + at : stop + at] = update[start - cut.start : stop - cut.start]
