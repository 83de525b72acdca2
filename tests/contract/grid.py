"""The toy of the contract tests on a TP x PP x DP grid, with parameters sharded in every way.

The whole gradient of a parameter is given; the backward of each rank makes its shard. Sums of
halves are exact, so the ranks of a grid compute on their shards, bit for bit, what one rank
computes on the whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.state_dict import RunStateDict
from megatron.checkpoint.store import Checkpoint, save_checkpoint
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.gradient_path import PathParts
from megatron.data_parallel.reducer import StepContext
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.state_formats import StateFormats
from megatron.optimizer.update_rules import AdamW
from megatron.parallel.groups import ProcessGroups
from megatron.parallel.tensor_shard import TensorShard, even_share
from pretrain_gpt import GRADIENT_PATHS
from samo.layout import CompressedLayout
from tests.contract.harness import PathCase, Toy, alignment_of, config_of, gradients_of
from tests.ranks import grid

LAYERS = 4
EMBEDDING = "embedding.weight"
PADDED_TO = 4
"""Embedding rows are padded in memory to a multiple of this number on each rank."""
PARAMETERS: dict[str, tuple[tuple[int, ...], tuple[int, int] | None]] = {
    EMBEDDING: ((37, 16), (0, 1)),
    "position.weight": ((9, 16), None),
    "0.first.weight": ((48, 16), (0, 2)),
    "0.first.bias": ((48,), (0, 2)),
    "1.norm.weight": ((16,), None),
    "1.second.weight": ((10, 22), (1, 1)),
    "2.second.bias": ((10,), None),
    "2.mixed.weight": ((6, 12, 3), (1, 2)),
    "3.first.weight": ((28, 11), (0, 1)),
}
"""Shape, and the axis and number of blocks of sharding; a number in a name is the layer.

The cases are a vocabulary, gate|value, columns that do not divide, and a middle axis.
"""
SHAPES = {name: shape for name, (shape, _) in PARAMETERS.items()}
GRIDS = {
    "1": (1, 1, 1),
    "DP4": (1, 1, 4),
    "TP2": (2, 1, 1),
    "TP4": (4, 1, 1),
    "PP2": (1, 2, 1),
    "PP4": (1, 4, 1),
    "TP2xDP2": (2, 1, 2),
    "PP2xDP2": (1, 2, 2),
    "TP2xPP2": (2, 2, 1),
}
"""Sizes of TP, PP and DP."""


def world_of(grid: str) -> int:
    return math.prod(GRIDS[grid])


def on_grid(groups: ProcessGroups, name: str) -> ProcessGroups:
    """Return the groups of the same ranks as the grid called `name`."""
    tp, pp, _ = GRIDS[name]
    return grid(groups, tp=tp, pp=pp)


class GridToy(Toy):
    """The toy on one rank of a grid; with `pruned`, random entries of the matrices do not exist."""

    def __init__(
        self,
        groups: ProcessGroups,
        case: PathCase,
        *,
        pruned: bool = False,
        plain_cuts: bool = False,
        lr: float = 1e-2,
        dtype: torch.dtype = torch.float32,
        formats: StateFormats | None = None,
    ) -> None:
        self.groups, self.lr, self.weight_decay = groups, lr, 0.1
        # With `plain_cuts`, every shard is one range; blocks of a middle axis would be several.
        left_out = {"2.mixed.weight"} if plain_cuts else set()
        self.infos = [info for info in infos_on(groups, dtype) if info.name not in left_out]
        parts = GRADIENT_PATHS[case.name].build(config_of(case), self.infos, groups, None)
        if pruned:
            local_entries = {info.name: info.local_entries for info in self.infos}
            masks = {i.name: _mask(i) for i in self.infos if i.param.dim() > 1}
            some = {n: m for n, m in masks.items() if not m[: local_entries[n]].all()}
            parts = PathParts(layout=CompressedLayout(some), reducer=parts.reducer)
        self.engine = GradientEngine(
            self.infos,
            parts,
            groups,
            cap=1024,
            grad_dtype=torch.float32,
            alignment=alignment_of(case, formats),
        )
        rule = AdamW(beta1=0.9, beta2=0.99, eps=1e-8)
        self.optimizer = BucketOptimizer(self.engine, rule, formats=formats)
        self.steps = 0
        self.tensors = RunStateDict(groups=groups, engine=self.engine, optimizer=self.optimizer)

    def backward(self, wanted: list[dict[str, torch.Tensor]], loss_scale: float = 1.0) -> None:
        parts = [
            {info.name: self._part(info, whole[info.name]) for info in self.infos}
            for whole in wanted
        ]
        self.engine.begin(StepContext(t=self.optimizer.applied + 1, loss_scale=loss_scale))
        for number, gradients in enumerate(parts):
            if number == len(parts) - 1:
                self.engine.expect_last_backward()
            products = [
                (leaf * gradients[info.name]).sum() for info in self.infos for leaf in info.leaves
            ]
            (torch.stack(products).sum() * loss_scale).backward()

    def _part(self, info: ParamInfo, whole: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each leaf of this rank, given the whole gradient."""
        uses = len(info.leaves) * (self.groups.embedding.size if info.tied else 1)
        part = _local(info.tp_shard, whole, info.param.shape) / uses
        return part / self.groups.tp.size if info.partial else part

    def whole(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """Return the flattened shard that has these stored entries, and 0 elsewhere."""
        info, mask = self.engine.infos[name], self.engine.layout.mask(name)
        if mask is None:
            return stored[: info.local_entries]
        return torch.zeros(mask.numel()).masked_scatter_(mask, stored)[: info.local_entries]

    def residual(self) -> dict[str, torch.Tensor]:
        found = {info.name: torch.zeros(info.local_entries) for info in self.infos}
        return found | {name: self.whole(name, kept) for name, kept in self.own().items()}

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"{kind}/{name}": flat.clone() for kind, name, flat in self.optimizer.tensors()}
        found |= {f"reducer/{name}": kept for name, kept in self.own().items()}
        return found | {f"shared/{name}": kept for name, kept in self.shared().items()}

    def share(self, number: int) -> list[dict[str, torch.Tensor]]:
        """Return the gradients of this rank's share of a global batch of four parts."""
        rank, size = self.groups.dp.rank, self.groups.dp.size
        return [gradients(number, part, scale=size / 4) for part in range(rank, 4, size)]

    def save(self, folder: Path) -> None:
        save_checkpoint(
            folder,
            step=self.optimizer.applied,
            tensors=list(self.tensors.shards(moments=True)),
            state={},
            rank=self.groups.world.rank,
            world=self.groups.world.size,
            gather=self.groups.world.all_gather_str,
            grid=self.groups.dims.sizes,
        )

    def load(self, folder: Path, applied: int) -> None:
        with Checkpoint.open(folder / f"step_{applied:08d}") as saved:
            self.tensors.take(saved, moments=True)
            self.optimizer.finish_load()
            self.optimizer.applied = applied
            self.tensors.take_path(saved)


def infos_on(groups: ProcessGroups, dtype: torch.dtype = torch.float32) -> list[ParamInfo]:
    """Return the parameters of this rank's pipeline stage, as this rank holds them."""
    pp, found = groups.pp, []
    low, high = even_share(LAYERS, rank=pp.rank, ranks=pp.size)
    for name in PARAMETERS:
        layer, _, _ = name.partition(".")
        at_an_end = pp.rank in (0, pp.size - 1) if name == EMBEDDING else pp.rank == 0
        if low <= int(layer) < high if layer.isdigit() else at_an_end:
            found.append(_info(name, groups, dtype))
    return found


def logical(folder: Path, applied: int) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint by name."""
    with Checkpoint.open(folder / f"step_{applied:08d}") as saved:
        return {name: saved.read(name) for name in saved.names()}


def gradients(*seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return random whole gradients as a function of the seed numbers."""
    return gradients_of(SHAPES, *seed, scale=scale)


def _info(name: str, groups: ProcessGroups, dtype: torch.dtype) -> ParamInfo:
    shape, how = PARAMETERS[name]
    tp, shard = groups.tp, None
    if how is not None and tp.size > 1:
        shard = TensorShard.evenly(shape, axis=how[0], rank=tp.rank, ranks=tp.size, blocks=how[1])
    local = list(shape if shard is None else shard.local_shape)
    if name == EMBEDDING:
        local[0] = -(-local[0] // PADDED_TO) * PADDED_TO
    leaf = torch.nn.Parameter(_local(shard, _initial(name), torch.Size(local)).to(dtype))
    tied = name == EMBEDDING
    both = tied and groups.pp.size == 1
    return ParamInfo(
        name=name,
        leaves=(leaf, torch.nn.Parameter(leaf.detach())) if both else (leaf,),
        logical_shape=shape,
        tp_shard=shard,
        partial=name.endswith("norm.weight"),
        tied=tied,
        weight_decay=len(shape) > 1,
    )


def _initial(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(SHAPES[name], generator=generator)


def _mask(info: ParamInfo) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + sum(map(ord, info.name)))
    whole = torch.rand(info.logical_shape, generator=generator) < 0.5
    if info.name == EMBEDDING:
        whole[:20] = True  # The shard of the first of several ranks is fully stored.
    return _local(info.tp_shard, whole, info.param.shape).reshape(-1)


def _local(shard: TensorShard | None, whole: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return this rank's shard of a tensor, with zeros in the rows that pad it in memory."""
    part = whole if shard is None else shard.of(whole)
    padded = part.new_zeros(shape)
    padded[: part.shape[0]] = part
    return padded


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose tensors differ in any bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
