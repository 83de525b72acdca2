"""The gradient path `--grad-path dense`, and the product of two paths (lazy torch imports)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.data_parallel.bucket_plan import (
    BucketClass,
    ParamShape,
    PathBytes,
    RankShapes,
    StepTraffic,
    plan_wire,
)
from megatron.data_parallel.gradient_path import CheckpointView, GradientPath, PathParts, Shapes

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.data_parallel.bucket import ParamInfo
    from megatron.data_parallel.exchange import Exchange
    from megatron.data_parallel.reducer import GradientReducer
    from megatron.parallel.groups import ProcessGroups


class DensePath(GradientPath):
    """The gradient path that averages every gradient by bucketed, overlapped all-reduce."""

    name = "dense"

    def reducer(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        exchange: Exchange,
    ) -> GradientReducer:
        from megatron.data_parallel.mean_reducer import mean_reducer

        return mean_reducer(config, infos, exchange, groups)

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        return plan_wire(config, rank)


class ProductPath(GradientPath):
    """The layout of one path with the reducer of another and the options of both: `samo+radius`."""

    def __init__(self, layout: GradientPath, reducer: GradientPath) -> None:
        self._layout, self._reducer = layout, reducer
        self.name = f"{layout.name}+{reducer.name}"
        self.sections = {**layout.sections, **reducer.sections}
        self.refused_pairs = (*layout.refused_pairs, *reducer.refused_pairs)
        self.alternatives = (*layout.alternatives, *reducer.alternatives)
        self.presets = {**layout.presets, **reducer.presets}

    def check(self, config: Config) -> None:
        self._layout.check(config)
        self._reducer.check(config)

    def check_files(self, config: Config, shapes: Callable[[], Shapes | None]) -> None:
        self._layout.check_files(config, shapes)
        self._reducer.check_files(config, shapes)

    def build(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        saved: CheckpointView | None = None,
    ) -> PathParts:
        parts = self._layout.build(config, infos, groups, saved)
        other = self._reducer.build(config, infos, groups, saved)
        return dataclasses.replace(
            parts,
            reducer=other.reducer,
            notes=(*parts.notes, *other.notes),
        )

    def stored(self, config: Config, params: Iterable[ParamShape]) -> dict[str, int]:
        return self._layout.stored(config, params)

    def lends_grad(self, config: Config, kind: BucketClass) -> bool:
        return self._reducer.lends_grad(config, kind)

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        layout, reducer = (path.plan_bytes(config, rank) for path in (self._layout, self._reducer))
        return PathBytes(
            kept=_added(layout.kept, reducer.kept),
            passing=_added(layout.passing, reducer.passing),
            shared=layout.shared + reducer.shared,
            own=layout.own + reducer.own,
        )

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        return self._reducer.plan_traffic(config, rank)


def _added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {**one, **other}}
