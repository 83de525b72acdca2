"""The interface of reducers, which average gradients over data-parallel ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from megatron.data_parallel.bucket import GradBucket, Slice

if TYPE_CHECKING:
    import torch

    from megatron.data_parallel.exchange import Exchange
    from megatron.data_parallel.layout import BucketLayout
    from megatron.optimizer.update_rules import Hyper, UpdateRule


@dataclass(frozen=True)
class StepContext:
    """The facts about a step that a reducer may use: gradients are multiplied by `loss_scale`.

    `t` is the number of the update that the step would become (Adam's t, from 1).
    `layout_is_final`: stored entries will not change any more, so that state may be kept by entry.
    """

    t: int
    loss_scale: float = 1.0
    layout_is_final: bool = True


@dataclass(frozen=True)
class IndexRange:
    """Selected positions `[start, stop)` of a bucket, whose values begin at `at`."""

    start: int
    stop: int
    at: int

    @property
    def values(self) -> slice:
        """Slice of `ReducedGrad.values` that holds the values of the range."""
        return slice(self.at, self.at + self.stop - self.start)


class SparseIndex(Protocol):
    """The positions of a flat bucket, in ascending order, to which a compact vector belongs.

    The index chooses how to store positions, so it also combines values with weights and moments:
    int32 positions suit torch, a bitmap suits kernels.
    """

    @property
    def numel(self) -> int:
        """Number of positions."""
        ...

    @property
    def runs(self) -> Sequence[IndexRange]:
        """Fully selected ranges whose corrected update the reducer may want; may be empty."""
        ...

    def gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Write the selected entries of a bucket-sized tensor to `out`, which has its dtype."""
        ...

    def expand(
        self, values: torch.Tensor, start: int, stop: int, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Return `values` times `scale` at positions in `[start, stop)`, and 0 elsewhere.

        fp32 [stop - start], a tensor of its own.
        """
        ...

    def apply(
        self,
        rule: UpdateRule,
        reduced: ReducedGrad,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        *,
        factor: float,
    ) -> None:
        """Apply the update rule in place to the bucket-sized `weight` and `moments`.

        `reduced.values` times `factor` is the gradient at the positions; `reduced.unselected`
        defines the rest. Weights of "frozen" entries decay, and their moments stay.
        """
        ...


def _all_are_there(stop: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class ReducedGrad:
    """The gradient of the mean loss of the global batch with respect to a bucket.

    The gradient is the mean over data-parallel ranks or, up to rounding equally, the sum where each
    rank's loss was divided by the whole batch (`--predivide-loss`). Norm, clipping and optimizer
    read this object, never `bucket.grad`.

    Attributes:
        values: 1-D, multiplied by the loss scale.
        index: Positions of the values in the bucket, or in `part`; None for all positions.
        unselected: Gradient outside `index`: zero ("zero"), or none, so that moments stay and
            weights only decay ("frozen").
        steps_accumulated: Number of steps that each value sums (fp32, 1-D); None for one step.
        part: Positions of the bucket that this rank got, if other data-parallel ranks got the
            others.
        squared_norm: The sum of squares by which gradients are clipped (fp64 []); None for that of
            `values`.
        wait_until: Blocks until `values[:stop]` have arrived; a no-op unless from
            `ReducedGrads.begun`.
    """

    values: torch.Tensor
    index: SparseIndex | None = None
    unselected: Literal["zero", "frozen"] = "zero"
    steps_accumulated: torch.Tensor | None = None
    part: Slice | None = None
    squared_norm: torch.Tensor | None = None
    wait_until: Callable[[int], object] = field(default=_all_are_there, compare=False)


class Work(Protocol):
    """A reduction in progress; one of its methods is called once ranks agree on the gradients."""

    def wait(self) -> ReducedGrad:
        """Block until the mean has arrived; its values are valid until `commit` or `abort`."""
        ...

    def drop(self) -> None:
        """Let the reduction of non-finite gradients end, without a result."""
        ...


@dataclass
class PiecewiseWork:
    """A `Work` in place into `values`, in pieces that can be waited for one at a time.

    `pieces` are the slices of the bucket, in order, with the reduction of each.
    """

    values: torch.Tensor
    pieces: Sequence[tuple[Slice, Work]]

    def wait(self) -> ReducedGrad:
        for _, work in self.pieces:
            work.wait()
        return ReducedGrad(values=self.values)

    def drop(self) -> None:
        self.wait()


@dataclass(frozen=True, kw_only=True)
class PerEntryState:
    """Checkpoint state with one value per stored entry of the parameter `param`.

    It is saved as a logical tensor, which any grid can load. `values()` returns a 1-D tensor of
    this rank's stored entries in order, without vocabulary padding; it may be a view that is valid
    until the next step. `unless` names a bool state of the same parameter, equal on all
    data-parallel ranks; entries where that state is True are not saved and load as 0. `sharded`:
    `values()` returns only the entries of `GradBucket.kept_of`, and the ranks with the other shards
    have the others; all entries are loaded.
    """

    param: str
    values: Callable[[], torch.Tensor]
    unless: str = ""
    sharded: bool = False


@dataclass(frozen=True)
class ReducerStats:
    """Counters of one step on this rank.

    `bytes_sent` follows the ring model (see `Exchange`). `density` is entries sent divided by
    entries stored, of the whole model. `wait_seconds` is the time for which `Work.wait` blocks the
    host, or on a GPU the stream, whose latest waits may count in the next step. `extra` has the
    path's own numbers for the whole model, under names for log line and metrics file
    (`residual_norm`). `notes` are new sentences for the log.
    """

    bytes_sent: int = 0
    density: float = 1.0
    wait_seconds: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()


class GradientReducer:
    """Base class of reducers; one instance serves all buckets of a rank.

    A stateless reducer implements only `reduce`; every other method has a default that does
    nothing. A reducer never calls torch.distributed: `exchange` provides collectives and counts
    bytes and waits.

    `reduce` does not change saved state. Once all ranks agree, either `commit` changes it or
    `abort` is called. Every rank reduces buckets in index order. State that is equal on all
    data-parallel ranks is saved once (`shared_tensors`), per-rank state for each rank
    (`state_tensors`); both are keyed by logical name, independent of buckets.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    @property
    def overflow_bound(self) -> float | None:
        """Maximum ratio of a plain mean's partial sum to the largest entry of any rank's gradient.

        Rounding is not included. If the ratio is known, some buckets may be updated while others
        are still being reduced. None: the update waits until all buckets are reduced.
        """
        return None

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        """Prepare for these buckets, in the entries of `layout`.

        Called first, and again, before there is state, when the layout changes
        (`StepContext.layout_is_final` was False until then). A reducer that shards optimizer states
        sets `shard`, `storage` and `grad` of the buckets. Collective over all ranks, unless
        `buckets` is empty.
        """

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        """Start to average `bucket.grad`; must not wait for any collective."""
        raise NotImplementedError

    def lends_grad(self, bucket: GradBucket) -> bool:
        """Return whether updated values may overwrite the gradients of a bucket before `commit`."""
        return True

    def wants_update(self, step: StepContext) -> bool:
        """Return whether `commit` needs the optimizer's corrected update at this step."""
        return False

    def commit(self, bucket: GradBucket, update: torch.Tensor | None) -> None:
        """Save in the state the values that were not sent; the step was applied.

        Args:
            bucket: The bucket, as it was given to `reduce`.
            update: With `wants_update`, the optimizer's corrected update, m^ / (sqrt(v^) + eps) +
                lambda w (of SGD: momentum + lambda w), which has overwritten `ReducedGrad.values`
                and has their shape and dtype. For a sparse gradient it is in the runs of the index
                only, with sharded optimizer states at the positions `GradBucket.kept` only. A
                bucket with `GradBucket.lends_grad` has none.
        """

    def abort(self, bucket: GradBucket) -> None:
        """Restore the state before `reduce`; every rank drops the step."""

    def inactive_reason(self, first: int, last: int) -> str:
        """Return why this path acts as the dense path in the updates `first` to `last`, else "".

        The text is one line of an error and names a way out.
        """
        return ""

    def stats(self, *, full: bool = False) -> ReducerStats:
        """Return and reset the counters since the last call.

        `full` adds numbers that need a pass over the state. Collective over the model-parallel
        ranks.
        """
        sent, waited = self.exchange.take_counters()
        return ReducerStats(bytes_sent=sent, wait_seconds=waited)

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor | PerEntryState]]:
        """Yield named state that is equal on all data-parallel ranks.

        The name of a `PerEntryState` ends in "/" and the name of its parameter. A plain tensor must
        be equal on all ranks, including model-parallel ranks, that have state of its name.
        """
        return iter(())

    def state_tensors(self) -> Iterator[tuple[str, PerEntryState]]:
        """Yield unsent values of this rank by parameter; another number of ranks loads the mean."""
        return iter(())

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        """Load state from `state_tensors` and `shared_tensors`, possibly saved on another grid.

        Plain tensors of other ranks may be included. Each tensor is read when it is accessed.
        """
        assert not own, "a reducer without state of its own loads none"


class ReducedGrads(Protocol):
    """The reduced gradients of a step, in bucket order; access blocks until arrival."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> ReducedGrad: ...

    def __iter__(self) -> Iterator[ReducedGrad]: ...

    def begun(self, index: int, /) -> ReducedGrad:
        """Return a gradient that may still be arriving; call its `wait_until` before each read."""
        ...

    def clear(self) -> None:
        """Release all gradients."""
        ...


@dataclass(kw_only=True)
class Step:
    """The result of a step's agreement.

    `ok`: the step may be applied. `norm` is the global L2 norm of the unscaled mean gradient, not
    finite if the step is not ok. `factor` multiplies reduced values in the optimizer (loss scale
    and clipping). `request` is the largest request of all ranks for after this step, 0 for none.
    `reduced` has the reduced gradients by bucket, none if a gradient was not finite. `arriving`:
    the step is ok, but sums may still be in progress; `norm` is NaN until `commit` or `abort` of
    the engine.

    With local steps (`--grad-path diloco`) `ok`, `norm` and `factor` are those of this rank's copy
    of the model, and `replicas_skipped` is the number of copies whose step is not ok.
    """

    ok: bool
    norm: float
    factor: float
    request: int = 0
    reduced: ReducedGrads
    arriving: bool = False
    replicas_skipped: int = 0
