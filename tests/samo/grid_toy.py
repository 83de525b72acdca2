"""A small model on any grid: the shards of each rank, and the whole tensors of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.gradient_path import MaskUpdater
from megatron.parallel.groups import ProcessGroups
from megatron.parallel.tensor_shard import TensorShard
from tests.ranks import grid_of

PADDING = 3
"""Rows of the word table that exist only in memory, on each rank."""
WORDS = "embedding.words"


@dataclass(frozen=True)
class ToyKind:
    """A parameter: its whole shape, its stages out of two, and how it is sharded."""

    shape: tuple[int, ...]
    stages: tuple[int, ...]
    axis: int | None = None
    blocks: int = 1
    scale: float = 1.0


KINDS = {
    WORDS: ToyKind((37, 16), (0, 1), axis=0, scale=0.5),
    "embedding.places": ToyKind((10, 16), (0,), scale=0.1),
    "b.gated": ToyKind((40, 16), (0,), axis=0, blocks=2),
    "b.bias": ToyKind((40,), (0,), axis=0, blocks=2),
    "a.down": ToyKind((16, 21), (1,), axis=1, scale=2.0),
    "a.norm": ToyKind((16,), (1,)),
    "c.small": ToyKind((4, 6), (1,), axis=1, scale=0.01),
}
PRUNED = [name for name, kind in KINDS.items() if len(kind.shape) > 1]
GRIDS = [(2, 1, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1)]
"""Values of tp, dp, pp."""


def grid(tp: int, dp: int, pp: int, rank: int) -> ProcessGroups:
    """Return the groups of a grid, made once per test file."""
    return grid_of(rank, tp * dp * pp, tp, pp)


def alone() -> ProcessGroups:
    return grid(1, 1, 1, 0)


def draw(name: str, seed: int = 0) -> torch.Tensor:
    """Draw the values of a whole parameter."""
    generator = torch.Generator().manual_seed(1000 * seed + list(KINDS).index(name))
    return torch.randn(KINDS[name].shape, generator=generator) * KINDS[name].scale


def make_infos(groups: ProcessGroups, dtype: torch.dtype = torch.float32) -> list[ParamInfo]:
    """Return this rank's parameters with initial values; padding holds large values.

    No mask may take an entry of the padding.
    """
    two = groups.dims.pp == 2
    return [
        _info(name, kind, groups, dtype)
        for name, kind in KINDS.items()
        if not two or groups.pp.rank in kind.stages
    ]


def _info(name: str, kind: ToyKind, groups: ProcessGroups, dtype: torch.dtype) -> ParamInfo:
    tp, shard = groups.tp, None
    if tp.size > 1 and kind.axis is not None:
        shard = TensorShard.evenly(
            kind.shape, axis=kind.axis, rank=tp.rank, ranks=tp.size, blocks=kind.blocks
        )
    value = draw(name) if shard is None else shard.of(draw(name))
    if name == WORDS:
        value = torch.cat([value, torch.full((PADDING, *value.shape[1:]), 100.0)])
    return ParamInfo(
        name=name,
        leaves=(torch.nn.Parameter(value.to(dtype)),),
        logical_shape=kind.shape,
        tp_shard=shard,
        tied=name == WORDS,
        weight_decay=len(kind.shape) > 1,
    )


def part(info: ParamInfo, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, flattened, with zeros in the padding."""
    mine = whole.view(info.logical_shape)
    mine = (mine if info.tp_shard is None else info.tp_shard.of(mine)).reshape(-1)
    return torch.cat([mine, mine.new_zeros(info.param.numel() - mine.numel())])


class ToyWeights:
    """Master weights that move at random, by the same numbers on every grid."""

    def __init__(self, infos: list[ParamInfo], masks: Mapping[str, torch.Tensor]) -> None:
        self.infos = infos
        self.masks = {name: mask.clone() for name, mask in masks.items()}
        self.values = {info.name: part(info, draw(info.name)) for info in infos}
        self.set()

    def train(self, t: int, by: float) -> None:
        for info in self.infos:
            self.values[info.name] += part(info, draw(info.name, t)) * by
        self.set()

    def set(self) -> None:
        """Set pruned entries to 0."""
        for name, mask in self.masks.items():
            self.values[name][~mask] = 0.0

    def stored(self) -> Iterator[tuple[ParamInfo, torch.Tensor]]:
        for info in self.infos:
            mask, value = self.masks.get(info.name), self.values[info.name]
            yield info, value if mask is None else value[mask]


def state_of(mask_updater: MaskUpdater) -> dict[str, torch.Tensor]:
    """Return copies of the updater's state, as a checkpoint restores it."""
    return {
        name: (state if isinstance(state, torch.Tensor) else state.values()).clone()
        for name, state in mask_updater.state_tensors()
    }


def entries(names: list[str]) -> int:
    return sum(math.prod(KINDS[name].shape) for name in names)
