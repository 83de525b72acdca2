"""Settings that exclude each other: one table, checked before anything is allocated and printed by
`--help-compat`. A new pair is one row; a gradient path may offer rows of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.values import show
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config.config import Config


@dataclass(frozen=True, kw_only=True)
class RefusedPair:
    """`name` says which settings, in the user's words; `holds` whether a configuration has both;
    `reason` why not; `instead` the way out."""

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
            )
        ),
        "a run counted in steps has its schedule in steps",
        "use lr_decay_iters, lr_warmup_iters, lr_wsd_decay_iters",
    ),
    _pair(
        "train_samples with lengths in iters",
        lambda c: (
            c.training.train_samples is not None
            and (
                c.optimizer.lr_decay_iters
                or c.optimizer.lr_warmup_iters
                or c.optimizer.lr_wsd_decay_iters
            )
        ),
        "a run counted in samples has its schedule in samples",
        "use lr_decay_samples, lr_warmup_samples, lr_wsd_decay_samples",
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


def check_pairs(config: Config, pairs: Sequence[RefusedPair] = REFUSED_PAIRS) -> None:
    """Raise `ConfigError` for the first refused pair that the configuration holds."""
    for pair in pairs:
        if pair.holds(config):
            raise ConfigError(pair.message(config))
