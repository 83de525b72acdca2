"""The masks with which a run begins: this rank's parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.gradient_path import CheckpointView
from megatron.data_parallel.layout import Masks
from samo.mask import PackedMasks, flat_masks, flat_parts, load_masks, masks_for, padded
from samo.model_parts import ModelParts, read_part
from samo.pruning import NamedWeights, magnitude, prunable, random, refuse_zeros

if TYPE_CHECKING:
    import torch

    from samo.options import SamoConfig

MASK, PARAM = "mask/", "param/"
"""Prefixes of masks and master weights in a checkpoint; the parameter's name follows."""


def first_masks(
    options: SamoConfig,
    infos: Sequence[ParamInfo],
    parts: ModelParts,
    saved: CheckpointView | None,
    *,
    seed: int,
) -> Masks:
    """Return the masks of a checkpoint of the same path and settings, or else the ticket's masks.

    Collective over the world; an error is raised on all ranks of a stage at least.
    """
    if saved is not None and saved.same_path:
        masks = _masks_of(saved, infos)
        return PackedMasks.of(
            (info.name, padded(info, masks[info.name])) for info in infos if info.name in masks
        )
    if options.samo_pruning == "file":
        return _of_file(options, infos, parts)
    if options.samo_pruning == "early-bird" or options.sparsity == 0:
        return {}
    pruned = prunable(infos, keep_embeddings=options.samo_keep_embeddings, dense=options.dense)
    if options.samo_pruning == "random":
        shapes = {info.name: info.logical_shape for info in pruned}

        def draw(name: str) -> torch.Tensor:
            return random({name: shapes[name]}, options.sparsity, seed=seed)[name]

        return flat_masks(pruned, NamedWeights(list(shapes), draw))
    return _by_magnitude(options, pruned, parts, saved)


def _of_file(options: SamoConfig, infos: Sequence[ParamInfo], parts: ModelParts) -> Masks:
    assert options.samo_mask_file is not None, "checked with the pairs"
    source = options.samo_mask_file
    shapes = parts.everywhere({info.name: info.logical_shape for info in infos})
    masks = parts.raise_on_all_ranks(partial(load_masks, Path(source), shapes))
    return masks_for(infos, masks, source=source, elsewhere=shapes)


def _by_magnitude(
    options: SamoConfig,
    pruned: Sequence[ParamInfo],
    parts: ModelParts,
    saved: CheckpointView | None,
) -> Masks:
    by_name = {info.name: info for info in pruned}

    def read(name: str) -> torch.Tensor:
        """Return this rank's part of a parameter's initial weights."""
        info = by_name[name]
        if saved is not None:
            return read_part(saved, f"{PARAM}{name}", info.tp_shard)
        return info.param.detach().reshape(-1)[: info.local_entries].view(info.local_shape)

    def draw() -> dict[str, torch.Tensor]:
        drawn = magnitude(
            NamedWeights(list(by_name), read),
            options.sparsity,
            scope=options.samo_scope,
            parts=parts,
        )
        if saved is not None:
            refuse_zeros(drawn, _masks_of(saved, pruned), what="--samo-sparsity", parts=parts)
        return drawn

    return flat_parts(pruned, parts.raise_on_all_ranks(draw), parts)


def _masks_of(saved: CheckpointView, infos: Sequence[ParamInfo]) -> NamedWeights:
    """Return this rank's parts of a checkpoint's masks, each read when it is looked up."""
    there = set(saved.names(MASK))
    cuts = {info.name: info.tp_shard for info in infos if f"{MASK}{info.name}" in there}
    return NamedWeights(list(cuts), lambda name: read_part(saved, f"{MASK}{name}", cuts[name]))
