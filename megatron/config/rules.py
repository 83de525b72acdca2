"""Rules over several fields. A rule is a function from the configuration to its complaint, or None;
`RULES` lists those that `parse` checks, `check_world` and `check_batch` need the number of ranks.

A complaint is one line: fields with their values, the rule, the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megatron.config.folders import output_folders_are_safe, run_is_well_named
from megatron.config.learning import LARGEST_RUN
from megatron.config.options import specs_of
from megatron.config.parallel_rules import (
    interleaving_fills_stages,
    stages_have_layers,
    tensor_parallel_divides,
    vocabulary_covers_ranks,
)
from megatron.config.refused_pairs import check_pairs
from megatron.config.shares import split_shares
from megatron.config.values import Given, check_range, origin_of
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config.config import Config

Complaint = str | None


def check(config: Config, givens: Mapping[str, Given] | None = None) -> None:
    """Raise `ConfigError` for the first range, pair or rule that the configuration breaks.

    `givens` tells where values came from, for the messages about ranges.
    """
    for section_name, section in config.sections.items():
        for spec in specs_of(type(section), section_name).values():
            value = getattr(section, spec.name)
            check_range(spec, value, origin_of(spec.name, givens or {}))
    check_pairs(config)
    for rule in RULES:
        if complaint := rule(config):
            raise ConfigError(complaint)


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of `step` around `value`, 0 left out: "8, 12"."""
    below = value // step * step
    return ", ".join(str(legal) for legal in (below, below + step) if legal > 0)


# ------------------------------------------------------------------------------- the model


def _heads_divide_width(c: Config) -> Complaint:
    m = c.model
    if m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0:
        return None
    legal = nearest_multiples(m.hidden_size, m.num_attention_heads)
    return (
        f"hidden_size {m.hidden_size} is not a multiple of num_attention_heads "
        f"{m.num_attention_heads}; nearest hidden_size: {legal} (or give --kv-channels)"
    )


def _groups_divide_heads(c: Config) -> Complaint:
    m = c.model
    if m.num_attention_heads % m.query_groups == 0:
        return None
    few = range(1, min(m.num_attention_heads, 128) + 1)
    legal = ", ".join(str(groups) for groups in few if m.num_attention_heads % groups == 0)
    return (
        f"num_attention_heads {m.num_attention_heads} is not a multiple of num_query_groups "
        f"{m.num_query_groups}; allowed: {legal}"
    )


def _sequence_has_positions(c: Config) -> Complaint:
    m = c.model
    if m.seq_length <= m.positions:
        return None
    return (
        f"seq_length {m.seq_length} is more than max_position_embeddings "
        f"{m.max_position_embeddings}; raise the latter or leave it out"
    )


def _rotated_channels_pair_up(c: Config) -> Complaint:
    m = c.model
    rotated = int(m.head_dim * m.rotary_percent)
    if m.position_embedding_type != "rope" or (rotated > 0 and rotated % 2 == 0):
        return None
    return (
        f"rotary_percent {m.rotary_percent} of {m.head_dim} channels a head is {rotated}; rotary "
        "positions need an even number of at least 2; change kv_channels or rotary_percent"
    )


# -------------------------------------------------------------------------- length and batch


def _run_has_length(c: Config) -> Complaint:
    t = c.training
    if t.skip_train or t.train_iters is not None or t.train_samples is not None:
        return None
    return "train_iters, train_samples: neither given; give --train-iters or --train-samples"


def _training_has_lr(c: Config) -> Complaint:
    if c.training.skip_train or c.optimizer.lr is not None:
        return None
    return "lr: not given; give --lr, or --skip-train to evaluate only"


def _retained_steps_are_saved(c: Config) -> Complaint:
    retain, interval = c.checkpoint.save_retain_interval, c.checkpoint.save_interval
    if retain is None:
        return None
    if interval is None:
        return f"save_retain_interval {retain} needs save_interval; give --save-interval"
    if retain % interval == 0:
        return None
    return (
        f"save_retain_interval {retain} is not a multiple of save_interval {interval}; nearest: "
        f"{nearest_multiples(retain, interval)}"
    )


def _ramp_reaches_batch(c: Config) -> Complaint:
    t = c.training
    if t.rampup_batch_size is None or t.global_batch_size is None:
        return None
    start, increment, _ = t.rampup_batch_size
    gap = t.global_batch_size - start
    if gap < 0:
        return (
            f"rampup_batch_size starts at {start}, above global_batch_size "
            f"{t.global_batch_size}; lower the start"
        )
    if gap % increment:
        legal = nearest_multiples(gap, increment).split(", ")
        ends = ", ".join(str(start + int(g)) for g in legal)
        return (
            f"rampup_batch_size: from {start} by {increment} never meets global_batch_size "
            f"{t.global_batch_size}; nearest global_batch_size: {ends}"
        )
    return None


# -------------------------------------------------------------------------------- schedules


def _lr_above_its_floors(c: Config) -> Complaint:
    o = c.optimizer
    if o.lr is None:
        return None
    for name, value in (("min_lr", o.min_lr), ("lr_warmup_init", o.lr_warmup_init)):
        if value > o.lr:
            return f"{name} {value} is more than lr {o.lr}; lower {name}"
    return None


def _schedule_fits(c: Config) -> Complaint:
    t, o = c.training, c.optimizer
    for unit, run, decay, warmup, wsd in (
        ("iters", t.train_iters, o.lr_decay_iters, o.lr_warmup_iters, o.lr_wsd_decay_iters),
        (
            "samples",
            t.train_samples,
            o.lr_decay_samples,
            o.lr_warmup_samples,
            o.lr_wsd_decay_samples,
        ),
    ):
        name = f"lr_decay_{unit}" if decay is not None else f"train_{unit}"
        length = decay if decay is not None else run
        if length is None:
            continue
        if warmup >= length:
            return f"lr_warmup_{unit} {warmup} must be less than {name} {length}; lower the warm-up"
        if wsd is not None and wsd + warmup > length:
            return (
                f"lr_wsd_decay_{unit} {wsd} with lr_warmup_{unit} {warmup} is more than {name} "
                f"{length}; lower one of them"
            )
    return None


def _weight_decay_grows(c: Config) -> Complaint:
    start, end = c.optimizer.start_weight_decay, c.optimizer.end_weight_decay
    if start is None or end is None or start <= end:
        return None
    return (
        f"start_weight_decay {start} is more than end_weight_decay {end}; weight decay may only "
        "grow: exchange them"
    )


def _loss_scales_ordered(c: Config) -> Complaint:
    p = c.precision
    if p.min_loss_scale <= p.initial_loss_scale:
        return None
    return (
        f"min_loss_scale {p.min_loss_scale} is more than initial_loss_scale "
        f"{p.initial_loss_scale}; lower the former"
    )


# ------------------------------------------------------------------------------------ data


def _split_is_three_shares(c: Config) -> Complaint:
    try:
        split_shares(c.data.split)
    except ConfigError as error:
        return str(error)
    return None


# ------------------------------------------------------------------- recompute and profile


def _recomputes_existing_layers(c: Config) -> Complaint:
    count = c.recompute.recompute_num_layers
    if count is None or count <= c.model.num_layers:
        return None
    return (
        f"recompute_num_layers {count} is more than num_layers {c.model.num_layers}; lower the "
        "former"
    )


def _profile_ends_after_start(c: Config) -> Complaint:
    start, end = c.logging.profile_step_start, c.logging.profile_step_end
    if not c.logging.profile or start < end:
        return None
    return f"profile_step_end {end} must be more than profile_step_start {start}; raise the end"


RULES: tuple[Callable[[Config], Complaint], ...] = (
    _heads_divide_width,
    _groups_divide_heads,
    _sequence_has_positions,
    _rotated_channels_pair_up,
    tensor_parallel_divides,
    vocabulary_covers_ranks,
    stages_have_layers,
    _run_has_length,
    _training_has_lr,
    _retained_steps_are_saved,
    _ramp_reaches_batch,
    _lr_above_its_floors,
    _schedule_fits,
    _weight_decay_grows,
    _loss_scales_ordered,
    _split_is_three_shares,
    _recomputes_existing_layers,
    _profile_ends_after_start,
    output_folders_are_safe,
    run_is_well_named,
)


def check_world(config: Config, world_size: int) -> None:
    """Raise `ConfigError` unless whole copies of the model fill `world_size` ranks."""
    size = config.parallel.model_parallel_size
    absent = [rank for rank in config.logging.profile_ranks if rank >= world_size]
    if world_size < 1:
        raise ConfigError(f"world size {world_size} is out of range; must be at least 1")
    if world_size % size:
        raise ConfigError(
            f"world size {world_size} is not a multiple of {size}, tensor_model_parallel_size x "
            f"pipeline_model_parallel_size; nearest: {nearest_multiples(world_size, size)}"
        )
    if config.logging.profile and absent:
        raise ConfigError(
            f"profile_ranks: there is no rank {absent[0]} of {world_size}; ranks go from 0 to "
            f"{world_size - 1}"
        )


def check_batch(config: Config, dp: int) -> None:
    """Raise `ConfigError` unless every global batch is whole microbatches on `dp` copies."""
    t = config.training
    assert t.global_batch_size is not None
    step = t.micro_batch_size * dp
    sizes = [("global_batch_size", t.global_batch_size)]
    if t.rampup_batch_size is not None and t.rampup_batch_size[0] != t.global_batch_size:
        start, increment, _ = t.rampup_batch_size
        sizes += [("rampup_batch_size start", start), ("rampup_batch_size increment", increment)]
    for name, size in sizes:
        if size % step:
            raise ConfigError(
                f"{name} {size} is not a multiple of {step}, micro_batch_size "
                f"{t.micro_batch_size} x data-parallel size {dp}; nearest: "
                f"{nearest_multiples(size, step)}"
            )
    if complaint := interleaving_fills_stages(config, dp):
        raise ConfigError(complaint)
    if t.train_samples is not None and t.train_samples < t.batch_size_at(0):
        raise ConfigError(
            f"train_samples {t.train_samples} is less than the first global batch of "
            f"{t.batch_size_at(0)}; raise it to at least that"
        )
    if t.total_samples() > LARGEST_RUN:
        raise ConfigError(
            f"train_iters {t.train_iters} of global_batch_size {t.global_batch_size} are "
            f"{t.total_samples()} samples; must be at most {LARGEST_RUN}"
        )
