"""The gradient path: a layout and a reducer under one value of `--grad-path`.

Two independent choices make a path: a `BucketLayout` says which entries of each parameter exist, a
`GradientReducer` finds their mean over data-parallel ranks. docs/extending.md writes one. Nothing
here loads torch, so that flags can be checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron.data_parallel.bucket_plan import (
    ParamShape,
    PathBytes,
    RankShapes,
    StepTraffic,
    plan_means,
)

if TYPE_CHECKING:
    import torch

    from megatron.config.validate import Alternatives, RefusedPair
    from megatron.data_parallel.bucket import ParamInfo
    from megatron.data_parallel.exchange import Exchange
    from megatron.data_parallel.layout import BucketLayout
    from megatron.data_parallel.reducer import GradientReducer, PerEntryState
    from megatron.parallel.groups import ProcessGroups

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of every parameter of the whole model, by logical name."""


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """Other coordinates: `layout` says which. What both layouts store is kept bit by bit, what is
    new starts from zero, and so does what was there but is `anew`: positions in the flattened
    parameter (int64), by name. With `reset_moments` all moments start from zero."""

    layout: BucketLayout
    reset_moments: bool = False
    anew: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])


class MaskUpdater:
    """Changes which entries exist while a run goes on. Every data-parallel rank has one, sees the
    same weights and must decide the same."""

    @property
    def layout_is_final(self) -> bool:
        """Whether the entries that exist now stay for good."""
        raise NotImplementedError

    def after_update(
        self, t: int, layout: BucketLayout, weights: Iterable[tuple[ParamInfo, torch.Tensor]]
    ) -> LayoutChange | None:
        """Return what to change after the applied update `t`; None, mostly, for nothing. `weights`
        are the fp32 master weights of the stored entries, 1-D, found only as they are iterated
        over."""
        raise NotImplementedError

    def inactive_reason(self, first: int, last: int) -> str:
        """As `GradientReducer.inactive_reason`: why nothing will change in the updates `first` to
        `last`, though the path is there for that; "" where something does, or has."""
        return ""

    def stats(self) -> Mapping[str, float]:
        """Return numbers for log line and metrics since the last call, as `ReducerStats.extra`."""
        return {}

    def notes(self) -> tuple[str, ...]:
        """Return sentences for the log since the last call."""
        return ()

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor | PerEntryState]]:
        """Yield state for the checkpoint, as a reducer's that is equal on all data-parallel
        ranks."""
        return iter(())

    def load_state_tensors(self, shared: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state_tensors` yielded."""


@dataclass(frozen=True, kw_only=True)
class PathParts:
    """What a path builds for a run: its layout, its reducer, the mask updater that changes the
    layout, if there is one, and sentences for the log."""

    layout: BucketLayout
    reducer: GradientReducer
    mask_updater: MaskUpdater | None = None
    notes: tuple[str, ...] = ()


class CheckpointView(Protocol):
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


class GradientPath:
    """A value of `--grad-path`, with the settings that it adds.

    A path of a new reducer over all entries overrides `name` and `reducer`; everything else has a
    default. The module of a path must not load torch: import torch inside `layout`, `reducer` or
    `build`.
    """

    name: str
    """The value of the flag."""
    sections: Mapping[str, type] = {}
    """Sections of the configuration file by name, each a frozen dataclass of options with one flag
    for each field. Paths may share a section."""
    refused_pairs: Sequence[RefusedPair] = ()
    """Settings that exclude each other on this path, in addition to those that exclude each other
    everywhere. `--help-compat` prints these pairs; `parse` checks them before `check`."""
    alternatives: Sequence[Alternatives] = ()
    """Settings of this path of which a run has one: a flag replaces the others in the file."""

    def check(self, config: Any) -> None:
        """Raise `ConfigError` for settings with which this path cannot run."""

    def check_files(self, config: Any, shapes: Callable[[], Shapes | None]) -> None:
        """Look at the files that the path will read, before the run is started.

        Args:
            config: The configuration.
            shapes: Returns the shapes of the model; None where these are not known yet.

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
            saved: The checkpoint whose weights the parameters will get instead.
        """
        from megatron.data_parallel.exchange import Exchange
        from megatron.data_parallel.layout import DenseLayout

        reducer = self.reducer(config, infos, groups, Exchange(groups.dp))
        return PathParts(layout=DenseLayout(), reducer=reducer)

    # ---- for the planner: no torch, no ranks ----------------------------------------------------

    def stored(self, config: Any, params: Iterable[ParamShape]) -> dict[str, int]:
        """Return how many entries of the whole tensor exist, for each parameter that is stored in
        part."""
        return {}

    def plan_bytes(self, config: Any, rank: RankShapes) -> PathBytes:
        """Return what the path keeps on this rank, to the byte where that does not depend on
        values. Of entries chosen from tensors that are sharded, each rank is taken to have its
        share."""
        return PathBytes()

    def plan_traffic(self, config: Any, rank: RankShapes) -> Sequence[StepTraffic]:
        """Return what the steps of a run send on the data-parallel group, by kind of step, no step
        skipped."""
        return plan_means(config, rank)
