"""Flags of Megatron-LM, old and present, that are not fields here, and how each is treated.

Scripts written for Megatron-LM run unchanged if that is harmless. A flag that would change the
results is refused with the reason. Every use of a flag of these tables is announced.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import flag_name


@dataclass(frozen=True, kw_only=True)
class OldName:
    """A flag that is read as `field`; with `text` the flag takes no value and means that text."""

    flag: str
    field: str
    text: str | None = None

    @property
    def outcome(self) -> str:
        """Effect of the flag, for `--help-compat` and the notice."""
        return f"read as {flag_name(self.field)}" + (f" {self.text}" if self.text else "")


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """A flag without effect; `takes` is its number of values, "?" for at most one."""

    flag: str
    reason: str
    takes: int | str = 0

    @property
    def outcome(self) -> str:
        """Effect of the flag, for `--help-compat` and the notice."""
        return f"ignored: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A flag that stops the run, except for values in `accepted`, which change nothing."""

    flag: str
    reason: str
    accepted: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """Effect of the flag, for `--help-compat`."""
        but = f" (accepted: {', '.join(self.accepted)})" if self.accepted else ""
        return f"refused: {self.reason}{but}"


OLD_NAMES = tuple(
    OldName(flag=flag, field=field, text=text)
    for flag, field, text in (
        ("--checkpoint-activations", "recompute_granularity", "full"),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--activations-checkpoint-method", "recompute_method", None),
        ("--activations-checkpoint-num-layers", "recompute_num_layers", None),
        ("--checkpoint-num-layers", "recompute_num_layers", None),
        ("--layernorm-epsilon", "norm_epsilon", None),
        ("--openai-gelu", "gelu", "tanh"),
        ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
    )
)

_DRAWS = "no random state is kept: every draw follows from seed, iteration and microbatch"
_FUSED = "fusing is up to torch"
_SCHEDULE = "a learning-rate flag that differs from the checkpoint always takes effect"
_ATTENTION = "torch's scaled_dot_product_attention chooses the kernel"
_TRACKED = "the trackers get it anyway"
_STATES = "--main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype alone choose the formats"

IGNORED = tuple(
    Ignored(flag=flag, takes=takes, reason=reason)
    for flag, takes, reason in (
        ("--use-flash-attn", 0, _ATTENTION),
        ("--attention-backend", 1, _ATTENTION),
        ("--transformer-impl", 1, "there is one implementation"),
        ("--use-mcore-models", 0, "there is one implementation"),
        ("--use-legacy-models", 0, "there is one implementation"),
        ("--num-workers", 1, "one thread reads batches ahead (--prefetch-batches)"),
        ("--local-rank", 1, "ranks come from the launcher"),
        ("--local_rank", 1, "ranks come from the launcher"),
        ("--lazy-mpu-init", 1, "ranks come from the launcher"),
        ("--use-cpu-initialization", 0, "weights are always drawn on the CPU"),
        ("--no-check-for-nan-in-loss-and-grad", 0, "loss and gradients are always checked"),
        ("--check-for-nan-in-loss-and-grad", 0, "loss and gradients are always checked"),
        ("--no-async-tensor-model-parallel-allreduce", 0, "order is the program's choice"),
        ("--no-gradient-accumulation-fusion", 0, _FUSED),
        ("--no-masked-softmax-fusion", 0, _FUSED),
        ("--no-scaled-masked-softmax-fusion", 0, _FUSED),
        ("--no-bias-gelu-fusion", 0, _FUSED),
        ("--no-bias-swiglu-fusion", 0, _FUSED),
        ("--no-bias-dropout-fusion", 0, _FUSED),
        ("--no-rope-fusion", 0, _FUSED),
        ("--no-persist-layer-norm", 0, _FUSED),
        ("--attention-softmax-in-fp32", 0, "the attention kernel sums in float32 anyway"),
        ("--apply-query-key-layer-scaling", 0, "the attention kernel does not overflow"),
        ("--no-query-key-layer-scaling", 0, "the attention kernel does not overflow"),
        ("--use-precision-aware-optimizer", 0, _STATES),
        ("--fp16-lm-cross-entropy", 0, "the loss is always computed in float32"),
        ("--calculate-per-token-loss", 0, "the loss is always the mean over counted tokens"),
        ("--no-save-rng", 0, _DRAWS),
        ("--no-load-rng", 0, _DRAWS),
        ("--ckpt-format", 1, "there is one format: safetensors and a manifest"),
        ("--dist-ckpt-format", 1, "there is one format: safetensors and a manifest"),
        ("--use-dist-ckpt", 0, "there is one format: safetensors and a manifest"),
        ("--override-lr-scheduler", 0, _SCHEDULE),
        ("--override-opt_param-scheduler", 0, _SCHEDULE),
        ("--override-opt-param-scheduler", 0, _SCHEDULE),
        ("--use-checkpoint-lr-scheduler", 0, _SCHEDULE),
        ("--use-checkpoint-opt_param-scheduler", 0, _SCHEDULE),
        ("--use-checkpoint-opt-param-scheduler", 0, _SCHEDULE),
        ("--log-progress", 0, "metrics.jsonl has every step, log.txt every checkpoint"),
        ("--log-batch-size-to-tensorboard", 0, _TRACKED),
        ("--log-learning-rate-to-tensorboard", 0, _TRACKED),
        ("--log-loss-scale-to-tensorboard", 0, _TRACKED),
        ("--log-world-size-to-tensorboard", 0, _TRACKED),
        ("--no-log-learnig-rate-to-tensorboard", 0, _TRACKED),
        ("--no-log-loss-scale-to-tensorboard", 0, _TRACKED),
        ("--exit-signal-handler", 0, "signals always save and leave"),
        ("--no-contiguous-buffers-in-local-ddp", 0, "gradients live in buckets"),
        ("--no-scatter-gather-tensors-in-pipeline", 0, "stages send whole tensors"),
        ("--no-overlap-p2p-communication", 0, "no stage waits for its sends"),
        ("--no-create-attention-mask-in-dataloader", 0, "no attention mask is made"),
        ("--num-dataset-builder-threads", 1, "indices are built by one thread"),
        ("--no-barrier-with-level-1-timing", 0, "timers have no barriers"),
        ("--manual-gc", 0, "the program decides when to collect garbage"),
        ("--manual-gc-interval", 1, "the program decides when to collect garbage"),
        ("--empty-unused-memory-level", 1, "device memory is left to torch"),
        ("--cross-entropy-loss-fusion", 0, _FUSED),
        ("--cross-entropy-fusion-impl", 1, _FUSED),
        ("--tp-comm-overlap", 0, "order is the program's choice"),
        ("--ckpt-fully-parallel-save", 0, "ranks always share the work of a save"),
        ("--ckpt-fully-parallel-load", 0, "ranks always read only what they need"),
        ("--ckpt-assume-constant-structure", 0, "each save writes its own manifest"),
        ("--auto-detect-ckpt-format", 0, "there is one format: safetensors and a manifest"),
        ("--log-straggler", 0, "timers show the fastest and slowest rank (--timing-log-option)"),
        ("--mmap-warmup", 0, "the operating system reads ahead"),
        ("--tiktoken-pattern", 1, "no tiktoken tokenizer is read"),
        ("--fp8-amax-history-len", 1, "there is no fp8 without --fp8-format"),
        ("--fp8-amax-compute-algo", 1, "there is no fp8 without --fp8-format"),
        ("--fp8-margin", 1, "there is no fp8 without --fp8-format"),
        ("--fp8-interval", 1, "there is no fp8 without --fp8-format"),
    )
)

_RENAMED = "no longer a flag of Megatron-LM; give {}"
_SELECT = "not supported; take the one value that is accepted, or leave it out"

REFUSED = tuple(
    Refused(flag=flag, reason=reason, accepted=accepted)
    for flag, accepted, reason in (
        ("--model-parallel-size", (), _RENAMED.format("--tensor-model-parallel-size")),
        ("--batch-size", (), _RENAMED.format("--micro-batch-size")),
        ("--warmup", (), _RENAMED.format("--lr-warmup-fraction")),
        ("--DDP-impl", ("local", "torch"), _SELECT),
        ("--data-impl", ("mmap", "infer"), _SELECT),
        ("--row-tensor-model-parallel-size", ("1",), "not supported: tensors are cut one way"),
        ("--column-tensor-model-parallel-size", ("1",), "not supported: tensors are cut one way"),
        ("--depth-tensor-model-parallel-size", ("1",), "not supported: tensors are cut one way"),
        ("--context-parallel-size", ("1",), "not supported: no context parallelism"),
        ("--expert-model-parallel-size", ("1",), "not supported: no mixture of experts"),
        ("--expert-tensor-parallel-size", ("1",), "not supported: no mixture of experts"),
        ("--num-experts", (), "not supported: no mixture of experts"),
        (
            "--virtual-pipeline-model-parallel-size",
            ("1",),
            _RENAMED.format("--num-layers-per-virtual-pipeline-stage"),
        ),
        ("--distribute-saved-activations", (), "not supported: activations are not shared out"),
        ("--fp8-format", (), "not supported: give --bf16"),
        ("--fp8-param-gather", (), "not supported: give --bf16"),
        ("--decoupled-lr", (), "not supported: one learning rate for all weights, --lr"),
        ("--decoupled-min-lr", (), "not supported: one learning rate for all weights, --min-lr"),
        ("--transformer-engine-fp8", (), "not supported: give --bf16"),
        ("--no-position-embedding", (), "not supported: give --position-embedding-type"),
        ("--squared-relu", (), "not supported: give --swiglu or --gelu"),
        ("--add-qkv-bias", (), "not supported: biases are everywhere or nowhere"),
        ("--apply-layernorm-1p", (), "not supported: give --normalization"),
        ("--decrease-batch-size-if-needed", (), "not supported: give a legal batch size"),
        ("--step-batch-size-schedule", (), "not supported: give --rampup-batch-size"),
        ("--use-checkpoint-args", (), "not supported: give --config RUN/config.yaml"),
        ("--pretrained-checkpoint", (), "not supported: give --load with --finetune"),
        ("--test-mode", (), "not supported: give --skip-train"),
    )
)

SYNONYMS = {
    "batch_size": "micro_batch_size",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "block_size": "seq_length",
    "checkpoint_dir": "load",
    "clip_grad_norm": "clip_grad",
    "context_length": "seq_length",
    "d_model": "hidden_size",
    "data": "data_path",
    "dataset": "data_path",
    "eval_interval_steps": "eval_interval",
    "eval_steps": "eval_interval",
    "grad_clip": "clip_grad",
    "gradient_clip_val": "clip_grad",
    "gradient_checkpointing": "recompute_granularity",
    "intermediate_size": "ffn_hidden_size",
    "learning_rate": "lr",
    "logging_steps": "log_interval",
    "lr_scheduler_type": "lr_decay_style",
    "max_grad_norm": "clip_grad",
    "max_iters": "train_iters",
    "max_length": "seq_length",
    "max_seq_len": "seq_length",
    "max_steps": "train_iters",
    "min_learning_rate": "min_lr",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_layer": "num_layers",
    "n_layers": "num_layers",
    "num_heads": "num_attention_heads",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_query_groups",
    "num_steps": "train_iters",
    "out_dir": "run_dir",
    "output_dir": "run_dir",
    "per_device_train_batch_size": "micro_batch_size",
    "resume_from_checkpoint": "load",
    "save_steps": "save_interval",
    "save_total_limit": "keep_last",
    "sequence_length": "seq_length",
    "steps": "train_iters",
    "tokenizer": "tokenizer_model",
    "warmup_iters": "lr_warmup_iters",
    "warmup_ratio": "lr_warmup_fraction",
    "warmup_steps": "lr_warmup_iters",
}
"""Names that nanoGPT, litgpt, Hugging Face and others use for these fields, for hints only."""

ELSEWHERE = {
    "amp": "--bf16 or --fp16",
    "dtype": "--bf16 or --fp16; neither means fp32",
    "epochs": "--train-iters or --train-samples",
    "gradient_accumulation_steps": "--global-batch-size, microbatches included",
    "init_from": "--load FOLDER, or tools/import_hf.py for a model of Hugging Face",
    "mixed_precision": "--bf16 or --fp16",
    "num_train_epochs": "--train-iters or --train-samples",
    "precision": "--bf16 or --fp16; neither means fp32",
    "resume": "the same command again: a run resumes automatically; --load starts from another",
    "version": "pip show sparsetron",
}
"""Hints at the counterpart of another program's flag that is more than one field."""
MEGATRON_NAMES: tuple[OldName | Ignored | Refused, ...] = OLD_NAMES + IGNORED + REFUSED

RETIRED_KEYS = {"log_progress": "metrics.jsonl has every step, log.txt every checkpoint"}
"""Keys that a config.yaml of an older version may have, with the replacement."""
RETIRED_VALUES = {
    ("radius_residual", "in-place"): ("separate", "the results are the same, bit by bit"),
}
"""Values that an older version took: the value that is read instead, and the reason."""
