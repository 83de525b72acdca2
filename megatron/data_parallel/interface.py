"""The one swap point: which gradient coordinates exist, and how their mean over ranks is found.

Two independent choices make a gradient path: a `BucketLayout` says which coordinates of
each parameter are stored, a `GradientReducer` finds their mean over data-parallel ranks. A path is
a folder with these two (or the stock ones) and one line in `pretrain_gpt.GRADIENT_PATHS`.

Nothing here imports torch when it runs, so that flags can be checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from megatron.config.path_options import PathOptions
from megatron.data_parallel.bucket import GradBucket, ParamInfo, Slice

if TYPE_CHECKING:
    import torch

    from megatron.data_parallel.bucket_plan import ParamShape, PathBytes, RankShapes, StepTraffic
    from megatron.optimizer.rules import Hyper, UpdateRule
    from megatron.parallel.groups import ProcessGroups


@dataclass(frozen=True)
class StepContext:
    """What a reducer may know of the step: `t`, the applied update it would become (Adam's t,
    from 1), and `loss_scale`, the factor by which this step's gradients are too large. `settled`:
    the coordinates that exist now stay, so that state may be kept by them."""

    t: int
    loss_scale: float = 1.0
    settled: bool = True


@dataclass(frozen=True)
class Run:
    """Positions `[start, stop)` of a bucket, all of which are sent; their values begin at `at`."""

    start: int
    stop: int
    at: int

    @property
    def values(self) -> slice:
        """Where its values lie in `Reduced.values`."""
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
    def runs(self) -> Sequence[Run]:
        """Ranges of which every position is sent in this step and whose corrected update the
        reducer may want; empty where it wants none."""
        ...

    def gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Write the entries of a bucket-sized tensor at the positions to `out`, of its dtype."""
        ...

    def apply(
        self,
        rule: UpdateRule,
        reduced: Reduced,
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
class Reduced:
    """The gradient of the global batch's mean loss with respect to a bucket: the mean over
    data-parallel ranks of what backward accumulated there, or its sum where each rank's loss was
    divided by the whole batch beforehand (`--predivide-loss`), the same but for rounding. Norm,
    clipping and optimizer read this and never `bucket.grad`.

    `values`: 1-D, in units of the scaled loss: the loss scale times too large. `index`: positions
    of the values in the bucket, or None for all of them. `rest` tells what the positions outside
    `index` mean to the optimizer: a zero gradient ("zero"), or no gradient, so that moments stay
    and weights only decay ("frozen"). `gathered`: number of steps whose gradients each value sums
    up (fp32, as long as the values), None for one. `part`: the positions of the bucket that all of
    this is of, where other data-parallel ranks got the others; None for all. `until`: blocks until
    the values before a place are there, as all mostly are (`Means.begun`).
    """

    values: torch.Tensor
    index: SparseIndex | None = None
    rest: Literal["zero", "frozen"] = "zero"
    gathered: torch.Tensor | None = None
    part: Slice | None = None
    until: Callable[[int], object] = field(default=_all_are_there, compare=False)


class Work(Protocol):
    """A reduction under way. Either of its methods is called, once every rank has told whether
    its gradients are finite."""

    def wait(self) -> Reduced:
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
class BucketUpdate:
    """The optimizer's corrected update of a bucket, for reducers that asked for it: it lies where
    the reduced gradient lay that the optimizer consumed; of a sparse one, in the index's runs."""

    slices: dict[str, Slice]
    values: torch.Tensor

    def update(self, name: str) -> torch.Tensor:
        """View of m^ / (sqrt(v^) + eps) + lambda w over the parameter's slice (SGD: momentum +
        lambda w), where the bucket was reduced whole."""
        return self.slices[name].of(self.values)


class BucketLayout(Protocol):
    """Which coordinates of each parameter have a gradient, a master weight and moments."""

    def numel(self, name: str, param: torch.Tensor) -> int:
        """Number of stored entries of this parameter."""
        ...

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Write the stored entries of a dense tensor, cast to `out`'s dtype, into its slice."""
        ...

    def gather_add(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Add the stored entries of a dense gradient to its slice."""
        ...

    def scatter(self, name: str, flat: torch.Tensor, param: torch.Tensor) -> None:
        """Put stored entries back into the dense parameter, in place, cast to its dtype.

        Where `param` is itself a view of `flat` there is nothing to do."""
        ...

    def bind(self, name: str, flat: torch.Tensor, leaves: Sequence[torch.nn.Parameter]) -> None:
        """Fill the fp32 master slice `flat` from the parameter, once, before training. Where the
        parameter is fp32 and stored whole, make its leaves views of `flat` and save the copy."""
        ...

    def mask(self, name: str) -> torch.Tensor | None:
        """Which entries of the flattened parameter are stored (bool, 1-D, on the CPU); None where
        all are. Vocabulary padding is not, where there is a mask."""
        ...

    def fingerprint(self) -> str:
        """Hex digest of which coordinates exist; equal on every data-parallel rank."""
        ...


Masks = Mapping[str, "torch.Tensor"]
"""Which entries of parameters exist: bool, 1-D, one for each entry of the flattened parameter as it
lies in this rank's memory, by logical name. A parameter without a mask has all of its entries."""


@dataclass(frozen=True, kw_only=True)
class Entries:
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


class GradientReducer(Protocol):
    """How the mean over data-parallel ranks is found. One instance serves all buckets of a rank.

    `reduce` changes no state that is saved; `commit` does, once every rank agrees that the step
    is good, else `abort` is called. Buckets are reduced in index order on every rank.

    State that is equal on all data-parallel ranks is saved once, each rank's own for each of them;
    both go by logical name and say nothing of buckets. State of a parameter is `Entries`, and comes
    back as the stored entries that this rank has by then; a plain tensor is equal on all ranks,
    model-parallel ones too, that have state of its name, which must tell apart what is not.
    """

    @property
    def carries(self) -> bool:
        """Whether what is left in a bucket after a step is part of the next step's gradient: such a
        reducer empties buckets itself."""
        ...

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        """These are the buckets, in the coordinates of `layout`; called before anything else, and
        again when other coordinates exist (`StepContext.settled` was False until then), which finds
        no state. Collective over all ranks but for no buckets at all. A reducer that shards
        optimizer states gives them their `shard` and, with it, the memory of their gradients."""
        ...

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        """Start finding the mean of `bucket.grad`; returns without waiting for any collective."""
        ...

    def wants_update(self, step: StepContext) -> bool:
        """Whether `commit` needs the optimizer's corrected update at this step."""
        ...

    def commit(self, bucket: GradBucket, update: BucketUpdate | None) -> None:
        """The step was applied: take what was not sent into the state."""
        ...

    def abort(self, bucket: GradBucket) -> None:
        """The step is dropped on every rank: forget it; the state is as before `reduce`."""
        ...

    def why_idle(self, first: int, last: int) -> str:
        """Why this path would do nothing that the dense one does not in the updates `first` to
        `last`, with what would help, as an error's line; "" where it does something."""
        ...

    def stats(self, *, full: bool = False) -> ReducerStats:
        """Counters since the last call, which they are reset by; `full` adds to `extra` what takes
        a pass over the state to find. Collective over the model-parallel ranks."""
        ...

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor | Entries]]:
        """State equal on all data-parallel ranks for the checkpoint, by name; that of `Entries`
        ends in "/" and their parameter's."""
        ...

    def state_tensors(self) -> Iterator[tuple[str, Entries]]:
        """State of this data-parallel rank alone for the checkpoint, by the parameter's name: what
        was not sent yet. Data-parallel ranks that are more or fewer get the mean."""
        ...

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        """Take back what `state_tensors` and `shared_tensors` gave, on whatever ranks; plain
        tensors of other ranks' parts may be among them. Each is read as it is asked for."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rewiring:
    """Other coordinates: `layout` says which. What both layouts store is kept bit by bit, what is
    new starts from zero, and so does what was there but is `anew`: positions in the flattened
    parameter (int64), by name. With `reset_moments` all moments start from zero."""

    layout: BucketLayout
    reset_moments: bool = False
    anew: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])


class Rewirer(Protocol):
    """Changes which coordinates exist while a run goes on. Every data-parallel rank has one, sees
    the same weights and must decide the same."""

    @property
    def settled(self) -> bool:
        """Whether the coordinates that exist now stay for good."""
        ...

    def after_update(
        self, t: int, layout: BucketLayout, weights: Iterable[tuple[ParamInfo, torch.Tensor]]
    ) -> Rewiring | None:
        """What to change after the applied update `t`; None, mostly, for nothing. `weights` are
        the fp32 master weights of the stored entries, 1-D, found only as they are iterated over."""
        ...

    def why_idle(self, first: int, last: int) -> str:
        """As a reducer's: why nothing will change in the updates `first` to `last`, though the
        path is there for that; "" where something does, or has."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Numbers for log line and metrics since the last call, as `ReducerStats.extra`."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Sentences for the log since the last call."""
        ...

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor | Entries]]:
        """State for the checkpoint, as a reducer's that is equal on all data-parallel ranks."""
        ...

    def load_state_tensors(self, shared: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state_tensors` gave."""
        ...


@dataclass(frozen=True, kw_only=True)
class PathParts:
    """What a path builds for a run: its layout, its reducer, what changes the layout, if anything
    does, and sentences for the log.

    `growth`, of a reducer that finds plain means: how many times the largest entry of any rank's
    gradient a sum may reach on its way to the mean, but for rounding. Where that is known, some
    buckets may be updated while others are still on their way; None: only once all are there."""

    layout: BucketLayout
    reducer: GradientReducer
    rewirer: Rewirer | None = None
    notes: tuple[str, ...] = ()
    growth: float | None = None


class Saved(Protocol):
    """The checkpoint a run starts from, as far as a path may look at it; the run's model is that
    of the checkpoint. `same_path`: so are the gradient path and its settings."""

    @property
    def same_path(self) -> bool: ...

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """Names of its tensors: `param/NAME`, `mask/NAME`."""
        ...

    def read(
        self, name: str, start: Sequence[int] | None = None, stop: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor in its logical shape on the CPU, 0 where entries are not stored; of it the box
        `[start, stop)`, if one is given."""
        ...


Shapes = Mapping[str, tuple[int, ...]]
"""The shape of every parameter of the whole model, by logical name."""


class GradientPath(PathOptions, Protocol):
    """A value of `--grad-path`. The class that implements it imports torch only in `build`."""

    def check_files(self, config: Any, shapes: Callable[[], Shapes | None]) -> None:
        """Look at the files that the path will read, before the run is started.

        Args:
            config: The configuration.
            shapes: Returns the shapes of the model; None where these are not known yet.

        Raises:
            DataError: A file is missing, damaged or does not fit the model.
        """
        ...

    def build(
        self,
        config: Any,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        saved: Saved | None = None,
    ) -> PathParts:
        """Layout and reducer for these parameters, which hold their initial weights; `saved`: the
        checkpoint whose weights they will get instead."""
        ...

    def stored(self, config: Any, params: Iterable[ParamShape]) -> dict[str, int]:
        """For the planner, which has no torch: how many entries of the whole tensor exist, of each
        parameter that is stored in part."""
        ...

    def plan_bytes(self, config: Any, rank: RankShapes) -> PathBytes:
        """What the path keeps on this rank, to the byte where that does not depend on values: of
        what is chosen from tensors cut over ranks each is taken to have its share."""
        ...

    def plan_traffic(self, config: Any, rank: RankShapes) -> Sequence[StepTraffic]:
        """What a run's steps send on the data-parallel group, by kind of step, no step skipped."""
        ...


class Means(Protocol):
    """What was reduced in a step, one for each bucket, in index order. To ask for one may block
    until it is there; those before it are there then too."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Reduced: ...

    def __iter__(self) -> Iterator[Reduced]: ...

    def begun(self, index: int, /) -> Reduced:
        """One of them, of which the first values are there (`Reduced.until`)."""
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
    reduced: Means
    arriving: bool = False
