"""One gradient bucket under Radius: its selection, its residual, and its message of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import partial

import numpy as np
import torch

from megatron.data_parallel.bucket import GradBucket
from megatron.data_parallel.norm import sum_of_squares
from megatron.data_parallel.reducer import PerEntryState
from megatron.sparse.selection import GivenSelection, Selection
from radius.bucket_index import BucketIndex, SentIndex
from radius.index import IndexPart, new_index
from radius.residual import Residual, add_scaled, squares

INDEX = "index/"
"""Prefix of the selection's state in a checkpoint, before the name of the parameter."""


class Phase(Enum):
    """The content of a bucket's message in a step."""

    WHOLE = "its gradient"
    RESAMPLE = "gradient and residual"
    SPARSE = "the selected entries of its gradient"
    ROLLING = "the selected entries, and one part of each matrix with its residual"


@dataclass
class RadiusBucket:
    """A bucket with its selection and residual, and the state of the current step.

    Attributes:
        parts: Its matrices; none if the bucket is always sent whole.
        bits: Whether the index is a bitmap.
        phase: Kind of message in this step.
        flushed: Parts that are sent whole; those with entries on this rank are the runs of `sent`.
        sent: Positions that are sent.
        steps_accumulated: As in `ReducedGrad`.
        mean: Copies of the mean gradient of each part, if entries are selected by it.
        flushed_norm: Squared norm of the residual that the latest step, which sent everything, has
            sent.
    """

    bucket: GradBucket
    parts: Sequence[IndexPart]
    residual: Residual
    bits: bool
    index: BucketIndex | None = None
    phase: Phase = Phase.WHOLE
    flushed: Sequence[IndexPart] = ()
    sent: SentIndex | None = None
    steps_accumulated: torch.Tensor | None = None
    mean: Sequence[torch.Tensor] = ()
    flushed_norm: torch.Tensor | None = None
    _kept: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _cuts: dict[int, Sequence[IndexPart]] = field(default_factory=dict[int, Sequence[IndexPart]])

    def cuts(self, number: int, parts: int, density: Fraction) -> Sequence[IndexPart]:
        """Return cut `number` of `parts` of each matrix that has any entries there.

        `parts` and `density` are the same in every call: cuts are kept, since making them in each
        step takes a CPU longer than launching the kernels that use them.
        """
        if number not in self._cuts:
            cuts = [part.cut(number, parts, density) for part in self.parts]
            self._cuts[number] = [cut for cut in cuts if cut.places.total]
        return self._cuts[number]

    # ---- sending -------------------------------------------------------------------------------

    def gather_chosen(self, loss_scale: float) -> torch.Tensor:
        """Return the selected entries of the gradient, which are what this step sends."""
        assert self.index is not None, "a sparse step comes after a resample"
        self.sent = self.index
        values = self._compact("values", self.index.numel, self.bucket.grad.dtype)
        self._gather(self.index, values, loss_scale)
        return values

    def gather_all(self, loss_scale: float) -> torch.Tensor:
        """Add the residual to the gradient in place, and return the gradient, as sent whole."""
        waiting = self.residual.waiting(self.index)
        if waiting is not None:
            self.flushed_norm = squares(waiting)
            add_scaled(self.bucket.grad, waiting, loss_scale)
        return self.bucket.grad

    def gather_rolling(self, flushed: Sequence[IndexPart], loss_scale: float) -> torch.Tensor:
        """Return the selected entries of the gradient, and all entries of `flushed` parts.

        The residual of those parts is added to the gradient in place first.
        """
        index, grad = self.index, self.bucket.grad
        assert index is not None, "a rolling step comes after a resample"
        for part in flushed:
            self.residual.join_part(index, part, loss_scale)
        self.flushed = flushed
        self.sent = index.flushed([(part.start, part.stop) for part in flushed if part.length])
        values = self._compact("values", self.sent.numel, grad.dtype)
        self._gather(self.sent, values, loss_scale)
        return values

    def _gather(self, sent: SentIndex, values: torch.Tensor, loss_scale: float) -> None:
        sent.gather(self.bucket.grad, values)
        self.residual.join_sent(sent, values, loss_scale)

    def count_steps(self, steps: int) -> None:
        """Fill `steps_accumulated` for the values of `gather_rolling`.

        An entry that is sent only because its part is flushed sums `steps` steps. The flushed part
        of the gradient was gathered already and serves as scratch.
        """
        index, sent, grad = self.index, self.sent, self.bucket.grad
        assert index is not None and sent is not None
        steps_accumulated = self._compact("steps_accumulated", sent.numel, torch.float32).fill_(1.0)
        here = [part for part in self.flushed if part.length]
        for part, run in zip(here, sent.runs, strict=True):
            not_chosen = grad[part.start : part.stop].fill_(1.0)
            index.clear_part(grad, part.start, part.length)
            steps_accumulated[run.values].add_(not_chosen, alpha=steps - 1)
        self.steps_accumulated = steps_accumulated

    def norm_per_step(self, values: torch.Tensor, steps: int) -> torch.Tensor:
        """Return the squared norm (fp64 []) of reduced values, with sums of c steps over sqrt(c).

        Noise makes a sum of c steps larger by that factor. In a resample, entries that were not
        selected before sum `steps` steps; in a rolling step, `steps_accumulated` says it.
        """
        if self.phase is Phase.RESAMPLE and self.index is not None:
            chosen = self._compact("values", self.index.numel, values.dtype)
            self.index.gather(values, chosen)
            single = sum_of_squares(chosen)
            return single + (sum_of_squares(values) - single) / steps
        counts = self.steps_accumulated
        if counts is None or self.sent is None:
            return sum_of_squares(values)
        total, done = sum_of_squares(values[:0]), 0
        for run in self.sent.runs:
            total += sum_of_squares(values[done : run.at])
            waited = values[run.values].float() * counts[run.values].rsqrt()
            total += sum_of_squares(waited)
            done = run.values.stop
        return total + sum_of_squares(values[done:])

    def prepare(self, loss_scale: float) -> None:
        """Compute the next residual while the selected entries travel (`Residual.prepare`)."""
        if self.sent is not None:
            self.residual.prepare(loss_scale)

    def forget_step(self) -> None:
        """Drop the state of the step."""
        self.flushed, self.sent, self.steps_accumulated, self.mean = (), None, None, ()

    def _compact(self, kind: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized vector for values to send.

        On a CPU it is kept for the next step: getting its pages from the system takes as long as
        filling it.
        """
        grad = self.bucket.grad
        if grad.device.type != "cpu":
            return grad.new_empty(numel, dtype=dtype)
        if kind not in self._kept or self._kept[kind].numel() < numel:
            self._kept[kind] = grad.new_empty(numel, dtype=dtype)
        return self._kept[kind][:numel]

    # ---- selecting -----------------------------------------------------------------------------

    def of_parts(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return views of a reduced vector for each part whose entries are selected again.

        These are the flushed parts, or all parts.
        """
        if self.sent is not None:
            runs = iter(self.sent.runs)
            return [
                values[next(runs).values] if part.length else values[:0] for part in self.flushed
            ]
        return [values[part.start : part.stop] for part in self.parts]

    def open_index(self) -> bool:
        """Create an empty index if the bucket has none; return whether it had one."""
        if self.index is not None:
            return True
        self.index = self.new_index()
        return False

    def new_index(self) -> BucketIndex:
        """Return an index of the bucket without selected entries."""
        return new_index(self.bucket.numel, self.bucket.grad.device, bits=self.bits)

    def choose(
        self, part: IndexPart, selection: Selection, *, compare: bool
    ) -> tuple[int, int | torch.Tensor]:
        """Select entries of a part.

        With `compare`, return how many entries of this rank were selected before, and how many of
        these are selected again.
        """
        assert self.index is not None, "opened at the first resample"
        if not compare:
            self.index.choose(part.start, selection)
            return 0, 0
        return self.index.choose_again(part.start, selection)

    # ---- state ---------------------------------------------------------------------------------

    def squared_norm(self) -> float:
        """Return the squared norm of the residual, unscaled; blocks the host.

        After a resample, which leaves no residual, it is that of the residual that was sent.
        """
        if self.flushed_norm is not None:
            return float(self.flushed_norm)
        waiting = self.residual.waiting(self.index)
        return 0.0 if waiting is None else float(squares(waiting))

    def chosen_state(self) -> Iterator[tuple[str, PerEntryState]]:
        """Yield the selection of each part (bool), by its name in a checkpoint."""
        if self.index is not None:
            for part in self.parts:
                values = partial(self.chosen, part)
                yield f"{INDEX}{part.name}", PerEntryState(param=part.name, values=values)

    def waiting_state(self) -> Iterator[tuple[str, PerEntryState]]:
        """Yield the residual of each part by parameter name; nothing if it is zero for certain."""
        waiting = self.residual.waiting(self.index)
        if waiting is None:
            return
        for part in self.parts:
            values = partial(_within, waiting, part)
            unless = "" if self.residual.keeps_sent else f"{INDEX}{part.name}"
            yield part.name, PerEntryState(param=part.name, values=values, unless=unless)

    def chosen(self, part: IndexPart) -> torch.Tensor:
        """Return whether each entry of a part is selected: bool, on the CPU. Blocks the host."""
        if self.index is None:
            return torch.zeros(part.length, dtype=torch.bool)
        bits = np.unpackbits(self.index.packed(part.start, part.length).numpy(), count=part.length)
        return torch.from_numpy(bits.view(np.bool_))

    def load(
        self,
        own: Mapping[str, torch.Tensor],
        shared: Mapping[str, torch.Tensor],
        *,
        has_index: bool,
    ) -> None:
        """Load the selection from `shared` and the residual from `own`; a missing residual is 0.

        `has_index`: entries were selected already.
        """
        if not self.parts:
            return
        self.index = self.new_index() if has_index else None
        for part in self.parts:
            if self.index is not None:
                self.index.choose(part.start, GivenSelection(shared[f"{INDEX}{part.name}"]))
        self.residual.empty()
        for part in self.parts:
            if part.name in own:
                _within(self.residual.open(), part).copy_(own[part.name])


def _within(flat: torch.Tensor, part: IndexPart) -> torch.Tensor:
    return flat[part.start : part.stop]
