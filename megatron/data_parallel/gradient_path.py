"""The gradient path: a layout and a reducer under one value of `--grad-path`.

A `BucketLayout` defines which entries of each parameter exist; a `GradientReducer` averages their
gradients over data-parallel ranks. docs/extending.md shows how to write a path. This module does
not import torch, so that flags can be checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron.config import PathOptions
from megatron.data_parallel.bucket_plan import (
    BucketClass,
    ParamShape,
    PathBytes,
    RankShapes,
    StepTraffic,
    plan_means,
)

if TYPE_CHECKING:
    import torch

    from megatron.data_parallel.bucket import ParamInfo
    from megatron.data_parallel.exchange import Exchange
    from megatron.data_parallel.layout import BucketLayout
    from megatron.data_parallel.reducer import GradientReducer, PerEntryState
    from megatron.parallel.groups import ProcessGroups

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of all parameters of the whole model, by logical name."""


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """A change to another layout.

    Entries stored in both layouts keep their values, bit by bit where states are fp32 or plain
    bf16; other formats are encoded again. New entries start from zero.
    `reset_moments` sets all moments to zero; the number of applied updates, by which Adam corrects
    its moments, goes on.
    """

    layout: BucketLayout
    reset_moments: bool = False


class MaskUpdater:
    """Updater of masks during training; all data-parallel ranks must decide the same."""

    @property
    def layout_is_final(self) -> bool:
        """True if the layout will not change any more."""
        raise NotImplementedError

    def after_update(
        self, t: int, layout: BucketLayout, weights: Iterable[tuple[ParamInfo, torch.Tensor]]
    ) -> LayoutChange | None:
        """Return the layout change after the applied update `t`, or None.

        `weights` yields 1-D fp32 master weights of the stored entries, computed lazily.
        """
        raise NotImplementedError

    def inactive_reason(self, first: int, last: int) -> str:
        """Return why masks never change in the updates `first` to `last`, or "" if they may."""
        return ""

    def stats(self) -> Mapping[str, float]:
        """Return numbers for log line and metrics since the last call, as `ReducerStats.extra`."""
        return {}

    def notes(self) -> tuple[str, ...]:
        """Return sentences for the log since the last call."""
        return ()

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor | PerEntryState]]:
        """Yield checkpoint state that is equal on all data-parallel ranks."""
        return iter(())

    def load_state_tensors(self, shared: Mapping[str, torch.Tensor]) -> None:
        """Load the state that `state_tensors` yielded."""


@dataclass(frozen=True, kw_only=True)
class PathParts:
    """The parts that a path builds for a run; `notes` are sentences for the log."""

    layout: BucketLayout
    reducer: GradientReducer
    mask_updater: MaskUpdater | None = None
    notes: tuple[str, ...] = ()


class CheckpointView(Protocol):
    """The part of the initial checkpoint, which has the run's model, that a path may read.

    `same_path`: the checkpoint also has the run's gradient path and settings.
    """

    @property
    def same_path(self) -> bool: ...

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """Return the names of the tensors: `param/NAME`, `mask/NAME`."""
        ...

    def read(
        self, name: str, start: Sequence[int] | None = None, stop: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return a logical tensor or its box `[start, stop)` on the CPU; 0 for pruned entries."""
        ...


class GradientPath(PathOptions):
    """A value of `--grad-path`: its settings, and what it builds for a run.

    A path with a new reducer over all entries overrides `name` and `reducer`; everything else has a
    default. The module of a path must not import torch at top level: import torch inside
    `reducer` or `build`.
    """

    def check_files(self, config: Any, shapes: Callable[[], Shapes | None]) -> None:
        """Check the files that the path will read, before the run starts.

        Args:
            config: The configuration.
            shapes: Returns the shapes of the model, or None if the shapes are not known yet.

        Raises:
            DataError: A file is missing, damaged or does not fit the model.
        """

    def reducer(
        self,
        config: Any,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        exchange: Exchange,
    ) -> GradientReducer:
        """Return the reducer of a run.

        Args:
            config: The configuration.
            infos: The parameters of this rank.
            groups: The process groups of the grid.
            exchange: The collectives over data-parallel ranks.
        """
        raise NotImplementedError

    def build(
        self,
        config: Any,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        saved: CheckpointView | None = None,
    ) -> PathParts:
        """Build layout and reducer for the parameters, which hold their initial weights.

        Args:
            config: The configuration.
            infos: The parameters of this rank.
            groups: The process groups of the grid.
            saved: The checkpoint whose weights will replace the initial weights, if any.
        """
        from megatron.data_parallel.encoded_wire import open_exchange
        from megatron.data_parallel.layout import DenseLayout

        reducer = self.reducer(config, infos, groups, open_exchange(config, groups))
        return PathParts(layout=DenseLayout(), reducer=reducer)

    # ---- for the planner: no torch, no ranks ----------------------------------------------------

    def stored(self, config: Any, params: Iterable[ParamShape]) -> dict[str, int]:
        """Return the number of stored entries of the whole tensor, for partly stored parameters."""
        return {}

    def lends_grad(self, config: Any, kind: BucketClass) -> bool:
        """Return `GradBucket.lends_grad` of a bucket whose optimizer states are sharded."""
        return True

    def plan_bytes(self, config: Any, rank: RankShapes) -> PathBytes:
        """Return the memory of the path's own state on this rank, exact unless values decide.

        Entries selected from sharded tensors are assumed to be spread evenly over the ranks.
        """
        return PathBytes()

    def plan_traffic(self, config: Any, rank: RankShapes) -> Sequence[StepTraffic]:
        """Return the data-parallel traffic of a run without skipped steps, by kind of step."""
        return plan_means(config, rank)
