"""`--grad-path dense`, as the composition root sees it. Imports torch only to build."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.data_parallel.interface import ParamInfo, PathParts, Saved

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
        from megatron.data_parallel.dense import AllReduceReducer

        return PathParts(layout=DenseLayout(), reducer=AllReduceReducer(groups.dp))

    def plan_bytes(self, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        entries = sum(math.prod(shape) for shape in shapes.values())
        return {"gradients": entries * BYTES[config.precision.grad_dtype]}
