"""Rules over several settings, refused pairs, notices, and values that follow from the world size.

A rule is a function from the configuration to its complaint, or None; `RULES` lists the rules of
`parse`, while `check_world` and `check_batch` need the number of ranks. A refused pair is one
row of `REFUSED_PAIRS`, which `--help-compat` prints; a gradient path may add rows of its own. A
complaint is one line: fields with their values, the rule, the way out.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.fields import GivenValue, check_range, origin_of, show, specs_of, split_shares
from megatron.config.sections import (
    LARGEST_RUN,
    Config,
    ModelConfig,
    OffloadConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainingConfig,
)
from megatron.errors import ConfigError
from megatron.low_memory.checkpoint_interval import checkpoint_interval, describe_interval


@dataclass(frozen=True, kw_only=True)
class RefusedPair:
    """`name` says which settings, in the user's words; `holds` whether a configuration has both.

    `reason` why not; `instead` the way out.
    """

    name: str
    holds: Callable[[Config], object]
    reason: str
    instead: str

    def message(self, config: Config) -> str:
        """The error's line, with the values of the fields that the name mentions."""
        known = config.values()
        words = [word.strip(",") for word in self.name.split()]
        values = [f"{word} is {show(known[word])}" for word in words if word in known]
        return f"{self.name}: {self.reason} ({', '.join(values)}); {self.instead}"


def _pair(name: str, holds: Callable[[Config], object], reason: str, instead: str) -> RefusedPair:
    return RefusedPair(name=name, holds=holds, reason=reason, instead=instead)


def _multi_steps(config: Config) -> tuple[int, ...] | None:
    return config.optimizer.lr_multi_step_iters or config.optimizer.lr_multi_step_samples


REFUSED_PAIRS: tuple[RefusedPair, ...] = (
    _pair(
        "fp16 with bf16",
        lambda c: c.precision.fp16 and c.precision.bf16,
        "parameters have one format",
        "turn one of them off",
    ),
    _pair(
        "grad_reduce_in_bf16 without bf16",
        lambda c: c.precision.grad_reduce_in_bf16 and not c.precision.bf16,
        "only a bf16 run may reduce in bfloat16",
        "add --bf16 or drop --grad-reduce-in-bf16",
    ),
    _pair(
        "grad_reduce_in_bf16 with accumulate_allreduce_grads_in_fp32",
        lambda c: (
            c.precision.grad_reduce_in_bf16 and c.precision.accumulate_allreduce_grads_in_fp32
        ),
        "gradients have one format",
        "drop one of them",
    ),
    _pair(
        "loss_scale without fp16",
        lambda c: c.precision.loss_scale is not None and not c.precision.fp16,
        "only float16 gradients need a scale",
        "add --fp16 or drop --loss-scale",
    ),
    _pair(
        "use_rope_scaling without position_embedding_type rope",
        lambda c: c.model.use_rope_scaling and c.model.position_embedding_type != "rope",
        "only rotary positions have frequencies to scale",
        "add --position-embedding-type rope or drop --use-rope-scaling",
    ),
    _pair(
        "train_iters with train_samples",
        lambda c: c.training.train_iters is not None and c.training.train_samples is not None,
        "the run has one length",
        "give one of them (a flag undoes the file: --train-iters none)",
    ),
    _pair(
        "rampup_batch_size with train_iters",
        lambda c: c.training.rampup_batch_size is not None and c.training.train_iters is not None,
        "a ramp-up is counted in samples",
        "give --train-samples instead of --train-iters",
    ),
    _pair(
        "rampup_batch_size without global_batch_size",
        lambda c: c.training.rampup_batch_size is not None and c.training.global_batch_size is None,
        "the ramp-up needs its end",
        "give --global-batch-size",
    ),
    _pair(
        "train_iters with lengths in samples",
        lambda c: (
            c.training.train_iters is not None
            and (
                c.optimizer.lr_decay_samples
                or c.optimizer.lr_warmup_samples
                or c.optimizer.lr_wsd_decay_samples
                or c.optimizer.lr_multi_step_samples
            )
        ),
        "a run counted in steps has its schedule in steps",
        "use lr_decay_iters, lr_warmup_iters, lr_wsd_decay_iters, lr_multi_step_iters",
    ),
    _pair(
        "train_samples with lengths in iters",
        lambda c: (
            c.training.train_samples is not None
            and (
                c.optimizer.lr_decay_iters
                or c.optimizer.lr_warmup_iters
                or c.optimizer.lr_wsd_decay_iters
                or c.optimizer.lr_multi_step_iters
            )
        ),
        "a run counted in samples has its schedule in samples",
        "use lr_decay_samples, lr_warmup_samples, lr_wsd_decay_samples, lr_multi_step_samples",
    ),
    _pair(
        "lr_warmup_fraction with lr_warmup_iters or lr_warmup_samples",
        lambda c: (
            c.optimizer.lr_warmup_fraction is not None
            and (c.optimizer.lr_warmup_iters or c.optimizer.lr_warmup_samples)
        ),
        "the warm-up has one length",
        "give one of them",
    ),
    _pair(
        "lr_decay_style WSD without its decay's length",
        lambda c: (
            c.optimizer.lr_decay_style == "WSD"
            and c.optimizer.lr_wsd_decay_iters is None
            and c.optimizer.lr_wsd_decay_samples is None
        ),
        "the last part of the schedule has no length",
        "give --lr-wsd-decay-iters (with --train-samples: --lr-wsd-decay-samples)",
    ),
    _pair(
        "lr_decay_style multi-step without its steps and their factors",
        lambda c: (
            c.optimizer.lr_decay_style == "multi-step"
            and None in (_multi_steps(c), c.optimizer.lr_multi_step_factors)
        ),
        "the schedule has no steps, or no learning rates for them",
        "give --lr-multi-step-iters (with --train-samples: --lr-multi-step-samples) and "
        "--lr-multi-step-factors",
    ),
    _pair(
        "lr_multi_step_iters, _samples or _factors without lr_decay_style multi-step",
        lambda c: (
            c.optimizer.lr_decay_style != "multi-step"
            and (_multi_steps(c), c.optimizer.lr_multi_step_factors) != (None, None)
        ),
        "another schedule has no such steps",
        "give --lr-decay-style multi-step, or drop them",
    ),
    _pair(
        "sgd_nesterov or sgd_weight_decay coupled without optimizer sgd",
        lambda c: (
            c.optimizer.optimizer != "sgd"
            and (c.optimizer.sgd_nesterov or c.optimizer.sgd_weight_decay == "coupled")
        ),
        "AdamW reads neither",
        "give --optimizer sgd, or drop them",
    ),
    _pair(
        "sgd_nesterov with sgd_momentum 0",
        lambda c: c.optimizer.sgd_nesterov and c.optimizer.sgd_momentum == 0,
        "there is no momentum to look ahead by",
        "raise --sgd-momentum, or drop --sgd-nesterov",
    ),
    _pair(
        "constant weight decay with start_weight_decay or end_weight_decay",
        lambda c: (
            c.optimizer.weight_decay_incr_style == "constant"
            and (c.optimizer.start_weight_decay, c.optimizer.end_weight_decay) != (None, None)
        ),
        "a constant has neither start nor end",
        "give --weight-decay, or --weight-decay-incr-style linear",
    ),
    _pair(
        "changing weight decay without start_weight_decay and end_weight_decay",
        lambda c: (
            c.optimizer.weight_decay_incr_style != "constant"
            and None in (c.optimizer.start_weight_decay, c.optimizer.end_weight_decay)
        ),
        "the curve needs both ends",
        "give --start-weight-decay and --end-weight-decay",
    ),
    _pair(
        "dataloader_type cyclic",
        lambda c: c.data.dataloader_type == "cyclic",
        "the documents and the samples of each epoch are shuffled already",
        "leave --dataloader-type out",
    ),
    _pair(
        "dataloader_type external",
        lambda c: c.data.dataloader_type == "external",
        "batches come from the data that the configuration names",
        "write a .bin/.idx pair with tools/preprocess_data.py, and give --data-path",
    ),
    _pair(
        "recompute_method or recompute_num_layers without recompute_granularity",
        lambda c: (
            c.recompute.recompute_granularity is None
            and (c.recompute.recompute_method, c.recompute.recompute_num_layers) != (None, None)
        ),
        "nothing is recomputed",
        "add --recompute-granularity full",
    ),
    _pair(
        "optimizer_impl apex with device cpu",
        lambda c: c.optimizer.optimizer_impl == "apex" and c.run.device == "cpu",
        "apex has CUDA kernels only",
        "give --optimizer-impl torch",
    ),
    _pair(
        "distributed_backend nccl with device cpu",
        lambda c: c.parallel.distributed_backend == "nccl" and c.run.device == "cpu",
        "nccl moves CUDA tensors only",
        "give --distributed-backend gloo",
    ),
    _pair(
        "distributed_backend gloo with device cuda",
        lambda c: c.parallel.distributed_backend == "gloo" and c.run.device == "cuda",
        "gloo moves CPU tensors",
        "give --distributed-backend nccl",
    ),
    _pair(
        "data_path with train_, valid_ or test_data_path",
        lambda c: (
            c.data.data_path
            and (c.data.train_data_path or c.data.valid_data_path or c.data.test_data_path)
        ),
        "the data is either split or given by split",
        "give one kind",
    ),
    _pair(
        "num_layers_per_virtual_pipeline_stage without pipeline_model_parallel_size above 1",
        lambda c: (
            c.parallel.num_layers_per_virtual_pipeline_stage is not None
            and c.parallel.pipeline_model_parallel_size == 1
        ),
        "there is no pipeline to interleave",
        "raise --pipeline-model-parallel-size or drop it",
    ),
    _pair(
        "num_layers_per_virtual_pipeline_stage with decoder_first_ or _last_pipeline_num_layers",
        lambda c: (
            c.parallel.num_layers_per_virtual_pipeline_stage is not None
            and (
                c.parallel.decoder_first_pipeline_num_layers
                or c.parallel.decoder_last_pipeline_num_layers
            )
        ),
        "interleaved stages take equal turns",
        "give one kind of split",
    ),
    _pair(
        "decoder_first_ or decoder_last_pipeline_num_layers without a pipeline",
        lambda c: (
            c.parallel.pipeline_model_parallel_size == 1
            and (
                c.parallel.decoder_first_pipeline_num_layers
                or c.parallel.decoder_last_pipeline_num_layers
            )
        ),
        "there is one stage, which holds all layers",
        "raise --pipeline-model-parallel-size or drop them",
    ),
    _pair(
        "pipeline_schedule message-driven without pipeline_model_parallel_size above 1",
        lambda c: (
            c.parallel.pipeline_schedule == "message-driven"
            and c.parallel.pipeline_model_parallel_size == 1
        ),
        "a single stage gets no messages",
        "raise --pipeline-model-parallel-size or drop it",
    ),
    _pair(
        "pipeline_schedule message-driven with num_layers_per_virtual_pipeline_stage",
        lambda c: (
            c.parallel.pipeline_schedule == "message-driven"
            and c.parallel.num_layers_per_virtual_pipeline_stage is not None
        ),
        "its stages hold one run of layers each",
        "give --pipeline-schedule 1f1b, or drop it",
    ),
    _pair(
        "pipeline_limit without pipeline_schedule message-driven",
        lambda c: (
            c.parallel.pipeline_limit is not None
            and c.parallel.pipeline_schedule != "message-driven"
        ),
        "1F1B itself bounds what is in flight",
        "add --pipeline-schedule message-driven or drop it",
    ),
    _pair(
        "optimizer_cpu_offload without fp16 or bf16",
        lambda c: c.offload.optimizer_cpu_offload and not (c.precision.fp16 or c.precision.bf16),
        "fp32 parameters are the master weights themselves, which must stay on the device",
        "add --bf16 or --fp16, or drop it",
    ),
    _pair(
        "optimizer_cpu_offload with a grad_path other than dense and samo",
        lambda c: c.offload.optimizer_cpu_offload and c.gradient.grad_path not in ("dense", "samo"),
        "its error feedback or its selection needs whole states on the device at a time",
        "give --grad-path dense or samo, or drop it",
    ),
    _pair(
        "optimizer_cpu_offload with use_distributed_optimizer",
        lambda c: c.offload.optimizer_cpu_offload and c.parallel.use_distributed_optimizer,
        "each is a way of its own to hold fewer states on a device",
        "drop one of them",
    ),
    _pair(
        "optimizer_cpu_offload with ddp_bucket_size",
        lambda c: c.offload.optimizer_cpu_offload and c.parallel.ddp_bucket_size is not None,
        "gradients are sent in offload_coarsening x offload_bucket_size entries",
        "give these, or drop it",
    ),
    _pair(
        "predivide_loss with a grad_path other than dense and samo",
        lambda c: c.precision.predivide_loss and c.gradient.grad_path not in ("dense", "samo"),
        "what it keeps back is measured against means over ranks",
        "give --grad-path dense or samo, or drop it",
    ),
    _pair(
        "recompute_method sqrt with recompute_num_layers",
        lambda c: (
            c.recompute.recompute_method == "sqrt" and c.recompute.recompute_num_layers is not None
        ),
        "the rule finds the number",
        "give --recompute-method uniform, or drop it",
    ),
    _pair(
        "use_distributed_optimizer with a grad_path other than dense and samo",
        lambda c: (
            c.parallel.use_distributed_optimizer and c.gradient.grad_path not in ("dense", "samo")
        ),
        "its error feedback or its selection needs all of a mean and of its update on each rank, "
        "which would have a part",
        "give --grad-path dense or samo, or drop --use-distributed-optimizer",
    ),
    _pair(
        "recompute_granularity selective with recompute_method or recompute_num_layers",
        lambda c: (
            c.recompute.recompute_granularity == "selective"
            and (c.recompute.recompute_method, c.recompute.recompute_num_layers) != (None, None)
        ),
        "it recomputes the same part of every layer",
        "give --recompute-granularity full, or drop them",
    ),
)


Alternatives = Sequence[Sequence[str]]
"""Settings of which a run has one: each item is one way, by the fields that say it."""

ALTERNATIVES: tuple[Alternatives, ...] = (
    (("train_iters",), ("train_samples",)),
    (("lr_decay_iters",), ("lr_decay_samples",)),
    (("lr_warmup_iters",), ("lr_warmup_samples",), ("lr_warmup_fraction",)),
    (("lr_wsd_decay_iters",), ("lr_wsd_decay_samples",)),
    (("lr_multi_step_iters",), ("lr_multi_step_samples",)),
    (("fp16",), ("bf16",)),
    (
        ("data_path",),
        ("train_data_path", "valid_data_path", "test_data_path"),
        ("mock_data",),
    ),
)
"""A flag for one way replaces what the file says of the others. A gradient path may add rows."""


def check_pairs(config: Config, pairs: Sequence[RefusedPair] = REFUSED_PAIRS) -> None:
    """Raise `ConfigError` for the first refused pair that the configuration holds."""
    for pair in pairs:
        if pair.holds(config):
            raise ConfigError(pair.message(config))


def tensor_parallel_divides(c: Config) -> str | None:
    """Heads, query groups, the MLP's width and, where it is cut, the sequence come out even."""
    ranks, model = c.parallel.tensor_model_parallel_size, c.model
    sizes = [
        ("num_attention_heads", model.num_attention_heads),
        ("num_query_groups", model.query_groups),
        ("ffn_hidden_size", model.ffn_size),
    ]
    if c.parallel.sequence_parallel:
        sizes.append(("seq_length", model.seq_length))
    for name, size in sizes:
        if size % ranks:
            legal = [n for n in range(1, ranks) if all(s % n == 0 for _, s in sizes)]
            return (
                f"{name} {size} is not a multiple of tensor_model_parallel_size {ranks}; sizes "
                f"below that would do: {', '.join(map(str, legal))}"
            )
    return None


def vocabulary_covers_ranks(c: Config) -> str | None:
    """Every tensor-parallel rank holds a token, as far as the flags tell the vocabulary."""
    # A tokenizer may have more tokens than the flag says.
    if c.data.vocab_size is None or c.data.tokenizer_type is not None:
        return None
    return _too_few_tokens(c, c.data.vocab_size)


def check_vocabulary(c: Config, size: int) -> None:
    """Raise `ConfigError` if a tensor-parallel rank holds no token of `size` tokens."""
    if complaint := _too_few_tokens(c, size):
        raise ConfigError(complaint)


def _too_few_tokens(c: Config, size: int) -> str | None:
    ranks = c.parallel.tensor_model_parallel_size
    if size >= ranks:
        return None
    return (
        f"vocab_size {size} is less than tensor_model_parallel_size {ranks}: every tensor-parallel "
        f"rank must hold a token; give --tensor-model-parallel-size {size} or less"
    )


def stages_have_layers(c: Config) -> str | None:
    """Every stage holds a layer, and what the user says about them adds up."""
    try:
        c.parallel.layer_split(c.model.num_layers)
    except ConfigError as error:
        return str(error)
    return None


def interleaving_fills_stages(c: Config, dp: int) -> str | None:
    """Interleaved 1F1B takes microbatches in groups of as many as there are stages."""
    p, t = c.parallel, c.training
    size = p.num_layers_per_virtual_pipeline_stage
    if size is None or size * p.pipeline_model_parallel_size == c.model.num_layers:
        return None
    assert t.global_batch_size is not None, "resolve fills it in"
    sizes = [("global_batch_size", t.global_batch_size)]
    if t.rampup_batch_size is not None:
        start, increment, _ = t.rampup_batch_size
        sizes += [("rampup_batch_size start", start), ("rampup_batch_size increment", increment)]
    step = t.micro_batch_size * dp * p.pipeline_model_parallel_size
    for name, size in sizes:
        if size % step:
            return (
                f"num_layers_per_virtual_pipeline_stage: {name} {size} is no multiple of {step}, "
                f"micro_batch_size {t.micro_batch_size} x data-parallel size {dp} x "
                f"pipeline_model_parallel_size {p.pipeline_model_parallel_size}; change one of them"
            )
    return None


_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,127}")


def run_is_well_named(c: Config) -> str | None:
    """The complaint about the run's name, which ends up in paths and job scripts."""
    if c.run.run_dir is None:
        field, name, way_out = "configuration's name", c.name, "rename the file or give --run-dir"
    else:
        field, name, way_out = "run_dir", _last_part(c.run.run_dir), "choose another name"
    if _NAME.fullmatch(name) and name not in (".", ".."):
        return None
    return (
        f"{field}: {show(name)} is no name for a run; must be at most 128 of A-Z a-z 0-9 . _ -, "
        f"not . or .., not beginning with -; {way_out}"
    )


def _last_part(path: str) -> str:
    """Return the text after the last slash; `Path.name` would hide a final "."."""
    return path.rstrip("/").rpartition("/")[2]


def output_folders_are_safe(c: Config) -> str | None:
    """The complaint about a place to write to where other things live."""
    taken = {Path("/"): "the root folder", real_path(os.path.expanduser("~")): "the home folder"}
    taken |= {folder: "a data folder" for folder in _data_folders(c)}
    for name, folder in (("run_dir", c.run.run_dir), ("save", c.checkpoint.save)):
        if folder is None:
            continue
        resolved = real_path(folder)
        if resolved in taken:
            return (
                f"{name}: {show(folder)} is {taken[resolved]} ({resolved}); must be a folder of "
                f"its own, such as {resolved / 'run1'}"
            )
    return None


def real_path(path: str) -> Path:
    """Absolute path without symbolic links; a loop of them is left as it is, not an error."""
    return Path(os.path.realpath(path))


def _data_folders(c: Config) -> list[Path]:
    d = c.data
    lists = (d.data_path, d.train_data_path, d.valid_data_path, d.test_data_path)
    return [real_path(prefix).parent for paths in lists for prefix in paths or ()]


Complaint = str | None


def check(config: Config, givens: Mapping[str, GivenValue] | None = None) -> None:
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


def _multi_steps_ascend(c: Config) -> Complaint:
    for name in ("lr_multi_step_iters", "lr_multi_step_samples"):
        starts, factors = getattr(c.optimizer, name), c.optimizer.lr_multi_step_factors
        if starts is None or factors is None:
            continue
        if len(starts) != len(factors):
            return (
                f"{name} has {len(starts)} values and lr_multi_step_factors {len(factors)}; "
                "give one factor for each step"
            )
        if list(starts) != sorted(set(starts)):
            return f"{name} {' '.join(map(str, starts))} must ascend; sort them"
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
    _multi_steps_ascend,
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


Notice = str | None
WORKING_LOSS_SCALE = 2**16
"""A loss scale at which float16 GPT runs settle."""
LARGEST_CUDNN_HEAD, LARGEST_FLASH_HEAD = 128, 256
"""Head sizes up to which cuDNN's and flash attention train on every GPU that has them."""


def notices(config: Config, given: Container[str]) -> list[str]:
    """Lines about a checked configuration; `given` are the fields that the user set."""
    about = [notice(config) for notice in _ANY] + [notice(config, given) for notice in _DEFAULTS]
    return [line for line in about if line]


def cuda_notices(config: Config) -> list[str]:
    """Lines about settings that keep fast attention away, for a run that has found a GPU."""
    return [line for notice in _ON_CUDA if (line := notice(config))]


def describe_recomputation(config: Config) -> str:
    """Describe the recomputation interval of the fullest stage.

    Empty where layers are not recomputed in groups of one length.
    """
    if config.recompute.recompute_method != "uniform":
        return ""
    layers, interval = config.model.num_layers, config.recompute.recompute_num_layers or 1
    return describe_interval(layers, config.parallel.longest_run(layers), interval)


def _saves_once(c: Config) -> Notice:
    interval, iters = c.checkpoint.save_interval, c.training.train_iters
    if interval is None or iters is None or interval <= iters:
        return None
    return f"save_interval {interval} is more than train_iters {iters}: only the end is saved"


def _prints_nothing(c: Config) -> Notice:
    interval, iters = c.logging.log_interval, c.training.train_iters
    if iters is None or interval <= iters:
        return None
    return f"log_interval {interval} is more than train_iters {iters}: no step is printed"


def _finetunes_nothing(c: Config) -> Notice:
    if not c.checkpoint.finetune or c.checkpoint.load is not None:
        return None
    return "finetune is on without --load: there are no weights to take, training begins with new"


def _data_unread(c: Config) -> Notice:
    paths = (c.data.data_path, c.data.train_data_path, c.data.valid_data_path)
    if not c.data.mock_data or not any((*paths, c.data.test_data_path)):
        return None
    return "mock_data is on: the data paths are not read"


def _groups_unread(c: Config) -> Notice:
    if c.model.group_query_attention or c.model.num_query_groups == 1:
        return None
    groups = c.model.num_query_groups
    return f"num_query_groups {groups} is not read without --group-query-attention"


def _scores_kept(c: Config) -> Notice:
    if not c.masks_grouped_queries or c.run.device == "cpu":
        return None
    return (
        f"reset_attention_mask with num_query_groups {c.model.query_groups}: on CUDA most fused "
        f"kernels of torch do not take both, and {_scores(c)}"
    )


def _scores(c: Config) -> str:
    m, t = c.model, c.training
    heads = m.num_attention_heads // c.parallel.tensor_model_parallel_size
    size = 4 * t.micro_batch_size * heads * m.seq_length**2
    return (
        f"a layer then keeps {m.seq_length} x {m.seq_length} scores of each head in fp32, "
        f"{size / 2**20:,.0f} MiB a microbatch"
    )


# What torch's attention kernels take on CUDA: ATen/native/transformers/cuda/sdp_utils.cpp,
# `check_cudnn_dropout`, `check_cudnn_tensor_shapes`, `check_head_dim_size_flash` and
# `check_head_dim_size_mem_efficient`; flash attention pads heads in transformers/attention.cpp.


def _attention_without_cudnn(c: Config) -> Notice:
    size, dropout = c.model.head_dim, c.model.attention_dropout
    takes_heads = _is_16_bit(c) and size % 8 == 0 and size <= LARGEST_CUDNN_HEAD
    if not takes_heads or (16 * dropout).is_integer():
        return None
    return (
        f"attention_dropout {dropout}: on CUDA torch does not run cuDNN attention, its first "
        "choice on Hopper and Blackwell GPUs, with this dropout; --attention-dropout 0 allows it"
    )


def _odd_heads(c: Config) -> Notice:
    size, multiple = c.model.head_dim, 8 if _is_16_bit(c) else 4
    if size % multiple == 0:
        return None
    odd = f"head size {size} is not a multiple of {multiple}: on CUDA"
    if _is_16_bit(c) and size <= LARGEST_FLASH_HEAD and not c.data.reset_attention_mask:
        padded = -(-size // multiple) * multiple
        return (
            f"{odd} flash attention alone takes it, by copying queries, keys and values to heads "
            f"of {padded}"
        )
    return f"{odd} no fused kernel of torch takes it, and {_scores(c)}"


def _wide_heads(c: Config) -> Notice:
    m = c.model
    if not _is_16_bit(c) or m.head_dim <= LARGEST_FLASH_HEAD or m.head_dim % 8:
        return None
    wide = f"head size {m.head_dim} is more than {LARGEST_FLASH_HEAD}: on CUDA"
    if m.query_groups < m.num_attention_heads:
        return f"{wide} no fused kernel of torch takes it with query groups, and {_scores(c)}"
    return f"{wide} memory-efficient attention takes it, but neither flash nor cuDNN attention"


def _is_16_bit(c: Config) -> bool:
    return c.precision.param_dtype != "float32"


def _offload_unread(c: Config) -> Notice:
    if c.offload.optimizer_cpu_offload or c.offload == OffloadConfig():
        return None
    return "the offload_ settings are not read without --optimizer-cpu-offload"


def _tracker_off(c: Config) -> Notice:
    if c.logging.wandb_exp_name is None or c.logging.wandb_project is not None:
        return None
    return f"wandb_exp_name {c.logging.wandb_exp_name} is not read without --wandb-project"


def _slow_format(c: Config) -> Notice:
    if not c.precision.fp16 or c.run.device != "cpu":
        return None
    return "fp16 on the CPU saves memory and no time: its products run in fp32 on most CPUs"


def _moved_folder(c: Config) -> Notice:
    for name, folder in (("run_dir", c.run.run_dir), ("save", c.checkpoint.save)):
        if folder is not None and real_path(folder) != Path(os.path.abspath(folder)):
            return f"{name} {folder} is really {real_path(folder)}"
    return None


def _first_loss_scale(c: Config, given: Container[str]) -> Notice:
    p = c.precision
    if not p.fp16 or p.loss_scale is not None or "initial_loss_scale" in given:
        return None
    skipped = 1 + round(math.log2(p.initial_loss_scale / WORKING_LOSS_SCALE))
    return (
        f"initial_loss_scale is 2^{math.log2(p.initial_loss_scale):.0f}, Megatron-LM's default: "
        f"about {skipped} steps are skipped at the start"
    )


def _overlap(c: Config, given: Container[str]) -> Notice:
    if "overlap_grad_reduce" in given:
        return None
    return "overlap_grad_reduce is on by default (Megatron-LM: off); the numbers are the same"


_ANY: tuple[Callable[[Config], Notice], ...] = (
    _saves_once,
    _prints_nothing,
    _finetunes_nothing,
    _data_unread,
    _groups_unread,
    _scores_kept,
    _offload_unread,
    _tracker_off,
    _slow_format,
    _moved_folder,
)
_DEFAULTS: tuple[Callable[[Config, Container[str]], Notice], ...] = (_first_loss_scale, _overlap)
_ON_CUDA: tuple[Callable[[Config], Notice], ...] = (
    _attention_without_cudnn,
    _odd_heads,
    _wide_heads,
)


def resolve(config: Config, world_size: int) -> Config:
    """Return the configuration with derived values filled in.

    `to_yaml` then writes every value that the run uses. Idempotent.

    Raises:
        ConfigError: `world_size` ranks, the grid and the batch do not fit.
    """
    check_world(config, world_size)
    dp = config.data_parallel_size(world_size)
    resolved = dataclasses.replace(
        config,
        model=_resolve_model(config.model),
        training=_resolve_training(config.training, dp),
        parallel=_resolve_parallel(config.parallel),
        recompute=_resolve_recompute(config),
    )
    check_batch(resolved, dp)
    return resolved


def _resolve_model(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        model,
        max_position_embeddings=model.positions,
        ffn_hidden_size=model.ffn_size,
        kv_channels=model.head_dim,
    )


def _resolve_training(training: TrainingConfig, dp: int) -> TrainingConfig:
    batch = training.global_batch_size or training.micro_batch_size * dp
    return dataclasses.replace(training, global_batch_size=batch)


def _resolve_parallel(parallel: ParallelConfig) -> ParallelConfig:
    """Turn sequence parallelism off at tensor-parallel size 1, as Megatron-LM does."""
    shared = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    return dataclasses.replace(parallel, sequence_parallel=shared)


def _resolve_recompute(config: Config) -> RecomputeConfig:
    recompute = config.recompute
    if recompute.recompute_granularity != "full":
        return recompute
    method, count = recompute.recompute_method or "uniform", recompute.recompute_num_layers or 1
    if method == "sqrt":
        layers = config.model.num_layers
        held = config.parallel.longest_run(layers)
        method, count = "uniform", checkpoint_interval(layers, held)
    return dataclasses.replace(recompute, recompute_method=method, recompute_num_layers=count)
