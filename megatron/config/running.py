"""Sections that decide how and where it runs: ranks, gradients, memory, files, data, reports.
Names and defaults are Megatron-LM's unless the help says "ours"."""

from __future__ import annotations

from typing import Literal

from megatron.config.layer_split import split_layers
from megatron.config.options import above, at_least, between, option, section

WEEK = 7 * 24 * 60
"""Minutes."""

LARGEST_GRID = 100_000
"""Ranks along an axis of the grid: more than any machine has, and few enough to look at each."""


@section
class ParallelConfig:
    """How the ranks share the work."""

    tensor_model_parallel_size: int = option(
        default=1, help="Ranks that share each layer (1 = off).", within=between(1, LARGEST_GRID)
    )
    pipeline_model_parallel_size: int = option(
        default=1, help="Pipeline stages (1 = off).", within=between(1, LARGEST_GRID)
    )
    sequence_parallel: bool = option(
        default=False,
        help="Cut what lies between the cut layers along the sequence, over the tensor-parallel "
        "ranks.",
    )
    use_tp_pp_dp_mapping: bool = option(
        default=False,
        help="Place the stages of a pipeline on neighbouring ranks, as AxoNN does (off: the ranks "
        "of a data-parallel group).",
    )
    pipeline_schedule: Literal["1f1b", "message-driven"] = option(
        default="1f1b",
        help="What a stage computes next (ours). 1f1b: a fixed order; message-driven: whatever its "
        "messages allow, gradients before activations, over MPI (AxoNN).",
    )
    pipeline_limit: int | None = option(
        default=None,
        help="Microbatches in flight at most under message-driven (ours; none = as many as "
        "stages).",
        within=at_least(1),
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        default=None,
        help="Interleaved 1F1B: each stage holds several runs of so many layers (none = one run).",
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
        help="ZeRO-1: each data-parallel rank keeps and updates its share of master weights and "
        "moments.",
    )
    distributed_backend: Literal["nccl", "gloo"] | None = option(
        default=None, help="Collective library (none = nccl on CUDA, gloo on CPU)."
    )
    distributed_timeout_minutes: float = option(
        default=10.0,
        help="Minutes after which a silent peer or a phase that does not end counts as lost; may "
        "be a fraction.",
        within=between(0.01, WEEK),
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        default=100,
        help="Steps between comparisons of the data-parallel copies of the weights, bit by bit "
        "(ours is on; Megatron's is off; none = off).",
        within=at_least(1),
    )
    overlap_grad_reduce: bool = option(
        default=True,
        help="Send gradients while backward runs (ours is on; Megatron's is off).",
    )
    ddp_bucket_size: int | None = option(
        default=None,
        help="Elements of a gradient bucket (none = chosen by the program).",
        within=at_least(1),
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def rank_order(self) -> Literal["tp-dp-pp", "tp-pp-dp"]:
        """The axes of the grid, the one along which consecutive ranks lie first."""
        return "tp-pp-dp" if self.use_tp_pp_dp_mapping else "tp-dp-pp"

    def layer_split(self, num_layers: int) -> list[list[range]]:
        """For each pipeline stage its runs of layers."""
        return split_layers(
            num_layers,
            self.pipeline_model_parallel_size,
            first=self.decoder_first_pipeline_num_layers,
            last=self.decoder_last_pipeline_num_layers,
            per_virtual_stage=self.num_layers_per_virtual_pipeline_stage,
        )

    def longest_run(self, num_layers: int) -> int:
        """Layers that a stage runs one after the other: those of the fullest stage, or of an
        interleaved one's chunk."""
        return max(len(run) for runs in self.layer_split(num_layers) for run in runs)


@section
class GradientConfig:
    """How gradients travel between data-parallel ranks."""

    grad_path: str = option(default="dense", help="The gradient path (ours).")


@section
class OffloadConfig:
    """Keeping the optimizer's states in host memory (AxoNN)."""

    optimizer_cpu_offload: bool = option(
        default=False,
        help="Master weights and moments stay in host memory and visit the device in buckets.",
    )
    offload_bucket_size: int = option(
        default=4_000_000,
        help="Entries of such a bucket (ours); the device holds 14 bytes for each.",
        within=at_least(128),
    )
    offload_coarsening: int = option(
        default=4,
        help="Such buckets in an all-reduce (ours).",
        within=at_least(1),
    )

    @property
    def chunk(self) -> int:
        """Entries of an all-reduce at most, as slices are aligned (AxoNN's k x bsize, V-C)."""
        return self.offload_coarsening * self.offload_bucket_size // 64 * 64


@section
class RecomputeConfig:
    """Trading computation for activation memory."""

    recompute_granularity: Literal["full", "selective"] | None = option(
        default=None,
        help="Recompute in backward: full, whole layers; selective, attention without its "
        "projections (none = keep activations).",
    )
    recompute_method: Literal["uniform", "block", "sqrt"] | None = option(
        default=None,
        help="uniform: all layers, in chunks of recompute_num_layers; block: the first "
        "recompute_num_layers layers only; sqrt (ours): uniform, in chunks of the factor of a "
        "stage's layers that is nearest to the root of num_layers (none = uniform).",
    )
    recompute_num_layers: int | None = option(
        default=None, help="Layers, as recompute_method says (none = 1).", within=at_least(1)
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
        default=None, help="Steps between checkpoints (none = the last only).", within=at_least(1)
    )
    keep_last: int | None = option(
        default=None,
        help="Good checkpoints to keep; older ones are deleted (ours; none = all).",
        within=at_least(2),
    )
    save_retain_interval: int | None = option(
        default=None,
        help="Good checkpoints at multiples of this step stay, and the newest one or keep_last; "
        "others are deleted (none = keep_last alone decides).",
        within=at_least(1),
    )
    async_save: bool = option(
        default=False, help="Write checkpoints while training goes on, from a copy in memory."
    )
    ckpt_step: int | None = option(
        default=None, help="Load this step (none = the newest).", within=at_least(0)
    )
    no_save_optim: bool = option(default=False, help="Leave the optimizer's state out of it.")
    no_load_optim: bool = option(default=False, help="Start the optimizer from nothing.")
    finetune: bool = option(default=False, help="Load the weights only and begin at step 0.")
    exit_on_missing_checkpoint: bool = option(
        default=False,
        help="Stop also where load is the folder of save and still empty.",
    )
    reset_grad_state: bool = option(
        default=False,
        help="Leave behind what the gradient path of the loaded checkpoint had not sent yet "
        "(residuals, index) and start this run's path anew; needed to leave a path with state.",
        saved=False,
    )
    accept_new_data: bool = option(
        default=False,
        help="Go on though data files changed since the checkpoint (ours).",
        saved=False,
    )


@section
class DataConfig:
    """Data sets and tokenizer."""

    data_path: tuple[str, ...] | None = option(
        default=None,
        help="[WEIGHT] PREFIX ...: data sets as .bin/.idx prefixes, split by split (none = off).",
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
    split: str = option(
        default="969, 30, 1", help="Shares of data_path for training, validation and test."
    )
    data_cache_path: str | None = option(
        default=None, help="Folder of index caches (none = beside the data)."
    )
    mock_data: bool = option(default=False, help="Made-up tokens; no data set is read.")
    tokenizer_type: (
        Literal[
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
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
        help="Tokens in the vocabulary (none = as the tokenizer says).",
        within=at_least(1),
    )
    reset_position_ids: bool = option(
        default=False, help="Count positions from each document's start."
    )
    reset_attention_mask: bool = option(default=False, help="Attend within a document only.")
    eod_mask_loss: bool = option(default=False, help="No loss at end-of-document tokens.")
    no_mmap_bin_files: bool = option(
        default=False, help="Read data files instead of mapping them into memory."
    )
    dataloader_type: Literal["single", "cyclic", "external"] = option(
        default="single",
        help="single: samples in one order that is shuffled anew for each epoch. Megatron's cyclic "
        "and external are refused.",
    )


@section
class EvaluationConfig:
    """Validation and test."""

    eval_iters: int = option(
        default=100, help="Batches of an evaluation (0 = off).", within=at_least(0)
    )
    eval_interval: int = option(default=1000, help="Steps between evaluations.", within=at_least(1))
    eval_at_start: bool = option(default=False, help="Also evaluate before step 1 (ours).")


@section
class LoggingConfig:
    """What is printed, recorded and profiled."""

    log_interval: int = option(
        default=100, help="Steps between lines on the terminal.", within=at_least(1)
    )
    log_params_norm: bool = option(default=False, help="Log the L2 norm of the parameters.")
    log_num_zeros_in_grad: bool = option(default=False, help="Log how many gradients are 0.")
    log_throughput: bool = option(default=False, help="Log TFLOP/s of a device.")
    log_progress: bool = option(default=False, help="Write progress.txt beside the checkpoints.")
    timing_log_level: int = option(
        default=0, help="Detail of timers, 0 (least) to 2.", within=between(0, 2)
    )
    timing_log_option: Literal["max", "minmax", "all"] = option(
        default="minmax", help="Over which ranks timers are shown."
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
    log_timers_to_tensorboard: bool = option(default=False, help="Timers go to TensorBoard too.")
    log_validation_ppl_to_tensorboard: bool = option(
        default=False, help="Perplexities go to TensorBoard too."
    )
    log_memory_to_tensorboard: bool = option(
        default=False, help="Memory in bytes goes to TensorBoard too."
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
        default=False, help="torch.profiler instead of markers for an outside profiler."
    )
    peak_tflops: float | None = option(
        default=None,
        help="Peak TFLOP/s of a device, for model FLOPs utilization (ours; none = not shown).",
        within=above(0),
    )


@section
class RunConfig:
    """This start of the program; not part of what `--config` repeats."""

    run_dir: str | None = option(
        default=None,
        help="Run folder (ours; none = runs/ and the configuration's name).",
        saved=False,
    )
    device: Literal["cpu", "cuda"] | None = option(
        default=None, help="Device (ours; none = cuda where there is one).", saved=False
    )
    debug: bool = option(default=False, help="Show tracebacks of errors (ours).", saved=False)
    dry_run: bool = option(
        default=False,
        help="Check the configuration for this number of ranks, print it and stop (ours).",
        saved=False,
    )
    check_paths: bool = option(
        default=True,
        help="A dry run also looks for the data, tokenizer, masks and checkpoint that are named "
        "(ours; false where only the compute nodes have them).",
        saved=False,
    )
