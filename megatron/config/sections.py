"""The sections of a configuration: one frozen dataclass each, and `Config`, which holds them all.

`ModelConfig` and `DataConfig` are GPT's; other tasks bring sections of their own. Names and
defaults are Megatron-LM's unless the help text says "ours".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeVar, get_type_hints

from megatron.config.fields import (
    FieldSpec,
    ValueRange,
    above,
    at_least,
    below_one,
    between,
    option,
    section,
    specs_of,
)
from megatron.config.rules import Alternatives, Complaint, RefusedPair
from megatron.errors import ConfigError


def split_layers(
    layers: int,
    stages: int,
    *,
    first: int | None = None,
    last: int | None = None,
    per_virtual_stage: int | None = None,
) -> list[list[range]]:
    """Split layers into ascending ranges for each stage; only interleaved schedules have several.

    Shares are even; if the number does not divide evenly, the first stages get one layer more.
    Raises `ConfigError` if a stage would get no layer, or if the numbers do not add up.

    Args:
        first: Layers of the first stage, which also holds the embedding.
        last: Layers of the last stage, which also holds the output layer.
        per_virtual_stage: Layers of a model chunk; chunks are dealt to the stages in turn
            (interleaved 1F1B).
    """
    if per_virtual_stage is not None:
        return _in_turns(layers, stages, per_virtual_stage)
    given = {stage: count for stage, count in ((0, first), (stages - 1, last)) if count is not None}
    rest = layers - sum(given.values())
    free = [stage for stage in range(stages) if stage not in given]
    if rest and not free:
        raise ConfigError(
            f"decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers make "
            f"{layers - rest} layers, num_layers is {layers}; they must agree"
        )
    if rest < len(free):
        raise ConfigError(
            f"pipeline_model_parallel_size {stages} leaves a stage without layers: num_layers "
            f"{layers}{_fixed(given)}; lower {'that or what the ends hold' if given else 'it'}"
        )
    counts = dict(given)
    for number, stage in enumerate(free):
        counts[stage] = rest // len(free) + (number < rest % len(free))
    starts = [sum(counts[before] for before in range(stage)) for stage in range(stages)]
    return [[range(start, start + counts[stage])] for stage, start in enumerate(starts)]


def _in_turns(layers: int, stages: int, size: int) -> list[list[range]]:
    if layers % (stages * size):
        fitting = [n for n in range(1, layers // stages + 1) if layers % (stages * n) == 0]
        way_out = f"give one of {', '.join(map(str, fitting))}" if fitting else "leave it out"
        raise ConfigError(
            f"num_layers_per_virtual_pipeline_stage {size}: num_layers {layers} is not a multiple "
            f"of {size} x pipeline_model_parallel_size {stages}; {way_out}"
        )
    runs = [range(start, start + size) for start in range(0, layers, size)]
    return [runs[stage::stages] for stage in range(stages)]


def _fixed(given: dict[int, int]) -> str:
    if not given:
        return ""
    return f", of which {' and '.join(map(str, given.values()))} are given to the ends"


def describe_split(split: list[list[range]]) -> str:
    """Return the split for the log: "0-7, 8-15, 16-22, 23-29"; + joins runs of one stage."""
    return ", ".join(
        "+".join(f"{run.start}-{run.stop - 1}" if len(run) > 1 else str(run.start) for run in runs)
        for runs in split
    )


LARGEST_DEPTH = 10_000
"""Maximum number of layers: more than any network has, and few enough to plan for each."""

ROPE_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants of Llama 3.1's rotary scaling, named as in Hugging Face.

Megatron-LM fixes them as well; only the factor is an option.
"""


@section
class ModelConfig:
    """Shape of the network."""

    num_layers: int = option(help="Number of transformer layers.", within=between(1, LARGEST_DEPTH))
    hidden_size: int = option(help="Width of the network.", within=at_least(1))
    num_attention_heads: int = option(help="Attention heads of a layer.", within=at_least(1))
    seq_length: int = option(help="Length of a sample, in tokens.", within=at_least(1))
    max_position_embeddings: int | None = option(
        default=None,
        help="Longest sequence, in tokens, that position embeddings cover (none = seq_length).",
        within=at_least(1),
    )
    ffn_hidden_size: int | None = option(
        default=None, help="Width of the MLP (none = 4 x hidden_size).", within=at_least(1)
    )
    kv_channels: int | None = option(
        default=None,
        help="Width of an attention head (none = hidden_size / num_attention_heads).",
        within=at_least(1),
    )
    group_query_attention: bool = option(
        default=False,
        help="Share each of num_query_groups key-value heads among several query heads.",
    )
    num_query_groups: int = option(
        default=1,
        help="Key-value heads; read with group_query_attention only.",
        within=at_least(1),
    )
    position_embedding_type: Literal["learned_absolute", "rope"] = option(
        default="learned_absolute", help="Kind of position embedding."
    )
    rotary_base: int = option(
        default=10000, help="Base of the rotary wavelengths.", within=at_least(2)
    )
    rotary_percent: float = option(
        default=1.0,
        help="Share of a head's channels that are rotated, (0, 1].",
        within=ValueRange(low=0, low_open=True, high=1),
    )
    use_rope_scaling: bool = option(
        default=False,
        help="Divide low rotary frequencies by rope_scaling_factor, as Llama 3.1 does.",
    )
    rope_scaling_factor: float = option(
        default=8.0,
        help="Divisor of low rotary frequencies; read with use_rope_scaling only.",
        within=at_least(1),
    )
    make_vocab_size_divisible_by: int = option(
        default=128,
        help="Pad the vocabulary in memory to a multiple of this (1 = no padding).",
        within=at_least(1),
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = option(
        default="LayerNorm", help="Kind of normalization."
    )
    norm_epsilon: float = option(
        default=1e-5, help="Term added to the variance in a normalization.", within=above(0)
    )
    qk_layernorm: bool = option(
        default=False,
        help="Normalize the query and the key of each head, before their rotation.",
    )
    swiglu: bool = option(default=False, help="Use gated SiLU instead of GELU in the MLP.")
    gelu: Literal["tanh", "erf"] = option(
        default="tanh", help="Formula of GELU (ours): tanh approximation or exact erf."
    )
    untie_embeddings_and_output_weights: bool = option(
        default=False, help="Use a separate weight for the output layer."
    )
    disable_bias_linear: bool = option(default=False, help="Linear layers without biases.")
    init_method_std: float = option(
        default=0.02, help="Standard deviation of initial weights.", within=above(0)
    )
    attention_dropout: float = option(
        default=0.1,
        help="Probability of dropping an attention weight (0 = off).",
        within=below_one(),
    )
    hidden_dropout: float = option(
        default=0.1,
        help="Probability of dropping a hidden activation (0 = off).",
        within=below_one(),
    )

    @property
    def ffn_size(self) -> int:
        """Width of the MLP; also with swiglu 4 x hidden_size by default, as in Megatron."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key-value heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def positions(self) -> int:
        """Maximum number of positions, in tokens."""
        return self.max_position_embeddings or self.seq_length

    @property
    def tied(self) -> bool:
        """True if the output layer uses the word embedding's weight."""
        return not self.untie_embeddings_and_output_weights

    @property
    def bias(self) -> bool:
        """True if linear layers have biases."""
        return not self.disable_bias_linear

    def padded_vocab_size(self, vocab: int) -> int:
        """Return the rows of the embedding for a vocabulary of `vocab` tokens."""
        multiple = self.make_vocab_size_divisible_by
        return -(-vocab // multiple) * multiple


LARGEST_SEED = 2**32 - 1
"""Largest seed that numpy's generator, which shuffles data as in Megatron, accepts."""

LARGEST_BATCH = 2**30
LARGEST_RUN = 10**12
"""Maximum number of steps or samples: more than a century of training, and no overflow."""


@section
class TrainingConfig:
    """Batches and length of the run. "Samples" are sequences of seq_length tokens."""

    seed: int = option(
        default=1234,
        help="Seed of weights, dropout and data order.",
        within=between(0, LARGEST_SEED),
    )
    micro_batch_size: int = option(
        help="Samples of one forward and backward pass of a rank.", within=between(1, LARGEST_BATCH)
    )
    global_batch_size: int | None = option(
        default=None,
        help="Samples in a step over all ranks (none = micro_batch_size x data-parallel size).",
        within=between(1, LARGEST_BATCH),
    )
    rampup_batch_size: tuple[int, int, int] | None = option(
        default=None,
        help="START INCREMENT SAMPLES: grow the global batch from START by INCREMENT, evenly over "
        "the first SAMPLES samples (none = off).",
        within=between(1, LARGEST_RUN),
    )
    train_iters: int | None = option(
        default=None,
        help="Length of the run in steps (or train_samples).",
        within=between(1, LARGEST_RUN),
    )
    train_samples: int | None = option(
        default=None,
        help="Length of the run in samples (or train_iters).",
        within=between(1, LARGEST_RUN),
    )
    exit_interval: int | None = option(
        default=None,
        help="Save and leave after each step divisible by this (none = off).",
        within=at_least(1),
    )
    exit_duration_in_mins: float | None = option(
        default=None, help="Save and leave after this many minutes (none = off).", within=above(0)
    )
    max_skipped_steps: int = option(
        default=20,
        help="Stop with exit code 5 after this many skipped steps in a row; with a dynamic "
        "loss scale, only steps skipped at its lowest value count (ours).",
        within=at_least(1),
    )
    skip_loss_spikes: float | None = option(
        default=None,
        help="Skip a step whose loss is this many standard deviations above the mean of the last "
        "128 (ours; 6 is usual; none = off).",
        within=above(0),
    )
    skip_train: bool = option(default=False, help="Do not train; evaluate only.")
    prefetch_batches: bool = option(
        default=True,
        help="Read the batches of the next step, and on CUDA copy them to the device, in a thread "
        "while the current step computes (ours; changes no number; false = between steps).",
    )
    deterministic_mode: bool = option(
        default=False, help="Use bitwise reproducible kernels, some of which are slower."
    )
    compile: bool | None = option(
        default=None,
        help="Compile each layer with torch.compile (ours; none = on CUDA, without tensor "
        "parallelism and deterministic_mode; false = off).",
    )
    memory_budget: str | None = option(
        default=None,
        help="Planned bytes that no rank may exceed, such as 500MB, 2GB (10^9 bytes) or 1.5GiB: a "
        "run that needs more takes the fastest of smaller microbatches, recomputation, 16-bit "
        "states and offload that fits (ours; none = off).",
    )

    def num_microbatches(self, global_batch: int, dp: int) -> int:
        """Return the microbatches of each of `dp` data-parallel ranks in a global batch."""
        return global_batch // (self.micro_batch_size * dp)

    def batch_size_at(self, consumed_samples: int) -> int:
        """Return the global batch size, in samples, of the step after `consumed_samples`.

        Megatron's ramp-up rule: stages of equal length in samples, with batches that grow by the
        increment. Needs a global batch size (see `Config.resolve`).
        """
        assert self.global_batch_size is not None, "resolve the configuration first"
        if self.rampup_batch_size is None:
            return self.global_batch_size
        start, increment, samples = self.rampup_batch_size
        stages = (self.global_batch_size - start) // increment
        return start + min(stages, consumed_samples * stages // samples) * increment

    def total_samples(self) -> int:
        """Return the length of the run in samples; 0 for a run that does not train."""
        if self.train_samples is not None:
            return self.train_samples
        if self.train_iters is None:
            return 0
        assert self.global_batch_size is not None, "resolve the configuration first"
        return self.train_iters * self.global_batch_size

    def total_iterations(self) -> int:
        """Return the length of the run in steps.

        A last partial batch is left out, as in Megatron.
        """
        if self.train_iters is not None:
            return self.train_iters
        iterations, consumed, total = 0, 0, self.total_samples()
        while consumed < total:
            batch = self.batch_size_at(consumed)
            steps = -(-(min(self._stage_end(consumed), total) - consumed) // batch)
            if consumed + steps * batch > total:
                steps = (total - consumed) // batch
                return iterations + steps
            iterations, consumed = iterations + steps, consumed + steps * batch
        return iterations

    def _stage_end(self, consumed: int) -> int:
        """Return the next number of consumed samples at which the batch may grow."""
        assert self.global_batch_size is not None
        never = consumed + self.total_samples()
        if self.rampup_batch_size is None:
            return never
        start, increment, samples = self.rampup_batch_size
        stages = (self.global_batch_size - start) // increment
        stage = consumed * stages // samples
        return never if stage >= stages else -(-(stage + 1) * samples // stages)


@section
class OptimizerConfig:
    """Optimizer, learning rate and weight decay."""

    optimizer: Literal["adam", "sgd"] = option(default="adam", help="AdamW or momentum SGD.")
    optimizer_impl: Literal["torch", "apex"] = option(
        default="torch", help="Provider of the fused AdamW kernel (ours); apex must be installed."
    )
    lr: float | None = option(
        default=None,
        help="Highest learning rate; required unless skip_train.",
        within=above(0),
    )
    min_lr: float = option(
        default=0.0, help="Lowest learning rate after warm-up.", within=at_least(0)
    )
    lr_decay_style: Literal[
        "linear", "cosine", "constant", "inverse-square-root", "WSD", "multi-step"
    ] = option(
        default="linear",
        help="Curve from lr down to min_lr (WSD: warm-up, stable, decay; multi-step (ours): lr "
        "times lr_multi_step_factors).",
    )
    lr_decay_iters: int | None = option(
        default=None, help="Steps until min_lr (none = the whole run).", within=at_least(1)
    )
    lr_decay_samples: int | None = option(
        default=None, help="Samples until min_lr (none = the whole run).", within=at_least(1)
    )
    lr_warmup_fraction: float | None = option(
        default=None,
        help="Warm-up as a share of the decay's length, [0, 1) (none = off).",
        within=below_one(),
    )
    lr_warmup_iters: int = option(
        default=0, help="Steps of linear warm-up (0 = off).", within=at_least(0)
    )
    lr_warmup_samples: int = option(
        default=0, help="Samples of linear warm-up (0 = off).", within=at_least(0)
    )
    lr_warmup_init: float = option(
        default=0.0, help="Learning rate at which warm-up starts.", within=at_least(0)
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        default="exponential", help="Curve of the last part of WSD."
    )
    lr_wsd_decay_iters: int | None = option(
        default=None, help="Steps of the last part of WSD.", within=at_least(1)
    )
    lr_wsd_decay_samples: int | None = option(
        default=None, help="Samples of the last part of WSD.", within=at_least(1)
    )
    lr_multi_step_iters: tuple[int, ...] | None = option(
        default=None,
        help="Steps after which multi-step changes the learning rate, ascending (ours).",
        within=at_least(1),
    )
    lr_multi_step_samples: tuple[int, ...] | None = option(
        default=None,
        help="Samples after which multi-step changes the learning rate, ascending (ours).",
        within=at_least(1),
    )
    lr_multi_step_factors: tuple[float, ...] | None = option(
        default=None,
        help="Factors of lr after each of lr_multi_step_iters or _samples, not of one another; "
        "before the first, the learning rate is lr (ours).",
        within=above(0),
    )
    weight_decay: float = option(
        default=0.01,
        help="Weight decay of matrices, decoupled (0 = off); see sgd_weight_decay.",
        within=at_least(0),
    )
    start_weight_decay: float | None = option(
        default=None, help="Weight decay at the first step, where it changes.", within=at_least(0)
    )
    end_weight_decay: float | None = option(
        default=None, help="Weight decay at the last step, where it changes.", within=at_least(0)
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        default="constant", help="Curve from start_ to end_weight_decay (constant = weight_decay)."
    )
    adam_beta1: float = option(
        default=0.9, help="Decay of Adam's first moment.", within=below_one()
    )
    adam_beta2: float = option(
        default=0.999, help="Decay of Adam's second moment.", within=below_one()
    )
    adam_eps: float = option(
        default=1e-8, help="Term added to the square root of Adam's second moment.", within=above(0)
    )
    sgd_momentum: float = option(default=0.9, help="Momentum of SGD (0 = off).", within=below_one())
    sgd_nesterov: bool = option(default=False, help="Use Nesterov's momentum in SGD (ours).")
    sgd_weight_decay: Literal["decoupled", "coupled"] = option(
        default="decoupled",
        help="Form of SGD's weight decay (ours). decoupled: shrink matrices, as AdamW; coupled: "
        "add an L2 term to the gradients of all parameters, as torch's SGD.",
    )
    clip_grad: float = option(
        default=1.0, help="Largest global L2 norm of the gradient (0 = off).", within=at_least(0)
    )
    main_params_dtype: Literal["fp32", "bf16", "fp16"] = option(
        default="fp32",
        help="Format of the weights of matrices that the optimizer updates; bf16 and fp16 must be "
        "the parameters' own, of which there is then no fp32 copy.",
    )
    main_params_rounding: Literal["nearest", "stochastic", "kahan"] | None = option(
        default=None,
        help="Rounding of updated weights to a 16-bit main_params_dtype (ours); kahan keeps what "
        "rounding drops in 2 more bytes a weight (none = stochastic).",
    )
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "int8"] = option(
        default="fp32",
        help="Format of the first moment of matrices, and of SGD's momentum; fp16 and int8 (ours) "
        "have a scale for each 256 entries.",
    )
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "int8"] = option(
        default="fp32",
        help="Format of the second moment of matrices; int8 (ours) stores its square root.",
    )

    @property
    def num_moments(self) -> int:
        """Number of optimizer states per entry in addition to the master weight."""
        return 1 if self.optimizer == "sgd" else 2

    @property
    def moment_dtypes(self) -> tuple[str, ...]:
        """Formats of the moments of matrices, in the order of the update rule."""
        return (self.exp_avg_dtype, self.exp_avg_sq_dtype)[: self.num_moments]

    @property
    def has_state_blocks(self) -> bool:
        """True if entries of a moment share scales."""
        return bool({"fp16", "int8"} & set(self.moment_dtypes))


@section
class PrecisionConfig:
    """Number formats and loss scaling. Neither fp16 nor bf16 means fp32."""

    fp16: bool = option(
        default=False,
        help="Train with float16 parameters; master weights are float32 unless main_params_dtype.",
    )
    bf16: bool = option(
        default=False,
        help="Train with bfloat16 parameters; master weights are float32 unless main_params_dtype.",
    )
    loss_scale: float | None = option(
        default=None, help="Fixed loss scale of fp16 (none = dynamic).", within=above(0)
    )
    initial_loss_scale: float = option(
        default=2.0**32, help="First dynamic loss scale.", within=above(0)
    )
    min_loss_scale: float = option(default=1.0, help="Lowest dynamic loss scale.", within=above(0))
    loss_scale_window: int = option(
        default=1000, help="Applied steps after which the loss scale doubles.", within=at_least(1)
    )
    hysteresis: int = option(
        default=2, help="Skipped steps after which the loss scale halves.", within=at_least(1)
    )
    accumulate_allreduce_grads_in_fp32: bool = option(
        default=False,
        help="Accumulate and send gradients of an fp16 run in float32 (bf16 always does, unless "
        "grad_reduce_in_bf16).",
    )
    grad_reduce_in_bf16: bool = option(
        default=False, help="Accumulate and send gradients of a bf16 run in bfloat16."
    )
    predivide_loss: bool = option(
        default=False,
        help="Divide the loss by the global batch size before backward, so that gradients "
        "are summed over ranks and not averaged (ours; AxoNN does so for 16-bit sums).",
    )

    @property
    def param_dtype(self) -> str:
        """Format of the parameters: "float32", "bfloat16" or "float16"."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @property
    def grad_dtype(self) -> str:
        """Format in which gradients are accumulated and sent."""
        if self.bf16 and self.grad_reduce_in_bf16:
            return "bfloat16"
        if self.fp16 and not self.accumulate_allreduce_grads_in_fp32:
            return "float16"
        return "float32"


WEEK = 7 * 24 * 60
"""Longest timeout, in minutes."""

LARGEST_GRID = 100_000
"""Maximum number of ranks along an axis of the grid: few enough to check each."""


@section
class ParallelConfig:
    """How the work is divided among ranks."""

    tensor_model_parallel_size: int = option(
        default=1, help="Ranks that share each layer (1 = off).", within=between(1, LARGEST_GRID)
    )
    pipeline_model_parallel_size: int = option(
        default=1, help="Pipeline stages (1 = off).", within=between(1, LARGEST_GRID)
    )
    sequence_parallel: bool = option(
        default=False,
        help="Shard norm, dropout and residual activations along the sequence dimension "
        "across tensor-parallel ranks.",
    )
    use_tp_pp_dp_mapping: bool = option(
        default=False,
        help="Order ranks as tensor, pipeline, data: stages of a pipeline on neighbouring "
        "ranks, as in AxoNN (off: tensor, data, pipeline).",
    )
    pipeline_schedule: Literal["1f1b", "message-driven"] = option(
        default="1f1b",
        help="Order of a stage's passes (ours). 1f1b: fixed; message-driven: the message "
        "that arrives first decides, gradients before activations, over MPI (AxoNN).",
    )
    pipeline_limit: int | None = option(
        default=None,
        help="Maximum number of microbatches in flight under message-driven (ours; none = number "
        "of stages).",
        within=at_least(1),
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        default=None,
        help="Layers of a model chunk in the interleaved schedule (none = 1F1B, one chunk "
        "for each stage).",
        within=at_least(1),
    )
    decoder_first_pipeline_num_layers: int | None = option(
        default=None,
        help="Layers of the first stage (none = its even share).",
        within=at_least(1),
    )
    decoder_last_pipeline_num_layers: int | None = option(
        default=None,
        help="Layers of the last stage (none = its even share).",
        within=at_least(1),
    )
    use_distributed_optimizer: bool = option(
        default=False,
        help="Shard master weights and moments over data-parallel ranks (ZeRO-1).",
    )
    dp_inner_size: int = option(
        default=1,
        help="Consecutive data-parallel ranks, as those of a node, that shard master weights and "
        "moments: gradients are averaged within these ranks first, and each shard then between "
        "nodes (ours; 1 = off). Must divide the data-parallel ranks into several groups.",
        within=at_least(1),
    )
    distributed_backend: Literal["nccl", "gloo"] | None = option(
        default=None, help="Collective library (none = nccl on CUDA, gloo on CPU)."
    )
    distributed_timeout_minutes: float = option(
        default=10.0,
        help="Minutes after which a silent rank or a phase without end counts as lost; may "
        "be a fraction.",
        within=between(0.01, WEEK),
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        default=100,
        help="Steps between bitwise comparisons of the weights of data-parallel replicas (on"
        " here, off in Megatron-LM; none = off).",
        within=at_least(1),
    )
    overlap_grad_reduce: bool = option(
        default=True,
        help="Reduce gradients while backward runs (on here, off in Megatron-LM).",
    )
    overlap_param_gather: bool = option(
        default=False,
        help="Gather updated parameters while the next forward runs; needs sharded optimizer "
        "states (use_distributed_optimizer or dp_inner_size).",
    )
    ddp_bucket_size: int | None = option(
        default=None,
        help="Elements of a gradient bucket (none = chosen by the program).",
        within=at_least(1),
    )

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def num_shards(self, ranks: int) -> int:
        """Return the shards of the optimizer states of `ranks` data-parallel ranks; 1 if whole."""
        if self.dp_inner_size > 1:
            return self.dp_inner_size
        return ranks if self.use_distributed_optimizer else 1

    @property
    def rank_order(self) -> Literal["tp-dp-pp", "tp-pp-dp"]:
        """Axes of the grid, from fastest to slowest varying in rank."""
        return "tp-pp-dp" if self.use_tp_pp_dp_mapping else "tp-dp-pp"

    def layer_split(self, num_layers: int) -> list[list[range]]:
        """Return the ranges of layers of each pipeline stage."""
        return split_layers(
            num_layers,
            self.pipeline_model_parallel_size,
            first=self.decoder_first_pipeline_num_layers,
            last=self.decoder_last_pipeline_num_layers,
            per_virtual_stage=self.num_layers_per_virtual_pipeline_stage,
        )

    def longest_run(self, num_layers: int) -> int:
        """Return the number of layers that a stage runs in a row.

        This is the number of the fullest stage, or of a chunk of an interleaved stage.
        """
        return max(len(run) for runs in self.layer_split(num_layers) for run in runs)


@section
class GradientConfig:
    """How gradients travel between data-parallel ranks."""

    grad_path: str = option(
        default="dense", help="How data-parallel ranks exchange gradients (ours)."
    )
    grad_wire: Literal["fp32", "bf16", "int8", "int4"] | None = option(
        default=None,
        help="Format in which values travel between data-parallel ranks, rounded twice for any "
        "number of ranks; 1-D parameters travel in at least bf16; none: a ring all-reduce in the "
        "format in which gradients are accumulated (ours).",
    )
    grad_wire_feedback: bool = option(
        default=True,
        help="Keep what an int8 or int4 grad_wire rounds off and send it with the next gradients "
        "(ours).",
    )

    @property
    def keeps_rounding(self) -> bool:
        """Whether ranks keep what the wire rounds off."""
        return self.grad_wire in ("int8", "int4") and self.grad_wire_feedback


@section
class OffloadConfig:
    """Optimizer states in host memory (AxoNN)."""

    optimizer_cpu_offload: bool = option(
        default=False,
        help="Keep master weights and moments in host memory, and update them bucket by "
        "bucket on the device.",
    )
    offload_bucket_size: int = option(
        default=4_000_000,
        help="Entries of an offloaded bucket (ours); the device holds 14 bytes for each with fp32 "
        "states.",
        within=at_least(128),
    )
    offload_coarsening: int = option(
        default=4,
        help="Offloaded buckets in one all-reduce (ours).",
        within=at_least(1),
    )

    @property
    def chunk(self) -> int:
        """Maximum number of entries per all-reduce, aligned (AxoNN's k x bsize, V-C)."""
        return self.offload_coarsening * self.offload_bucket_size // 64 * 64


@section
class RecomputeConfig:
    """Recomputation of activations in backward, which saves memory."""

    recompute_granularity: (
        Literal["full", "selective", "ops", "no-norm", "every", "residual", "residual-star"] | None
    ) = option(
        default=None,
        help="Activations to recompute in backward. full: whole layers; selective: attention"
        " without its projections. Ours: ops: all but the results of matrix products,"
        " convolutions and attention; no-norm: outputs of norms, with the ReLUs behind them; every:"
        " all but what passes between runs of recompute_num_layers operators; residual: all but"
        " the input of every recompute_num_layers-th residual block; residual-star: as residual,"
        " and in backward keep little of a block too (none = keep all).",
    )
    recompute_method: Literal["uniform", "block", "sqrt"] | None = option(
        default=None,
        help="Layers to recompute. uniform: all, in chunks of recompute_num_layers; block: "
        "the first recompute_num_layers; sqrt (ours): uniform, in chunks of the divisor"
        " of a stage's layers nearest to the root of num_layers (none = uniform).",
    )
    recompute_num_layers: int | None = option(
        default=None,
        help="Layers of a chunk, or recomputed layers, by recompute_method; operators of a run"
        " (every); residual blocks of a segment (residual, residual-star) (none = 1).",
        within=at_least(1),
    )


@section
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = option(
        default=None, help="Folder of checkpoints (none = inside the run folder).", saved=False
    )
    load: str | None = option(
        default=None, help="Folder to start from (none = newest of the run folder)."
    )
    save_interval: int | None = option(
        default=None, help="Steps between checkpoints (none = only at the end).", within=at_least(1)
    )
    keep_last: int | None = option(
        default=None,
        help="Number of good checkpoints to keep; older ones are deleted (ours; none = all).",
        within=at_least(2),
    )
    save_retain_interval: int | None = option(
        default=None,
        help="Keep good checkpoints at multiples of this step in addition to the newest or "
        "keep_last ones; delete others (none = keep_last alone decides).",
        within=at_least(1),
    )
    async_save: bool = option(
        default=False, help="Write checkpoints in the background, from a copy in memory."
    )
    ckpt_step: int | None = option(
        default=None, help="Step to load (none = the newest).", within=at_least(0)
    )
    no_save_optim: bool = option(
        default=False, help="Save checkpoints without the optimizer's state."
    )
    no_load_optim: bool = option(default=False, help="Do not load the optimizer's state.")
    finetune: bool = option(default=False, help="Load only the weights and start at step 0.")
    exit_on_missing_checkpoint: bool = option(
        default=False,
        help="Stop if load names no checkpoint, even if it is the folder of save.",
    )
    reset_grad_state: bool = option(
        default=False,
        help="Start the gradient path with empty state (residuals, index), whatever the "
        "loaded checkpoint holds; needed to leave a path with state.",
        saved=False,
    )
    accept_new_data: bool = option(
        default=False,
        help="Continue although data files changed since the checkpoint (ours).",
        saved=False,
    )


@section
class DataConfig:
    """Data sets and tokenizer."""

    data_path: tuple[str, ...] | None = option(
        default=None,
        help="[WEIGHT] PREFIX ...: data sets as .bin/.idx prefixes, divided by split (none = off).",
    )
    train_data_path: tuple[str, ...] | None = option(
        default=None, help="As data_path, for training only (none = off)."
    )
    valid_data_path: tuple[str, ...] | None = option(
        default=None, help="As data_path, for validation only (none = off)."
    )
    test_data_path: tuple[str, ...] | None = option(
        default=None, help="As data_path, for the final test only (none = off)."
    )
    multiple_validation_sets: bool = option(
        default=False,
        help="Evaluate each file of valid_data_path, which then has no weights, or of data_path as "
        "a set of its own, and log the loss of each; the validation loss is their mean.",
    )
    split: str = option(
        default="969, 30, 1", help="Shares of data_path for training, validation and test."
    )
    data_cache_path: str | None = option(
        default=None, help="Folder of index caches (none = next to the data)."
    )
    mock_data: bool = option(default=False, help="Train on generated tokens; no data set is read.")
    tokenizer_type: (
        Literal[
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "ByteTokenizer",
            "NullTokenizer",
        ]
        | None
    ) = option(default=None, help="Kind of tokenizer (none = as the data set says).")
    vocab_file: str | None = option(
        default=None, help="Vocabulary of GPT2BPETokenizer (none = off)."
    )
    merge_file: str | None = option(default=None, help="Merges of GPT2BPETokenizer (none = off).")
    tokenizer_model: str | None = option(
        default=None, help="File or name of the tokenizer's model (none = off)."
    )
    vocab_size: int | None = option(
        default=None,
        help="Rows of the table of tokens, at least the tokenizer's entries (none = as many); for "
        "NullTokenizer, tokens without the end mark.",
        within=at_least(1),
    )
    reset_position_ids: bool = option(default=False, help="Restart positions at each document.")
    reset_attention_mask: bool = option(
        default=False,
        help="Restrict attention to one document; no mask of all pairs of tokens is made.",
    )
    eod_mask_loss: bool = option(
        default=False, help="Leave end-of-document tokens out of the loss."
    )
    no_mmap_bin_files: bool = option(
        default=False, help="Read data files instead of memory-mapping them."
    )
    dataloader_type: Literal["single", "cyclic", "external"] = option(
        default="single",
        help="single: one order of samples, shuffled again for each epoch. Megatron-LM's "
        "cyclic and external are refused.",
    )


@section
class EvaluationConfig:
    """Validation and test."""

    eval_iters: int = option(
        default=100, help="Batches of an evaluation (0 = off).", within=at_least(0)
    )
    full_validation: bool = option(
        default=False,
        help="Evaluate each sample of the validation and test sets once, a last partial batch "
        "included, instead of eval_iters batches.",
    )
    eval_interval: int = option(default=1000, help="Steps between evaluations.", within=at_least(1))
    eval_at_start: bool = option(default=False, help="Also evaluate before step 1 (ours).")


@section
class LoggingConfig:
    """Printing, recording and profiling."""

    log_interval: int = option(
        default=100, help="Steps between lines on the terminal.", within=at_least(1)
    )
    log_params_norm: bool = option(default=False, help="Log the L2 norm of the parameters.")
    log_num_zeros_in_grad: bool = option(
        default=False, help="Log the number of gradient entries that are 0."
    )
    log_throughput: bool = option(default=False, help="Log TFLOP/s for each device.")
    timing_log_level: int = option(
        default=0, help="Detail of timers, 0 (least) to 2.", within=between(0, 2)
    )
    timing_log_option: Literal["max", "minmax", "all"] = option(
        default="minmax", help="Ranks over which timers are shown."
    )
    tensorboard_dir: str | None = option(
        default=None, help="Folder of TensorBoard files (none = off)."
    )
    tensorboard_log_interval: int = option(
        default=1, help="Steps between TensorBoard points.", within=at_least(1)
    )
    tensorboard_queue_size: int = option(
        default=1000, help="Points that TensorBoard holds in memory.", within=at_least(1)
    )
    log_timers_to_tensorboard: bool = option(default=False, help="Write timers to TensorBoard.")
    log_validation_ppl_to_tensorboard: bool = option(
        default=False, help="Write perplexities to TensorBoard."
    )
    log_memory_to_tensorboard: bool = option(
        default=False, help="Write memory in bytes to TensorBoard."
    )
    wandb_project: str | None = option(
        default=None, help="Project at Weights & Biases (none = off)."
    )
    wandb_entity: str | None = option(
        default=None, help="User or team at Weights & Biases (none = the account's own)."
    )
    wandb_exp_name: str | None = option(
        default=None, help="Name of the run at Weights & Biases (none = the configuration's)."
    )
    wandb_save_dir: str | None = option(
        default=None, help="Folder of Weights & Biases' files (none = inside the run folder)."
    )
    profile: bool = option(default=False, help="Profile some steps.")
    profile_step_start: int = option(
        default=10, help="First step that is profiled.", within=at_least(0)
    )
    profile_step_end: int = option(
        default=12, help="Step at which profiling stops.", within=at_least(1)
    )
    profile_ranks: tuple[int, ...] = option(
        default=(0,), help="Ranks that profile.", within=at_least(0)
    )
    use_pytorch_profiler: bool = option(
        default=False, help="Use torch.profiler; otherwise emit markers for an external profiler."
    )
    peak_tflops: float | None = option(
        default=None,
        help="Peak TFLOP/s of a device, for model FLOPs utilization (ours; none = not shown).",
        within=above(0),
    )


@section
class RunConfig:
    """Settings of one start of the program; `--config` does not repeat them."""

    run_dir: str | None = option(
        default=None,
        help="Run folder (ours; none = runs/ and the configuration's name).",
        saved=False,
    )
    device: Literal["cpu", "cuda"] | None = option(
        default=None, help="Device to train on (ours; none = cuda if available).", saved=False
    )
    debug: bool = option(default=False, help="Show tracebacks of errors (ours).", saved=False)
    dry_run: bool = option(
        default=False,
        help="Check the configuration for this number of ranks, print it and stop (ours).",
        saved=False,
    )
    check_paths: bool = option(
        default=True,
        help="Let a dry run also look for the data, tokenizer, masks and checkpoint (ours; "
        "false where only compute nodes have them).",
        saved=False,
    )


_NOT_SECTIONS = ("extensions", "name", "notices", "from_flags")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting of a run, by section.

    A task is a subclass that gives `model` and `data` types of their own, and overrides what the
    rules about these need. `extensions` holds the sections that the gradient path brings. `name` is
    the stem of the configuration file, or the name of the task without a file; `notices` are lines
    to be announced once; `from_flags` are the fields that the command line itself sets. These three
    are no settings and do not count in comparisons.
    """

    model: object
    training: TrainingConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    gradient: GradientConfig = field(default_factory=GradientConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    data: object
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    extensions: dict[str, object] = field(default_factory=dict[str, object])
    name: str = field(default="run", compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)
    from_flags: frozenset[str] = field(default=frozenset(), compare=False)

    # ---- facts of a task, for its subclass to override -------------------------------------------

    task: ClassVar[str]
    """The name of the task: "gpt". `pretrain_<name>.py` trains it."""
    example: ClassVar[str] = "FILE"
    """A configuration file to begin with, for the usage line."""
    divides: ClassVar[bool] = False
    """Whether ranks may share a copy of the model: tensor and pipeline parallelism."""
    recomputes: ClassVar[bool] = False
    """Whether the model takes `--recompute-granularity`."""
    compiles: ClassVar[bool] = False
    """Whether the model takes `--compile`."""
    refused_pairs: ClassVar[tuple[RefusedPair, ...]] = ()
    """Settings that exclude each other, beside those of `validate.SHARED_PAIRS`."""
    alternatives: ClassVar[tuple[Alternatives, ...]] = ()
    """Settings that replace each other, beside those of `validate.SHARED_ALTERNATIVES`."""
    rules: ClassVar[tuple[Callable[[Any], Complaint], ...]] = ()
    """Functions from the configuration to a complaint, or None."""

    def complaint_of_batch(self, dp: int) -> Complaint:
        """Return the complaint about the global batch on `dp` copies of the model, or None."""
        return None

    def own_notices(self) -> Iterator[str]:
        """Yield lines about legal settings of the task that may not be meant."""
        yield from ()

    def cuda_notices(self) -> Iterator[str]:
        """Yield lines about settings that are slow on a GPU, for a run that has found one."""
        yield from ()

    def resolved(self) -> Self:
        """Return the configuration with the derived values of the task's sections filled in."""
        return self

    def data_paths(self) -> list[str]:
        """Return the files of the data; a run may not write into their folders."""
        return []

    def descriptions(self) -> Iterator[str]:
        """Yield lines for the log about how the model is divided and recomputed."""
        yield from ()

    # ---- the sections ----------------------------------------------------------------------------

    @classmethod
    @cache
    def section_types(cls) -> Mapping[str, type]:
        """Return the fixed sections, in the order of files and help."""
        hints = get_type_hints(cls)
        names = [f.name for f in dataclasses.fields(cls) if f.name not in _NOT_SECTIONS]
        return {name: hints[name] for name in names}

    @classmethod
    @cache
    def specs(cls) -> Mapping[str, FieldSpec]:
        """Return every fixed field by name. Names are unique over all sections."""
        found: dict[str, FieldSpec] = {}
        for section_name, section_type in cls.section_types().items():
            for name, spec in specs_of(section_type, section_name).items():
                assert name not in found, f"{name}: in {found[name].section} and in {section_name}"
                found[name] = spec
        return found

    @property
    def sections(self) -> dict[str, object]:
        """All sections by name, the gradient path's last."""
        names = (f.name for f in dataclasses.fields(self) if f.name not in _NOT_SECTIONS)
        return {name: getattr(self, name) for name in names} | self.extensions

    def values(self) -> dict[str, object]:
        """Return all settings by field name."""
        return {
            spec.name: getattr(section, spec.name)
            for name, section in self.sections.items()
            for spec in specs_of(type(section), name).values()
        }

    def with_values(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with other values of settings that every run of the task has, unchecked.

        Args:
            changes: Values by the name of the field.
        """
        specs, sections = self.specs(), dict[str, Any]()
        for name, value in changes.items():
            section = specs[name].section
            old = sections.get(section, getattr(self, section))
            sections[section] = dataclasses.replace(old, **{name: value})
        return dataclasses.replace(self, **sections)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of copies of the model among `world_size` ranks."""
        return world_size // self.parallel.model_parallel_size

    def num_microbatches(self, global_batch: int, dp: int) -> int:
        """Return the microbatches of a step, as `TrainingConfig.num_microbatches` does."""
        return self.training.num_microbatches(global_batch, dp)

    def batch_size_at(self, consumed_samples: int) -> int:
        """Return the global batch size, as `TrainingConfig.batch_size_at` does."""
        return self.training.batch_size_at(consumed_samples)

    def total_samples(self) -> int:
        """Return the samples of the whole run, as `TrainingConfig.total_samples` does."""
        return self.training.total_samples()

    def total_iterations(self) -> int:
        """Return the steps of the whole run, as `TrainingConfig.total_iterations` does."""
        return self.training.total_iterations()


T = TypeVar("T")


def options_of(config: Config, kind: type[T]) -> T:
    """Return the section of a gradient path's options.

    Args:
        config: The configuration of a run on a path with this section.
        kind: The class of the section, one of the path's `sections`.
    """
    (found,) = (options for options in config.extensions.values() if isinstance(options, kind))
    return found


def known_length(config: Config) -> int | None:
    """Return the length of the run in steps, or None.

    None means that nothing is trained, or that the length follows from the global batch size, which
    is derived from the number of ranks when the run starts.
    """
    training = config.training
    is_known = training.train_iters is not None or training.global_batch_size is not None
    return config.total_iterations() if is_known and not training.skip_train else None
