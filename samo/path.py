"""The gradient path `--grad-path samo`. The module imports torch only in `build`."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import known_length, options_of
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.bucket_plan import (
    BYTES,
    ParamShape,
    PathBytes,
    RankShapes,
    main_bytes,
    moment_bytes,
    plan_wire,
)
from megatron.data_parallel.gradient_path import (
    CheckpointView,
    GradientPath,
    MaskUpdater,
    PathParts,
    Shapes,
)
from megatron.data_parallel.layout import Masks
from megatron.errors import ConfigError
from samo.memory import index_bytes, memory_note, model_bits, state_bytes
from samo.options import SAMO_PAIRS, SamoConfig
from samo.schedule import (
    RewiringSchedule,
    first_ticket,
    is_prunable,
    stored_count,
    target_of,
    until_of,
    why_no_resample,
    why_none,
    why_too_many,
)

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.parallel.groups import ProcessGroups
    from samo.layout import CompressedLayout
    from samo.model_parts import ModelParts


class SamoPath(GradientPath):
    """The path whose gradients, master weights and moments exist for stored entries only."""

    name = "samo"
    sections = {"samo": SamoConfig}
    refused_pairs = SAMO_PAIRS

    def check(self, config: Config) -> None:
        if (total := known_length(config)) is not None:
            _check_length(config, total)

    def check_files(self, config: Config, shapes: Callable[[], Shapes | None]) -> None:
        """Check the mask file's headers, and with known shapes that its masks fit the model."""
        from samo.mask_file import check_mask_file

        if (file := options_of(config, SamoConfig).samo_mask_file) is not None:
            check_mask_file(Path(str(file)), shapes())

    def build(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        saved: CheckpointView | None = None,
    ) -> PathParts:
        from megatron.data_parallel.encoded_wire import open_exchange
        from megatron.data_parallel.mean_reducer import mean_reducer
        from samo.layout import CompressedLayout
        from samo.model_parts import ModelParts
        from samo.tickets import first_masks

        options, total = options_of(config, SamoConfig), config.total_iterations()
        seed = config.training.seed
        if not config.training.skip_train:
            # Only now is the number of ranks known, on which the number of steps may depend.
            _check_length(config, total)
        parts = ModelParts(infos, groups)
        make_layout = partial(CompressedLayout, device=infos[0].param.device, cut=parts.cut_names)

        def draw() -> CompressedLayout:
            if options.samo_dense is not None:
                shapes = parts.everywhere({info.name: info.logical_shape for info in infos})
                _check_dense(options, shapes)
            return make_layout(first_masks(options, infos, parts, saved, seed=seed))

        layout = parts.raise_on_all_ranks(draw)
        reducer = mean_reducer(config, infos, open_exchange(config, groups), groups)
        fresh = saved is None or not saved.same_path
        return PathParts(
            layout=layout,
            reducer=reducer,
            mask_updater=_mask_updater(config, infos, layout, parts, make_layout, fresh=fresh),
            notes=tuple(_notes(config, infos, layout, parts)),
        )

    def stored(self, config: Config, params: Iterable[ParamShape]) -> dict[str, int]:
        """Return the stored entries of each prunable tensor, none with early-bird tickets.

        Masks from a file are assumed to have `samo_sparsity`.
        """
        options = options_of(config, SamoConfig)
        if options.samo_pruning == "early-bird" or options.sparsity == 0:
            return {}
        shapes = {param.name: param.logical_shape for param in params}
        return {
            name: stored_count(math.prod(shape), options.sparsity)
            for name, shape in shapes.items()
            if is_prunable(
                name, shape, keep_embeddings=options.samo_keep_embeddings, dense=options.dense
            )
        }

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        """Return the bytes of the shared index, and of what an encoded wire rounds off."""
        sizes = {name: param.numel for name, param in rank.params.items() if name in rank.stored}
        slices = {name: where for bucket in rank.buckets for name, where in bucket.slices.items()}
        stored = {name: slices[name].numel for name in sizes}
        index = {"index": index_bytes(sizes, stored, device=rank.device)}
        # A checkpoint holds one mask bit per entry.
        masks = sum(-(-rank.params[name].local_entries // 8) for name in sizes)
        # In a product of paths, the other one has the reducer and its wire.
        is_alone = config.gradient.grad_path == self.name
        wire = plan_wire(config, rank) if is_alone else PathBytes()
        return PathBytes({**index, **wire.kept}, wire.passing, shared=masks, own=wire.own)


def _schedule(options: SamoConfig, total: int) -> RewiringSchedule:
    assert options.dsr_interval is not None
    return RewiringSchedule(
        interval=options.dsr_interval,
        until=options.dsr_until or until_of(total),
        frequency=options.dsr_frequency,
    )


def _check_dense(options: SamoConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise `ConfigError` for a pattern without a match, or if nothing is left to prune."""
    pruned = [
        name
        for name, shape in shapes.items()
        if is_prunable(name, shape, keep_embeddings=options.samo_keep_embeddings)
    ]
    for pattern in options.dense:
        if not fnmatch.filter(pruned, pattern):
            raise ConfigError(
                f"samo_dense {pattern!r}: matches none of the {len(pruned)} tensors that would be "
                f"pruned, such as {pruned[0]}; name one of them, or drop the pattern"
            )
    if not any(
        is_prunable(name, shapes[name], keep_embeddings=False, dense=options.dense)
        for name in pruned
    ):
        raise ConfigError(
            f"samo_dense {' '.join(options.dense)}: leaves no tensor to prune; give fewer patterns"
        )


def _check_length(config: Config, total: int) -> None:
    """Raise `ConfigError` if a run of `total` steps ends before its first ticket or rewiring.

    With Radius on top, it must also begin after the first ticket.
    """
    options = options_of(config, SamoConfig)
    interval = options.samo_early_bird_interval
    waits = options.samo_pruning == "early-bird" and options.sparsity > 0
    if waits and (ticket := first_ticket(interval)) >= total:
        raise ConfigError(
            f"samo_early_bird_interval {interval}: the first ticket could be drawn after step "
            f"{ticket}, which leaves no step of {total} to the pruned network; lower it, or train "
            "longer"
        )
    if waits and (problem := _why_radius_never_begins(config)(first_ticket(interval) + 1, total)):
        raise ConfigError(f"samo_early_bird_interval {interval}: {problem}")
    if options.dsr_interval is not None and (
        problem := why_none(_schedule(options, total), 1, total)
    ):
        raise ConfigError(problem)


def _why_radius_never_begins(config: Config) -> Callable[[int, int], str]:
    """Return a function of updates (first, last): why Radius never begins, or "" if it does."""
    # Any, since the class of the section belongs to a package that this one does not import.
    radius: Any = config.extensions.get("radius")
    if radius is None or radius.density == 1:
        return lambda first, last: ""
    start = radius.start(config.total_iterations())
    return partial(why_no_resample, start=start, interval=radius.radius_interval)


def _mask_updater(
    config: Config,
    infos: Sequence[ParamInfo],
    layout: CompressedLayout,
    parts: ModelParts,
    make_layout: Callable[[Masks], CompressedLayout],
    *,
    fresh: bool,
) -> MaskUpdater | None:
    from samo.early_bird import EarlyBird
    from samo.pruning import prunable

    options = options_of(config, SamoConfig)
    pruned = prunable(infos, keep_embeddings=options.samo_keep_embeddings, dense=options.dense)
    if options.samo_pruning == "early-bird" and options.sparsity > 0:
        return EarlyBird(
            pruned,
            options.sparsity,
            scope=options.samo_scope,
            interval=options.samo_early_bird_interval,
            limit=options.samo_early_bird_distance,
            last=config.total_iterations(),
            drawn=any(sum(parts.table({i.name: [i.name in layout] for i in pruned}).values(), [])),
            parts=parts,
            make_layout=make_layout,
            why_no_more=_why_radius_never_begins(config),
        )
    if options.dsr_interval is None:
        return None
    return _dsr(config, pruned, layout, parts, make_layout, fresh=fresh)


def _dsr(
    config: Config,
    pruned: Sequence[ParamInfo],
    layout: CompressedLayout,
    parts: ModelParts,
    make_layout: Callable[[Masks], CompressedLayout],
    *,
    fresh: bool,
) -> MaskUpdater:
    from samo.dsr import DsrMaskUpdater, RewiringSettings

    options = options_of(config, SamoConfig)
    if options.samo_pruning == "file" and fresh:
        _check_rewired(options, pruned, layout, parts)
    fraction = Fraction(str(options.dsr_fraction))
    counts = parts.table({info.name: layout.count([info]) for info in pruned}).values()
    entries = [all_ for _, all_ in counts]
    if problem := why_too_many(fraction, entries, sum(stored for stored, _ in counts)):
        raise ConfigError(problem)
    settings = RewiringSettings(
        schedule=_schedule(options, config.total_iterations()),
        target=target_of(fraction, entries),
        threshold=options.dsr_threshold,
        growth=options.dsr_growth,
        reset_moments=options.dsr_reset_moments == "all",
        seed=config.training.seed,
    )
    return DsrMaskUpdater([info.name for info in pruned], settings, make_layout, parts=parts)


def _check_rewired(
    options: SamoConfig,
    pruned: Sequence[ParamInfo],
    layout: CompressedLayout,
    parts: ModelParts,
) -> None:
    """Raise `ConfigError` if DSR would prune a tensor that the mask file leaves whole."""
    masked = parts.table({info.name: [info.name in layout] for info in pruned})
    whole = [name for name, (ranks,) in masked.items() if not ranks]
    if whole:
        raise ConfigError(
            f"dsr_interval: a rewiring would prune {whole[0]}, which {options.samo_mask_file} "
            f"leaves whole, one of {len(whole)} such tensors; name them by --samo-dense or "
            "--samo-keep-embeddings"
        )


def _notes(
    config: Config, infos: Sequence[ParamInfo], layout: CompressedLayout, parts: ModelParts
) -> Iterator[str]:
    """Yield log lines on the whole model. Collective over a copy of the model."""
    options = options_of(config, SamoConfig)
    rows = {
        info.name: (
            *layout.count([info]),
            info.name in layout,
            layout.index_nbytes(info.name),
            info.param.dim() > 1,
        )
        for info in infos
    }
    table = parts.table(rows)
    masked = {name: (stored, all_) for name, (stored, all_, index, *_) in table.items() if index}
    stored, all_, _, index, _ = (sum(column) for column in zip(*table.values(), strict=True))
    text = f"samo: {stored:,} of {all_:,} parameters exist"
    if masked:
        kept, entries = (sum(column) for column in zip(*masked.values(), strict=True))
        yield f"{text}, f = {stored / all_:.4f}; p = {1 - kept / entries:.4f} of what is pruned"
    else:
        entries = 0
        yield f"{text}; nothing is pruned yet" if options.sparsity else f"{text}: nothing is pruned"
    width = BYTES[config.precision.param_dtype]
    moments = config.optimizer.num_moments
    kinds = state_bytes(
        all_,
        stored,
        index=index,
        param_bytes=width,
        grad_bytes=BYTES[config.precision.grad_dtype],
        moments=moments,
    )
    kept_by_kind = [(count, bool(matrix)) for count, *_, matrix in table.values()]
    kinds["master weights"] = sum(main_bytes(config, n, matrix=m) for n, m in kept_by_kind)
    kinds["moments"] = sum(moment_bytes(config, n, matrix=m) for n, m in kept_by_kind)
    if width == 4:
        # fp32 parameters stored whole are views of their master weights.
        kinds["parameters"] = width * entries
    elif config.optimizer.main_params_dtype != "fp32":
        vectors = sum(all_ for _, all_, *_, matrix in table.values() if not matrix)
        kinds["parameters"] = width * (entries + vectors)
    yield memory_note(kinds, all_, stored, beside_paper=width == 2, moments=moments)
    if options.dsr_interval is not None:
        shapes = parts.everywhere({info.name: info.logical_shape for info in infos})
        sparse = {name: kept for name, (kept, _) in masked.items()}
        bits = model_bits(shapes, sparse, copies=2 + moments)
        yield (
            f"DSR: in flattened CSR, with fp32 values, weights, gradients and moments would take "
            f"{bits / 8e6:.1f} MB"
        )
