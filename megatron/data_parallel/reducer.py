"""How the mean of a gradient over data-parallel ranks is found: the reducer and its results.

Loads no torch, so that flags can be checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from megatron.data_parallel.bucket import GradBucket, Slice

if TYPE_CHECKING:
    import torch

    from megatron.data_parallel.exchange import Exchange
    from megatron.data_parallel.layout import BucketLayout
    from megatron.optimizer.update_rules import Hyper, UpdateRule


@dataclass(frozen=True)
class StepContext:
    """What a reducer may know of the step: `t`, the applied update it would become (Adam's t, from
    1), and `loss_scale`, the factor by which this step's gradients are too large.
    `layout_is_final`: the coordinates that exist now stay, so that state may be kept by them."""

    t: int
    loss_scale: float = 1.0
    layout_is_final: bool = True


@dataclass(frozen=True)
class IndexRange:
    """Positions `[start, stop)` of a bucket, all of which are sent; their values begin at `at`."""

    start: int
    stop: int
    at: int

    @property
    def values(self) -> slice:
        """Where its values lie in `ReducedGrad.values`."""
        return slice(self.at, self.at + self.stop - self.start)


class SparseIndex(Protocol):
    """Which positions of a flat bucket, in ascending order, a compact vector of values is for.

    How positions are kept is the index's own affair, so it also is what brings values, weights and
    moments together: int32 positions serve torch, a bitmap serves kernels.
    """

    @property
    def numel(self) -> int:
        """Number of positions."""
        ...

    @property
    def runs(self) -> Sequence[IndexRange]:
        """Ranges of which every position is sent in this step and whose corrected update the
        reducer may want; empty where it wants none."""
        ...

    def gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Write the entries of a bucket-sized tensor at the positions to `out`, of its dtype."""
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
        """Take the optimizer's step on bucket-sized weight and moments: `reduced.values` times
        `factor` are the gradient at the positions, `reduced.rest` says what the others get.
        "frozen" entries are left alone: their weight decay is the optimizer's own affair."""
        ...


def _all_are_there(stop: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class ReducedGrad:
    """The gradient of the global batch's mean loss with respect to a bucket: the mean over
    data-parallel ranks of what backward accumulated there, or its sum where each rank's loss was
    divided by the whole batch beforehand (`--predivide-loss`), the same but for rounding. Norm,
    clipping and optimizer read this and never `bucket.grad`.

    `values`: 1-D, in units of the scaled loss: the loss scale times too large. `index`: positions
    of the values in the bucket, or None for all of them. `unselected` tells what the positions
    outside `index` mean to the optimizer: a zero gradient ("zero"), or no gradient, so that moments
    stay and weights only decay ("frozen"). `steps_accumulated`: number of steps whose gradients
    each value sums up (fp32, as long as the values), None for one. `part`: the positions of the
    bucket that all of this is of, where other data-parallel ranks got the others; None for all.
    `wait_until`: blocks until the values before a place are there, as all mostly are
    (`ReducedGrads.begun`)."""

    values: torch.Tensor
    index: SparseIndex | None = None
    unselected: Literal["zero", "frozen"] = "zero"
    steps_accumulated: torch.Tensor | None = None
    part: Slice | None = None
    wait_until: Callable[[int], object] = field(default=_all_are_there, compare=False)


class Work(Protocol):
    """A reduction under way. Either of its methods is called, once every rank has told whether
    its gradients are finite."""

    def wait(self) -> ReducedGrad:
        """Block until the mean is there; the values belong to the bucket until zeroing."""
        ...

    def drop(self) -> None:
        """The gradients were not finite: let what is on its way end, there is no mean to take."""
        ...


@runtime_checkable
class PiecewiseWork(Work, Protocol):
    """A reduction of a bucket in pieces, each of which can be waited for by itself."""

    @property
    def pieces(self) -> Sequence[tuple[Slice, Work]]:
        """Where in the bucket each is, in order, and its own reduction."""
        ...


@dataclass(frozen=True)
class OptimizerUpdate:
    """The optimizer's corrected update of a bucket, for reducers that asked for it: it lies where
    the reduced gradient lay that the optimizer consumed; of a sparse one, in the index's runs."""

    slices: dict[str, Slice]
    values: torch.Tensor

    def update(self, name: str) -> torch.Tensor:
        """View of m^ / (sqrt(v^) + eps) + lambda w over the parameter's slice (SGD: momentum +
        lambda w), where the bucket was reduced whole."""
        return self.slices[name].of(self.values)


@dataclass(frozen=True, kw_only=True)
class PerEntryState:
    """State that goes by the entries of a parameter, for the checkpoint, which holds it in terms of
    the logical tensor, so that any grid can load it.

    `values()`: 1-D, one for each stored entry of the parameter `param` on this rank, in order,
    vocabulary padding left out; may be a view, good until the next step. `unless`: the name of
    state of the same parameter (bool, equal on all data-parallel ranks); entries at which that is
    True mean nothing, are not saved and come back as 0.
    """

    param: str
    values: Callable[[], torch.Tensor]
    unless: str = ""


@dataclass(frozen=True)
class ReducerStats:
    """Counters of one step on this rank. `bytes_sent` follows the ring model: an all-reduce of b
    bytes over n ranks sends 2 (n - 1) / n b, an all-gather (n - 1) times the rank's own bytes.
    `density`: entries sent over entries stored, of the whole model. `wait_seconds`: time for which
    `Work.wait` blocks the host, or on a GPU the stream, whose latest waits may count in the next
    step. `extra`: numbers of the path's own, of the whole model too, for log line and metrics file,
    under names that read well in both (`residual_norm`). `notes`: sentences for the log, each told
    once."""

    bytes_sent: int = 0
    density: float = 1.0
    wait_seconds: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()


class GradientReducer:
    """How the mean over data-parallel ranks is found. One instance serves all buckets of a rank.

    A stateless method implements `reduce` alone; every other method has a default that does
    nothing. A reducer never calls torch.distributed: `exchange` has its collectives and counts
    bytes and waiting times.

    `reduce` changes no state that is saved. `commit` changes it, once every rank agrees that the
    step is good; else `abort` is called. Buckets are reduced in index order on every rank.

    State that is equal on all data-parallel ranks is saved once (`shared_tensors`), state of each
    rank for each of them (`state_tensors`); both go by logical name and are independent of buckets.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    @property
    def overflow_bound(self) -> float | None:
        """For a reducer of plain means: how many times the largest entry of any rank's gradient a
        sum may reach on its way to the mean, but for rounding. Where that is known, some buckets
        may be updated while others are still being reduced. None: only after all are reduced."""
        return None

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        """Prepare for these buckets, in the entries of `layout`.

        Called before anything else, and again when other entries exist
        (`StepContext.layout_is_final` was False until then), when there is no state yet. A reducer
        that shards optimizer states gives the buckets their `shard` and the memory of their
        gradients. Collective over all ranks, except for no buckets at all."""

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        """Start finding the mean of `bucket.grad`; return without waiting for any collective."""
        raise NotImplementedError

    def wants_update(self, step: StepContext) -> bool:
        """Return whether `commit` needs the optimizer's corrected update at this step."""
        return False

    def commit(self, bucket: GradBucket, update: OptimizerUpdate | None) -> None:
        """Take into the state what was not sent: the step was applied."""

    def abort(self, bucket: GradBucket) -> None:
        """Forget the step, which is dropped on every rank: the state is as before `reduce`."""

    def inactive_reason(self, first: int, last: int) -> str:
        """Return why this path would do nothing that the dense path does not do in the updates
        `first` to `last`, with a way out, as one line of an error; "" where it does something."""
        return ""

    def stats(self, *, full: bool = False) -> ReducerStats:
        """Return the counters since the last call, and reset them. `full` adds to `extra` what
        takes a pass over the state to find. Collective over the model-parallel ranks."""
        sent, waited = self.exchange.take_counters()
        return ReducerStats(bytes_sent=sent, wait_seconds=waited)

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor | PerEntryState]]:
        """Yield state that is equal on all data-parallel ranks, by name.

        The name of `PerEntryState` ends in "/" and the name of their parameter. A plain tensor is
        equal on all ranks, model-parallel ones too, that have state of its name: the name must tell
        apart tensors that differ.
        """
        return iter(())

    def state_tensors(self) -> Iterator[tuple[str, PerEntryState]]:
        """Yield state of this data-parallel rank alone, by the name of the parameter: values that
        were not sent yet. Another number of data-parallel ranks gets the mean."""
        return iter(())

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        """Take back what `state_tensors` and `shared_tensors` yielded, on whatever ranks; plain
        tensors of other ranks' parts may be among them. Each is read as it is asked for."""
        assert not own, "a reducer without state of its own loads none"


class ReducedGrads(Protocol):
    """What was reduced in a step, one for each bucket, in index order. To ask for one may block
    until it is there; those before it are there then too."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> ReducedGrad: ...

    def __iter__(self) -> Iterator[ReducedGrad]: ...

    def begun(self, index: int, /) -> ReducedGrad:
        """One of them, of which the first values are there (`ReducedGrad.wait_until`)."""
        ...

    def clear(self) -> None:
        """Let go of all."""
        ...


@dataclass(kw_only=True)
class Step:
    """What the engine found out about a step. `norm`: global L2 norm of the mean gradient in
    unscaled units, not finite where the step is not ok. `factor`: what the optimizer multiplies
    each reduced value by (loss scale and clipping). `reduced`: the means, one for each bucket, in
    index order; none where a gradient was not finite. `request`: the largest of what the ranks
    asked for after this step, 0 for nothing.

    `arriving`: the step is ok, but sums may still be under way, and `norm` is NaN until the
    engine's `commit` or `abort`, which find it."""

    ok: bool
    norm: float
    factor: float
    request: int = 0
    reduced: ReducedGrads
    arriving: bool = False
