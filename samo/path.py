"""`--grad-path samo`, as the composition root sees it. Imports torch only to build."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.data_parallel.interface import Masks, ParamInfo, PathParts, Rewirer, Saved
from megatron.data_parallel.path import BYTES
from megatron.errors import ConfigError
from samo.memory import index_bytes, memory_note, state_bytes
from samo.options import SamoConfig
from samo.refused_pairs import SAMO_PAIRS
from samo.schedule import Schedule, target_of, until_of, why_none, why_too_many
from samo.shares import first_ticket, is_prunable, stored_count
from samo.storage import model_bits

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.parallel.groups import ProcessGroups
    from samo.layout import CompressedLayout

MASK, PARAM = "mask/", "param/"
"""What a checkpoint calls masks and master weights, with the parameter's name behind it."""


class SamoPath:
    """Of a pruned network only the stored entries have gradients, master weights and moments."""

    name = "samo"
    sections: Mapping[str, type] = {"samo": SamoConfig}
    refused_pairs = SAMO_PAIRS

    def check(self, config: Config) -> None:
        training = config.training
        if not training.skip_train and (training.train_iters or training.global_batch_size):
            _check_length(_options(config), config.total_iterations())

    def build(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        saved: Saved | None = None,
    ) -> PathParts:
        from megatron.data_parallel.dense import AllReduceReducer
        from samo.layout import CompressedLayout

        options, total = _options(config), config.total_iterations()
        if not config.training.skip_train:
            # Only the number of ranks tells how many steps so many samples are.
            _check_length(options, total)
        layout = CompressedLayout(
            _masks(options, infos, saved, seed=config.training.seed), device=infos[0].param.device
        )
        return PathParts(
            layout=layout,
            reducer=AllReduceReducer(groups.dp),
            rewirer=_rewirer(options, infos, layout, total, seed=config.training.seed),
            notes=tuple(_notes(config, infos, layout)),
        )

    def plan_bytes(self, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Gradients of what exists, and the index that master weights and moments share."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        stored = self.stored(config, shapes)
        return {
            "gradients": BYTES[config.precision.grad_dtype] * sum(stored.values()),
            "index": index_bytes(sizes, stored, device=config.run.device or "cpu"),
        }

    def stored(self, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Entries of each parameter that exist, where each tensor has its share; all of them until
        a ticket is drawn."""
        options = _options(config)
        if options.samo_pruning == "early-bird":
            return {name: math.prod(shape) for name, shape in shapes.items()}
        return {
            name: stored_count(math.prod(shape), options.sparsity)
            if is_prunable(name, shape, keep_embeddings=options.samo_keep_embeddings)
            else math.prod(shape)
            for name, shape in shapes.items()
        }


def _options(config: Config) -> SamoConfig:
    options = config.extensions["samo"]
    assert isinstance(options, SamoConfig)
    return options


def _schedule(options: SamoConfig, total: int) -> Schedule:
    assert options.dsr_interval is not None
    return Schedule(interval=options.dsr_interval, until=options.dsr_until or until_of(total))


def _check_length(options: SamoConfig, total: int) -> None:
    """Refuse a run of `total` steps that ends before what it is to wait for."""
    interval = options.samo_early_bird_interval
    waits = options.samo_pruning == "early-bird" and options.sparsity > 0
    if waits and first_ticket(interval) > total:
        raise ConfigError(
            f"samo_early_bird_interval {interval}: the first ticket could be drawn after step "
            f"{first_ticket(interval)}, the run has {total}; lower it, or train longer"
        )
    if options.dsr_interval is not None and (
        problem := why_none(_schedule(options, total), 1, total)
    ):
        raise ConfigError(problem)


def _masks(
    options: SamoConfig, infos: Sequence[ParamInfo], saved: Saved | None, *, seed: int
) -> Masks:
    """What the run begins with: the masks of the checkpoint where that is of the same path with
    the same settings, else the ticket's."""
    from samo.mask import flat_masks, load_masks, masks_for
    from samo.pruning import Weights, magnitude, prunable, random, refuse_zeros

    there = set(saved.names(MASK)) if saved is not None else set[str]()
    if saved is not None and saved.same_path:
        masked = [info for info in infos if f"{MASK}{info.name}" in there]
        return flat_masks(masked, {i.name: saved.read(f"{MASK}{i.name}") for i in masked})
    if options.samo_pruning == "file":
        assert options.samo_mask_file is not None, "checked with the pairs"
        source = options.samo_mask_file
        return masks_for(infos, load_masks(Path(source)), source=source)
    if options.samo_pruning == "early-bird" or options.sparsity == 0:
        return {}
    pruned = prunable(infos, keep_embeddings=options.samo_keep_embeddings)
    if options.samo_pruning == "random":
        shapes = {info.name: info.logical_shape for info in pruned}
        return flat_masks(pruned, random(shapes, options.sparsity, seed=seed))
    by_name = {info.name: info for info in pruned}

    def read(name: str) -> torch.Tensor:
        """The weights that a parameter begins with."""
        if saved is not None:
            return saved.read(f"{PARAM}{name}")
        shape = by_name[name].logical_shape
        return by_name[name].param.detach().reshape(-1)[: math.prod(shape)].view(shape)

    drawn = magnitude(Weights(list(by_name), read), options.sparsity, scope=options.samo_scope)
    if saved is not None:
        stored = {n: saved.read(f"{MASK}{n}") for n in drawn if f"{MASK}{n}" in there}
        refuse_zeros(drawn, stored, what="--samo-sparsity")
    return flat_masks(pruned, drawn)


def _rewirer(
    options: SamoConfig,
    infos: Sequence[ParamInfo],
    layout: CompressedLayout,
    total: int,
    *,
    seed: int,
) -> Rewirer | None:
    from samo.early_bird import EarlyBird
    from samo.pruning import prunable

    pruned = prunable(infos, keep_embeddings=options.samo_keep_embeddings)
    if options.samo_pruning == "early-bird" and options.sparsity > 0:
        return EarlyBird(
            pruned,
            options.sparsity,
            scope=options.samo_scope,
            interval=options.samo_early_bird_interval,
            limit=options.samo_early_bird_distance,
            last=total,
            drawn=layout.nbytes > 0,
        )
    return None if options.dsr_interval is None else _dsr(options, pruned, layout, total, seed)


def _dsr(
    options: SamoConfig,
    pruned: Sequence[ParamInfo],
    layout: CompressedLayout,
    total: int,
    seed: int,
) -> Rewirer:
    from samo.layout import CompressedLayout
    from samo.rewiring import DsrRewirer, RewiringSettings

    fraction = Fraction(str(options.dsr_fraction))
    entries = [math.prod(info.logical_shape) for info in pruned]
    stored = sum(layout.numel(info.name, info.param) for info in pruned)
    if problem := why_too_many(fraction, entries, stored):
        raise ConfigError(problem)
    settings = RewiringSettings(
        schedule=_schedule(options, total),
        target=target_of(fraction, entries),
        threshold=options.dsr_threshold,
        reset_moments=options.dsr_reset_moments == "all",
        seed=seed,
    )
    make_layout = partial(CompressedLayout, device=pruned[0].param.device)
    return DsrRewirer([info.name for info in pruned], settings, make_layout)


def _notes(config: Config, infos: Sequence[ParamInfo], layout: CompressedLayout) -> Iterator[str]:
    options, count = _options(config), layout.count(infos)
    masked = [info for info in infos if layout.numel(info.name, info.param) < info.param.numel()]
    entries = sum(math.prod(info.logical_shape) for info in masked)
    stored = {info.name: layout.numel(info.name, info.param) for info in masked}
    text = f"samo: {count.stored:,} of {count.all:,} parameters exist"
    if masked:
        p = 1 - sum(stored.values()) / entries
        yield f"{text}, f = {count.stored / count.all:.4f}; p = {p:.4f} of what is pruned"
    else:
        yield f"{text}; nothing is pruned yet" if options.sparsity else f"{text}: nothing is pruned"
    width = BYTES[config.precision.param_dtype]
    moments = 1 if config.optimizer.optimizer == "sgd" else 2
    kinds = state_bytes(
        count.all,
        count.stored,
        index=layout.nbytes,
        param_bytes=width,
        grad_bytes=BYTES[config.precision.grad_dtype],
        moments=moments,
    )
    if width == 4:
        # fp32 parameters that are stored whole are views of their master weights.
        kinds["parameters"] = width * entries
    yield memory_note(kinds, count.all, count.stored, beside_paper=width == 2)
    if options.dsr_interval is not None:
        shapes = {info.name: info.logical_shape for info in infos}
        bits = model_bits(shapes, stored, copies=2 + moments)
        yield (
            f"DSR: in flattened CSR, with fp32 values, weights, gradients and moments would take "
            f"{bits / 8e6:.1f} MB"
        )
