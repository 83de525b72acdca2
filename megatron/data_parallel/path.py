"""`--grad-path dense`, and the product of two paths, as the composition root sees them. Imports
torch only to build."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatron.data_parallel.interface import GradientPath, ParamInfo, PathParts, Saved

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.parallel.groups import ProcessGroups

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class DensePath:
    """Bucketed, overlapped all-reduce of every gradient."""

    name = "dense"
    sections: Mapping[str, type] = {}
    refused_pairs = ()

    def check(self, config: Config) -> None:
        """Runs with every setting."""

    def build(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        saved: Saved | None = None,
    ) -> PathParts:
        from megatron.data_parallel.buckets import DenseLayout
        from megatron.data_parallel.sharded import mean_reducer

        reducer = mean_reducer(config, groups)
        return PathParts(layout=DenseLayout(), reducer=reducer, growth=reducer.growth)

    def plan_bytes(self, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        entries = sum(math.prod(shape) for shape in shapes.values())
        return {"gradients": entries * BYTES[config.precision.grad_dtype]}


class LayoutPath(GradientPath, Protocol):
    """A path that chooses coordinates, and may be asked how many before there are tensors."""

    def stored(self, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Entries of each parameter that exist."""
        ...


class ProductPath:
    """The coordinates of one path, reduced by another: `samo+radius`. Both sections are options."""

    def __init__(self, layout: LayoutPath, reducer: GradientPath) -> None:
        self._layout, self._reducer = layout, reducer
        self.name = f"{layout.name}+{reducer.name}"
        self.sections = {**layout.sections, **reducer.sections}
        self.refused_pairs = (*layout.refused_pairs, *reducer.refused_pairs)

    def check(self, config: Config) -> None:
        self._layout.check(config)
        self._reducer.check(config)

    def build(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        saved: Saved | None = None,
    ) -> PathParts:
        parts = self._layout.build(config, infos, groups, saved)
        other = self._reducer.build(config, infos, groups, saved)
        return dataclasses.replace(
            parts,
            reducer=other.reducer,
            notes=(*parts.notes, *other.notes),
            growth=other.growth,
        )

    def plan_bytes(self, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Of the reducer it is what it would be for parameters of the stored entries alone."""
        stored = self._layout.stored(config, shapes)
        # A matrix stays one, whatever shape its stored entries have.
        compact = {name: (stored[name], *(1 for _ in shape[1:])) for name, shape in shapes.items()}
        found = self._reducer.plan_bytes(config, compact)
        for kind, size in self._layout.plan_bytes(config, shapes).items():
            # The gradients are one and the same; what each keeps beside them is its own.
            found[kind] = size if kind == "gradients" else found.get(kind, 0) + size
        return found
