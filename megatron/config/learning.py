"""Sections that decide what is learned: batches and length of the run, the optimizer, the number
formats. Names and defaults are Megatron-LM's unless the help says "ours"."""

from __future__ import annotations

from typing import Literal

from megatron.config.options import (
    above,
    at_least,
    below_one,
    between,
    option,
    section,
)

LARGEST_SEED = 2**32 - 1
"""What the shuffle's generator (numpy's, as Megatron's) takes."""

LARGEST_BATCH = 2**30
LARGEST_RUN = 10**12
"""Steps or samples: beyond what any machine trains in a century, and far from overflows."""


@section
class TrainingConfig:
    """Batches and length of the run. "Samples" are sequences of seq_length tokens."""

    seed: int = option(
        default=1234,
        help="Seed of weights, dropout and data order.",
        within=between(0, LARGEST_SEED),
    )
    micro_batch_size: int = option(
        help="Samples that a rank computes at once.", within=between(1, LARGEST_BATCH)
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
        help="Stop, exit code 5, after this many skipped steps in a row; with a dynamic loss scale "
        "those count that it cannot get lower for (ours).",
        within=at_least(1),
    )
    skip_loss_spikes: float | None = option(
        default=None,
        help="Skip a step whose loss is this many standard deviations above the mean of the last "
        "128 (ours; 6 is usual; none = off).",
        within=above(0),
    )
    skip_train: bool = option(default=False, help="Evaluate only.")
    deterministic_mode: bool = option(
        default=False, help="Bitwise reproducible kernels, some of them slower."
    )
    compile: bool | None = option(
        default=None,
        help="Compile each layer with torch.compile (ours; none = on CUDA, without tensor "
        "parallelism and deterministic_mode; false = off).",
    )

    def num_microbatches(self, global_batch: int, dp: int) -> int:
        """Microbatches of each of `dp` data-parallel ranks in a global batch."""
        return global_batch // (self.micro_batch_size * dp)

    def batch_size_at(self, consumed_samples: int) -> int:
        """Global batch of the step that begins after `consumed_samples`, in samples.

        Megatron's ramp-up rule: evenly long stages, counted in samples, with batches growing by
        the increment. Needs a global batch size (see `Config.resolve`).
        """
        assert self.global_batch_size is not None, "resolve the configuration first"
        if self.rampup_batch_size is None:
            return self.global_batch_size
        start, increment, samples = self.rampup_batch_size
        stages = (self.global_batch_size - start) // increment
        return start + min(stages, consumed_samples * stages // samples) * increment

    def total_samples(self) -> int:
        """Length of the run in samples; 0 for a run that trains nothing."""
        if self.train_samples is not None:
            return self.train_samples
        if self.train_iters is None:
            return 0
        assert self.global_batch_size is not None, "resolve the configuration first"
        return self.train_iters * self.global_batch_size

    def total_iterations(self) -> int:
        """Length of the run in steps. A last partial batch is left out, as in Megatron."""
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
        """First number of consumed samples after `consumed` where the global batch may grow."""
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
        default="torch", help="Whose fused AdamW to use (ours); apex must be installed."
    )
    lr: float | None = option(
        default=None,
        help="Highest learning rate; required unless skip_train.",
        within=above(0),
    )
    min_lr: float = option(
        default=0.0, help="Lowest learning rate after warm-up.", within=at_least(0)
    )
    lr_decay_style: Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"] = option(
        default="linear", help="Curve from lr down to min_lr (WSD: warm-up, stable, decay)."
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
    weight_decay: float = option(
        default=0.01, help="Decoupled weight decay of matrices (0 = off).", within=at_least(0)
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
        default=1e-8, help="Added to the root of Adam's second moment.", within=above(0)
    )
    sgd_momentum: float = option(default=0.9, help="Momentum of SGD (0 = off).", within=below_one())
    clip_grad: float = option(
        default=1.0, help="Largest global L2 norm of the gradient (0 = off).", within=at_least(0)
    )

    @property
    def num_moments(self) -> int:
        """Numbers that the optimizer keeps for an entry beside its master weight."""
        return 1 if self.optimizer == "sgd" else 2


@section
class PrecisionConfig:
    """Number formats and loss scaling. Neither fp16 nor bf16 means fp32."""

    fp16: bool = option(default=False, help="float16 parameters, float32 master weights.")
    bf16: bool = option(default=False, help="bfloat16 parameters, float32 master weights.")
    loss_scale: float | None = option(
        default=None, help="Fixed loss scale of fp16 (none = dynamic).", within=above(0)
    )
    initial_loss_scale: float = option(
        default=2.0**32, help="First dynamic loss scale.", within=above(0)
    )
    min_loss_scale: float = option(default=1.0, help="Lowest dynamic loss scale.", within=above(0))
    loss_scale_window: int = option(
        default=1000, help="Good steps after which the loss scale doubles.", within=at_least(1)
    )
    hysteresis: int = option(
        default=2, help="Bad steps after which the loss scale halves.", within=at_least(1)
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
        help="Divide the loss by the whole global batch before backward, so that gradients need "
        "only be summed over ranks (ours; AxoNN's way for 16-bit sums).",
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
