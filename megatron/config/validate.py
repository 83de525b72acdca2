"""Rules over several settings, refused pairs, notices, and values that follow from the world size.

A rule is a function from the configuration to its complaint, or None; `SHARED_RULES` lists those of
the shared sections, a task's configuration (`gpt.GPTConfig`) adds its own. `check_world` and
`check_batch` need the number of ranks. A refused pair is one row of `SHARED_PAIRS`, which
`--help-compat` prints; tasks and gradient paths may add rows. A complaint is one line: fields with
their values, the rule, the way out.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from megatron.config.byte_size import parse_bytes
from megatron.config.fields import (
    GivenValue,
    check_range,
    origin_of,
    show,
    show_plain,
    specs_of,
)
from megatron.config.rules import (
    Alternatives,
    Complaint,
    Notice,
    RefusedPair,
    nearest_multiples,
    refused_pair,
)
from megatron.config.sections import (
    LARGEST_RUN,
    Config,
    OffloadConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron.errors import ConfigError

C = TypeVar("C", bound=Config)


def _multi_steps(config: Config) -> tuple[int, ...] | None:
    return config.optimizer.lr_multi_step_iters or config.optimizer.lr_multi_step_samples


SHARED_PAIRS: tuple[RefusedPair, ...] = (
    refused_pair(
        "fp16 with bf16",
        lambda c: c.precision.fp16 and c.precision.bf16,
        "parameters have one format",
        "turn one of them off",
    ),
    refused_pair(
        "grad_reduce_in_bf16 without bf16",
        lambda c: c.precision.grad_reduce_in_bf16 and not c.precision.bf16,
        "only a bf16 run may reduce in bfloat16",
        "add --bf16 or drop --grad-reduce-in-bf16",
    ),
    refused_pair(
        "grad_reduce_in_bf16 with accumulate_allreduce_grads_in_fp32",
        lambda c: (
            c.precision.grad_reduce_in_bf16 and c.precision.accumulate_allreduce_grads_in_fp32
        ),
        "gradients have one format",
        "drop one of them",
    ),
    refused_pair(
        "loss_scale without fp16",
        lambda c: c.precision.loss_scale is not None and not c.precision.fp16,
        "only float16 gradients need a scale",
        "add --fp16 or drop --loss-scale",
    ),
    refused_pair(
        "train_iters with train_samples",
        lambda c: c.training.train_iters is not None and c.training.train_samples is not None,
        "the run has one length",
        "give one of them (a flag undoes the file: --train-iters none)",
    ),
    refused_pair(
        "rampup_batch_size with train_iters",
        lambda c: c.training.rampup_batch_size is not None and c.training.train_iters is not None,
        "a ramp-up is counted in samples",
        "give --train-samples instead of --train-iters",
    ),
    refused_pair(
        "rampup_batch_size without global_batch_size",
        lambda c: c.training.rampup_batch_size is not None and c.training.global_batch_size is None,
        "the ramp-up needs its end",
        "give --global-batch-size",
    ),
    refused_pair(
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
    refused_pair(
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
    refused_pair(
        "lr_warmup_fraction with lr_warmup_iters or lr_warmup_samples",
        lambda c: (
            c.optimizer.lr_warmup_fraction is not None
            and (c.optimizer.lr_warmup_iters or c.optimizer.lr_warmup_samples)
        ),
        "the warm-up has one length",
        "give one of them",
    ),
    refused_pair(
        "lr_decay_style WSD without its decay's length",
        lambda c: (
            c.optimizer.lr_decay_style == "WSD"
            and c.optimizer.lr_wsd_decay_iters is None
            and c.optimizer.lr_wsd_decay_samples is None
        ),
        "the last part of the schedule has no length",
        "give --lr-wsd-decay-iters (with --train-samples: --lr-wsd-decay-samples)",
    ),
    refused_pair(
        "lr_decay_style multi-step without its steps and their factors",
        lambda c: (
            c.optimizer.lr_decay_style == "multi-step"
            and None in (_multi_steps(c), c.optimizer.lr_multi_step_factors)
        ),
        "the schedule has no steps, or no learning rates for them",
        "give --lr-multi-step-iters (with --train-samples: --lr-multi-step-samples) and "
        "--lr-multi-step-factors",
    ),
    refused_pair(
        "lr_multi_step_iters, _samples or _factors without lr_decay_style multi-step",
        lambda c: (
            c.optimizer.lr_decay_style != "multi-step"
            and (_multi_steps(c), c.optimizer.lr_multi_step_factors) != (None, None)
        ),
        "another schedule has no such steps",
        "give --lr-decay-style multi-step, or drop them",
    ),
    refused_pair(
        "sgd_nesterov or sgd_weight_decay coupled without optimizer sgd",
        lambda c: (
            c.optimizer.optimizer != "sgd"
            and (c.optimizer.sgd_nesterov or c.optimizer.sgd_weight_decay == "coupled")
        ),
        "AdamW reads neither",
        "give --optimizer sgd, or drop them",
    ),
    refused_pair(
        "main_params_dtype bf16 without bf16",
        lambda c: c.optimizer.main_params_dtype == "bf16" and not c.precision.bf16,
        "weights that are not fp32 are the parameters themselves, in their format",
        "add --bf16, or give --main-params-dtype fp32",
    ),
    refused_pair(
        "main_params_dtype fp16 without fp16",
        lambda c: c.optimizer.main_params_dtype == "fp16" and not c.precision.fp16,
        "weights that are not fp32 are the parameters themselves, in their format",
        "add --fp16, or give --main-params-dtype fp32",
    ),
    refused_pair(
        "exp_avg_dtype or exp_avg_sq_dtype fp16 with bf16",
        lambda c: c.precision.bf16 and "fp16" in c.optimizer.moment_dtypes,
        "a bf16 run has no float16 states",
        "give bf16 or int8",
    ),
    refused_pair(
        "main_params_rounding with main_params_dtype fp32",
        lambda c: (
            c.optimizer.main_params_rounding is not None and c.optimizer.main_params_dtype == "fp32"
        ),
        "fp32 weights are not rounded",
        "give --main-params-dtype bf16 or fp16, or drop it",
    ),
    refused_pair(
        "exp_avg_sq_dtype with optimizer sgd",
        lambda c: c.optimizer.optimizer == "sgd" and c.optimizer.exp_avg_sq_dtype != "fp32",
        "SGD has no second moment",
        "give --exp-avg-dtype for its momentum, or drop it",
    ),
    refused_pair(
        "sgd_nesterov with sgd_momentum 0",
        lambda c: c.optimizer.sgd_nesterov and c.optimizer.sgd_momentum == 0,
        "there is no momentum to look ahead by",
        "raise --sgd-momentum, or drop --sgd-nesterov",
    ),
    refused_pair(
        "constant weight decay with start_weight_decay or end_weight_decay",
        lambda c: (
            c.optimizer.weight_decay_incr_style == "constant"
            and (c.optimizer.start_weight_decay, c.optimizer.end_weight_decay) != (None, None)
        ),
        "a constant has neither start nor end",
        "give --weight-decay, or --weight-decay-incr-style linear",
    ),
    refused_pair(
        "changing weight decay without start_weight_decay and end_weight_decay",
        lambda c: (
            c.optimizer.weight_decay_incr_style != "constant"
            and None in (c.optimizer.start_weight_decay, c.optimizer.end_weight_decay)
        ),
        "the curve needs both ends",
        "give --start-weight-decay and --end-weight-decay",
    ),
    refused_pair(
        "recompute_method or recompute_num_layers without recompute_granularity",
        lambda c: (
            c.recompute.recompute_granularity is None
            and (c.recompute.recompute_method, c.recompute.recompute_num_layers) != (None, None)
        ),
        "nothing is recomputed",
        "add --recompute-granularity full",
    ),
    refused_pair(
        "optimizer_impl apex with device cpu",
        lambda c: c.optimizer.optimizer_impl == "apex" and c.run.device == "cpu",
        "apex has CUDA kernels only",
        "give --optimizer-impl torch",
    ),
    refused_pair(
        "distributed_backend nccl with device cpu",
        lambda c: c.parallel.distributed_backend == "nccl" and c.run.device == "cpu",
        "nccl moves CUDA tensors only",
        "give --distributed-backend gloo",
    ),
    refused_pair(
        "distributed_backend gloo with device cuda",
        lambda c: c.parallel.distributed_backend == "gloo" and c.run.device == "cuda",
        "gloo moves CPU tensors",
        "give --distributed-backend nccl",
    ),
    refused_pair(
        "num_layers_per_virtual_pipeline_stage without pipeline_model_parallel_size above 1",
        lambda c: (
            c.parallel.num_layers_per_virtual_pipeline_stage is not None
            and c.parallel.pipeline_model_parallel_size == 1
        ),
        "there is no pipeline to interleave",
        "raise --pipeline-model-parallel-size or drop it",
    ),
    refused_pair(
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
    refused_pair(
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
    refused_pair(
        "pipeline_schedule message-driven without pipeline_model_parallel_size above 1",
        lambda c: (
            c.parallel.pipeline_schedule == "message-driven"
            and c.parallel.pipeline_model_parallel_size == 1
        ),
        "a single stage gets no messages",
        "raise --pipeline-model-parallel-size or drop it",
    ),
    refused_pair(
        "pipeline_schedule message-driven with num_layers_per_virtual_pipeline_stage",
        lambda c: (
            c.parallel.pipeline_schedule == "message-driven"
            and c.parallel.num_layers_per_virtual_pipeline_stage is not None
        ),
        "its stages hold one run of layers each",
        "give --pipeline-schedule 1f1b, or drop it",
    ),
    refused_pair(
        "pipeline_limit without pipeline_schedule message-driven",
        lambda c: (
            c.parallel.pipeline_limit is not None
            and c.parallel.pipeline_schedule != "message-driven"
        ),
        "1F1B itself limits the microbatches in flight",
        "add --pipeline-schedule message-driven or drop it",
    ),
    refused_pair(
        "optimizer_cpu_offload without fp16 or bf16",
        lambda c: c.offload.optimizer_cpu_offload and not (c.precision.fp16 or c.precision.bf16),
        "fp32 parameters are the master weights themselves, which must stay on the device",
        "add --bf16 or --fp16, or drop it",
    ),
    refused_pair(
        "optimizer_cpu_offload with a grad_path other than dense and samo",
        lambda c: c.offload.optimizer_cpu_offload and c.gradient.grad_path not in ("dense", "samo"),
        "its error feedback or its selection needs whole states on the device at a time",
        "give --grad-path dense or samo, or drop it",
    ),
    refused_pair(
        "optimizer_cpu_offload with use_distributed_optimizer",
        lambda c: c.offload.optimizer_cpu_offload and c.parallel.use_distributed_optimizer,
        "each reduces the states on a device in its own way",
        "drop one of them",
    ),
    refused_pair(
        "optimizer_cpu_offload with ddp_bucket_size",
        lambda c: c.offload.optimizer_cpu_offload and c.parallel.ddp_bucket_size is not None,
        "gradients are sent in offload_coarsening x offload_bucket_size entries",
        "give these, or drop it",
    ),
    refused_pair(
        "grad_wire with gradients accumulated in 16 bits",
        lambda c: c.gradient.grad_wire is not None and c.precision.grad_dtype != "float32",
        "it rounds fp32 values once, and these are rounded already",
        "drop --grad-reduce-in-bf16, or give --accumulate-allreduce-grads-in-fp32 with --fp16",
    ),
    refused_pair(
        "grad_wire with predivide_loss",
        lambda c: c.gradient.grad_wire is not None and c.precision.predivide_loss,
        "it encodes means, not sums",
        "drop one of them",
    ),
    refused_pair(
        "predivide_loss with a grad_path other than dense and samo",
        lambda c: c.precision.predivide_loss and c.gradient.grad_path not in ("dense", "samo"),
        "it does not merely sum gradients",
        "give --grad-path dense or samo, or drop it",
    ),
    refused_pair(
        "recompute_method sqrt with recompute_num_layers",
        lambda c: (
            c.recompute.recompute_method == "sqrt" and c.recompute.recompute_num_layers is not None
        ),
        "the rule finds the number",
        "give --recompute-method uniform, or drop it",
    ),
    refused_pair(
        "use_distributed_optimizer with a grad_path other than dense, samo and radius",
        lambda c: (
            c.parallel.use_distributed_optimizer
            and not {"dense", "samo", "radius"}.issuperset(c.gradient.grad_path.split("+"))
        ),
        "it has no shards of a mean or of an update",
        "give --grad-path dense, samo, radius or samo+radius, or drop --use-distributed-optimizer",
    ),
    refused_pair(
        "overlap_param_gather without use_distributed_optimizer and dp_inner_size",
        lambda c: (
            c.parallel.overlap_param_gather
            and not c.parallel.use_distributed_optimizer
            and c.parallel.dp_inner_size == 1
        ),
        "every rank updates all parameters, so that none is gathered",
        "add --use-distributed-optimizer, or drop it",
    ),
    refused_pair(
        "dp_inner_size above 1 with a grad_path other than dense, samo and radius",
        lambda c: (
            c.parallel.dp_inner_size > 1
            and not {"dense", "samo", "radius"}.issuperset(c.gradient.grad_path.split("+"))
        ),
        "it reduces whole buckets, not shards of them",
        "give --grad-path dense, samo, radius or samo+radius, or drop --dp-inner-size",
    ),
    refused_pair(
        "dp_inner_size above 1 with grad_wire",
        lambda c: c.parallel.dp_inner_size > 1 and c.gradient.grad_wire is not None,
        "the wire averages over all data-parallel ranks at once",
        "drop one of them",
    ),
    refused_pair(
        "dp_inner_size above 1 with optimizer_cpu_offload",
        lambda c: c.parallel.dp_inner_size > 1 and c.offload.optimizer_cpu_offload,
        "each reduces the states on a device in its own way",
        "drop one of them",
    ),
    refused_pair(
        "recompute_granularity selective with recompute_method or recompute_num_layers",
        lambda c: (
            c.recompute.recompute_granularity == "selective"
            and (c.recompute.recompute_method, c.recompute.recompute_num_layers) != (None, None)
        ),
        "it recomputes the same part of every layer",
        "give --recompute-granularity full, or drop them",
    ),
    refused_pair(
        "recompute_method with recompute_granularity other than full and selective",
        lambda c: (
            c.recompute.recompute_granularity not in (None, "full", "selective")
            and c.recompute.recompute_method is not None
        ),
        "it recomputes in all blocks alike",
        "give --recompute-granularity full, or drop --recompute-method",
    ),
    refused_pair(
        "recompute_num_layers with recompute_granularity ops or no-norm",
        lambda c: (
            c.recompute.recompute_granularity in ("ops", "no-norm")
            and c.recompute.recompute_num_layers is not None
        ),
        "it recomputes the same part of every block",
        "give --recompute-granularity residual or every, or drop it",
    ),
    refused_pair(
        "compile with recompute_granularity other than full and selective",
        lambda c: (
            c.recompute.recompute_granularity not in (None, "full", "selective")
            and c.training.compile
        ),
        "it runs layers operator by operator, and torch.compile compiles whole layers",
        "give --recompute-granularity full or selective, or drop --compile",
    ),
)


SHARED_ALTERNATIVES: tuple[Alternatives, ...] = (
    (("train_iters",), ("train_samples",)),
    (("lr_decay_iters",), ("lr_decay_samples",)),
    (("lr_warmup_iters",), ("lr_warmup_samples",), ("lr_warmup_fraction",)),
    (("lr_wsd_decay_iters",), ("lr_wsd_decay_samples",)),
    (("lr_multi_step_iters",), ("lr_multi_step_samples",)),
    (("fp16",), ("bf16",)),
)
"""A flag for one way replaces what the file says of the others. Tasks and paths may add rows."""


def pairs_of(task: type[Config]) -> tuple[RefusedPair, ...]:
    """Return every refused pair of a task's configuration, save for those of gradient paths."""
    return (*SHARED_PAIRS, *task.refused_pairs)


def alternatives_of(task: type[Config]) -> tuple[Alternatives, ...]:
    """Return the alternatives of a task's configuration, save for those of gradient paths."""
    return (*SHARED_ALTERNATIVES, *task.alternatives)


def check_pairs(config: Config, pairs: Sequence[RefusedPair] | None = None) -> None:
    """Raise `ConfigError` for the first refused pair that the configuration holds."""
    for pair in pairs_of(type(config)) if pairs is None else pairs:
        if pair.holds(config):
            raise ConfigError(pair.message(config))


_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,127}")


def run_is_well_named(c: Config) -> str | None:
    """Complain about a run's name that is unsuitable for paths and job scripts."""
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
    """Complain about an output folder that already has another use."""
    taken = {Path("/"): "the root folder", real_path(os.path.expanduser("~")): "the home folder"}
    folders = [real_path(path).parent for path in c.data_paths()]
    taken |= {folder: "a data folder" for folder in folders}
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
    """Return the absolute path without symbolic links; a loop of links is no error."""
    return Path(os.path.realpath(path))


def check(config: Config, givens: Mapping[str, GivenValue] | None = None) -> None:
    """Raise `ConfigError` for the first range, pair or rule that the configuration breaks.

    `givens` has the origins of values, for messages about ranges.
    """
    for section_name, section in config.sections.items():
        for spec in specs_of(type(section), section_name).values():
            value = getattr(section, spec.name)
            check_range(spec, value, origin_of(spec.name, givens or {}))
    check_pairs(config)
    for rule in (*config.rules, *SHARED_RULES):
        if complaint := rule(config):
            raise ConfigError(complaint)


# -------------------------------------------------------------------------- length and batch


def _rank_holds_the_model(c: Config) -> Complaint:
    if c.divides:
        return None
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if (size := getattr(c.parallel, name)) > 1:
            return (
                f"{name} {size}: each rank holds a whole model of the task {c.task}; must be 1; "
                "further ranks are data-parallel"
            )
    return None


def _task_recomputes(c: Config) -> Complaint:
    if c.recomputes or c.recompute.recompute_granularity is None:
        return None
    return (
        f"recompute_granularity {c.recompute.recompute_granularity}: models of the task {c.task} "
        "keep their activations; leave it out, or lower micro_batch_size to save memory"
    )


def _task_compiles(c: Config) -> Complaint:
    if c.compiles or not c.training.compile:
        return None
    return f"compile true: models of the task {c.task} are not compiled; leave it out"


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


def _budget_is_a_size(c: Config) -> Complaint:
    if c.training.memory_budget is None:
        return None
    try:
        parse_bytes(c.training.memory_budget)
    except ConfigError as error:
        return f"memory_budget: {error}"
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
        given = f"lr_warmup_{unit} {warmup}"
        if o.lr_warmup_fraction is not None:
            warmup = int(o.lr_warmup_fraction * length)
            given = f"lr_warmup_fraction {o.lr_warmup_fraction:g}"
        if wsd is not None and wsd + warmup > length:
            return (
                f"lr_wsd_decay_{unit} {wsd} with {given} is more than {name} {length}; "
                "lower one of them"
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


# ------------------------------------------------------------------- recompute and profile


def _profile_ends_after_start(c: Config) -> Complaint:
    start, end = c.logging.profile_step_start, c.logging.profile_step_end
    if not c.logging.profile or start < end:
        return None
    return f"profile_step_end {end} must be more than profile_step_start {start}; raise the end"


SHARED_RULES: tuple[Callable[[Config], Complaint], ...] = (
    _rank_holds_the_model,
    _task_recomputes,
    _task_compiles,
    _run_has_length,
    _training_has_lr,
    _retained_steps_are_saved,
    _ramp_reaches_batch,
    _budget_is_a_size,
    _lr_above_its_floors,
    _schedule_fits,
    _multi_steps_ascend,
    _weight_decay_grows,
    _loss_scales_ordered,
    _profile_ends_after_start,
    output_folders_are_safe,
    run_is_well_named,
)


def check_world(config: Config, world_size: int) -> None:
    """Raise `ConfigError` unless whole copies of the model fill `world_size` ranks.

    Ranks to profile must exist.
    """
    size = config.parallel.model_parallel_size
    absent = [rank for rank in config.logging.profile_ranks if rank >= world_size]
    if world_size < 1:
        raise ConfigError(f"world size {world_size} is out of range; must be at least 1")
    if world_size % size:
        raise ConfigError(
            f"world size {world_size} is not a multiple of {size}, tensor_model_parallel_size x "
            f"pipeline_model_parallel_size; nearest: {nearest_multiples(world_size, size)}"
        )
    _check_inner(world_size // size, config.parallel.dp_inner_size)
    if config.logging.profile and absent:
        raise ConfigError(
            f"profile_ranks: there is no rank {absent[0]} of {world_size}; ranks go from 0 to "
            f"{world_size - 1}"
        )


def _check_inner(dp: int, inner: int) -> None:
    """Raise `ConfigError` unless `inner` is 1 or divides `dp` ranks into several groups."""
    if inner == 1 or (dp % inner == 0 and inner < dp):
        return
    fitting = [str(n) for n in range(2, dp) if dp % n == 0]
    instead = f"give --dp-inner-size {' or '.join(fitting)}, or" if fitting else "give"
    raise ConfigError(
        f"dp_inner_size {inner} does not divide {dp} data-parallel ranks into several groups; "
        f"{instead} --use-distributed-optimizer alone to shard over all ranks"
    )


def check_batch(config: Config, dp: int) -> None:
    """Raise `ConfigError` unless every global batch is whole microbatches on `dp` copies.

    The task's own rule about batches and the number of samples are checked as well.
    """
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
    if complaint := config.complaint_of_batch(dp):
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


WORKING_LOSS_SCALE = 2**16
"""A loss scale at which float16 GPT runs settle."""


def notices(config: Config, given: Container[str]) -> list[str]:
    """Return lines about a checked configuration; `given` are the fields that the user set."""
    about = [notice(config) for notice in _ANY]
    about += [*config.own_notices(), *(notice(config, given) for notice in _DEFAULTS)]
    return [line for line in about if line]


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


def _offload_unread(c: Config) -> Notice:
    if c.offload.optimizer_cpu_offload or c.offload == OffloadConfig():
        return None
    return "the offload_ settings are not read without --optimizer-cpu-offload"


_READ_WITH: tuple[tuple[str, tuple[str, ...], str, Callable[[Config], bool]], ...] = (
    (
        "optimizer",
        ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
        "--lr-decay-style WSD",
        lambda c: c.optimizer.lr_decay_style == "WSD",
    ),
    ("optimizer", ("sgd_momentum",), "--optimizer sgd", lambda c: c.optimizer.optimizer == "sgd"),
    (
        "precision",
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "--fp16",
        lambda c: c.precision.fp16,
    ),
    (
        "logging",
        ("wandb_exp_name", "wandb_entity", "wandb_save_dir"),
        "--wandb-project",
        lambda c: c.logging.wandb_project is not None,
    ),
)
"""Settings of a section, the flag without which nothing reads them, and whether it is given."""


def _unread(c: Config) -> Notice:
    found: list[str] = []
    for section, names, flag, is_given in _READ_WITH:
        options: object = getattr(c, section)
        specs = specs_of(type(options), section)
        values = {name: getattr(options, name) for name in names}
        chosen = [
            f"{name} {show_plain(str(value))}"
            for name, value in values.items()
            if value != specs[name].default
        ]
        if chosen and not is_given(c):
            verb = "are" if len(chosen) > 1 else "is"
            found.append(f"{', '.join(chosen)} {verb} not read without {flag}")
    return "; ".join(found) or None


def _cannot_resume(c: Config) -> Notice:
    if not c.checkpoint.no_save_optim:
        return None
    return (
        "no_save_optim: this run cannot resume from its checkpoints; another run begins with one "
        "by --load, --no-load-optim and another --run-dir"
    )


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
    _offload_unread,
    _unread,
    _cannot_resume,
    _slow_format,
    _moved_folder,
)
_DEFAULTS: tuple[Callable[[Config, Container[str]], Notice], ...] = (_first_loss_scale, _overlap)


def resolve(config: C, world_size: int) -> C:
    """Return the configuration with derived values filled in.

    `to_yaml` then writes every value that the run uses. Resolving a result again changes nothing.

    Raises:
        ConfigError: `world_size` ranks, the grid and the batch do not fit.
    """
    check_world(config, world_size)
    dp = config.data_parallel_size(world_size)
    resolved = dataclasses.replace(
        config,
        training=_resolve_training(config.training, dp),
        parallel=_resolve_parallel(config.parallel),
    ).resolved()
    check_batch(resolved, dp)
    return resolved


def _resolve_training(training: TrainingConfig, dp: int) -> TrainingConfig:
    batch = training.global_batch_size or training.micro_batch_size * dp
    return dataclasses.replace(training, global_batch_size=batch)


def _resolve_parallel(parallel: ParallelConfig) -> ParallelConfig:
    """Turn sequence parallelism off at tensor-parallel size 1, as Megatron-LM does."""
    shared = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    return dataclasses.replace(parallel, sequence_parallel=shared)
