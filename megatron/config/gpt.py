"""The configuration of a GPT run: its sections `model` and `data`, and the rules about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from megatron.config.fields import FieldSpec, split_shares
from megatron.config.rules import (
    Alternatives,
    Complaint,
    Notice,
    RefusedPair,
    nearest_multiples,
    refused_pair,
)
from megatron.config.sections import (
    Config,
    DataConfig,
    ModelConfig,
    RecomputeConfig,
    describe_split,
)
from megatron.errors import ConfigError
from megatron.low_memory.checkpoint_interval import checkpoint_interval, describe_interval

LARGEST_CUDNN_HEAD, LARGEST_FLASH_HEAD = 128, 256
"""Head sizes up to which cuDNN's and flash attention train on every GPU that has them."""

GPT_PAIRS: tuple[RefusedPair, ...] = (
    refused_pair(
        "use_rope_scaling without position_embedding_type rope",
        lambda c: c.model.use_rope_scaling and c.model.position_embedding_type != "rope",
        "only rotary positions have frequencies to scale",
        "add --position-embedding-type rope or drop --use-rope-scaling",
    ),
    refused_pair(
        "dataloader_type cyclic",
        lambda c: c.data.dataloader_type == "cyclic",
        "the documents and the samples of each epoch are shuffled already",
        "leave --dataloader-type out",
    ),
    refused_pair(
        "dataloader_type external",
        lambda c: c.data.dataloader_type == "external",
        "batches come from the data that the configuration names",
        "write a .bin/.idx pair with tools/preprocess_data.py, and give --data-path",
    ),
    refused_pair(
        "data_path with train_, valid_ or test_data_path",
        lambda c: (
            c.data.data_path
            and (c.data.train_data_path or c.data.valid_data_path or c.data.test_data_path)
        ),
        "the data is either split or given by split",
        "give one kind",
    ),
    refused_pair(
        "multiple_validation_sets with weights of valid_data_path",
        lambda c: (
            c.data.multiple_validation_sets
            and any(item.replace(".", "", 1).isdigit() for item in c.data.valid_data_path or ())
        ),
        "each set is evaluated on its own",
        "give --valid-data-path prefixes alone",
    ),
    refused_pair(
        "full_validation with mock_data",
        lambda c: c.evaluation.full_validation and c.data.mock_data,
        "generated data have no end",
        "drop --full-validation",
    ),
)

GPT_ALTERNATIVES: tuple[Alternatives, ...] = (
    (
        ("data_path",),
        ("train_data_path", "valid_data_path", "test_data_path"),
        ("mock_data",),
    ),
)


# ---- rules --------------------------------------------------------------------------------------


def _heads_divide_width(c: GPTConfig) -> Complaint:
    m = c.model
    if m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0:
        return None
    legal = nearest_multiples(m.hidden_size, m.num_attention_heads)
    return (
        f"hidden_size {m.hidden_size} is not a multiple of num_attention_heads "
        f"{m.num_attention_heads}; nearest hidden_size: {legal} (or give --kv-channels)"
    )


def _groups_divide_heads(c: GPTConfig) -> Complaint:
    m = c.model
    if m.num_attention_heads % m.query_groups == 0:
        return None
    few = range(1, min(m.num_attention_heads, 128) + 1)
    legal = ", ".join(str(groups) for groups in few if m.num_attention_heads % groups == 0)
    return (
        f"num_attention_heads {m.num_attention_heads} is not a multiple of num_query_groups "
        f"{m.num_query_groups}; allowed: {legal}"
    )


def _sequence_has_positions(c: GPTConfig) -> Complaint:
    m = c.model
    if m.seq_length <= m.positions:
        return None
    return (
        f"seq_length {m.seq_length} is more than max_position_embeddings "
        f"{m.max_position_embeddings}; raise the latter or leave it out"
    )


def _rotated_channels_pair_up(c: GPTConfig) -> Complaint:
    m = c.model
    rotated = int(m.head_dim * m.rotary_percent)
    if m.position_embedding_type != "rope" or (rotated > 0 and rotated % 2 == 0):
        return None
    return (
        f"rotary_percent {m.rotary_percent} of {m.head_dim} channels a head is {rotated}; rotary "
        "positions need an even number of at least 2; change kv_channels or rotary_percent"
    )


def tensor_parallel_divides(c: GPTConfig) -> Complaint:
    """Complain unless tensor-parallel ranks get equal shares of heads, query groups and the MLP.

    With sequence parallelism the sequence must divide evenly, too.
    """
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


def vocabulary_covers_ranks(c: GPTConfig) -> Complaint:
    """Complain if the flags give a vocabulary with fewer tokens than tensor-parallel ranks."""
    # A tokenizer may have more tokens than the flag says.
    if c.data.vocab_size is None or c.data.tokenizer_type is not None:
        return None
    return _too_few_tokens(c, c.data.vocab_size)


def check_vocabulary(c: GPTConfig, size: int) -> None:
    """Raise `ConfigError` if a tensor-parallel rank holds no token of `size` tokens."""
    if complaint := _too_few_tokens(c, size):
        raise ConfigError(complaint)


def _too_few_tokens(c: GPTConfig, size: int) -> Complaint:
    ranks = c.parallel.tensor_model_parallel_size
    if size >= ranks:
        return None
    return (
        f"vocab_size {size} is less than tensor_model_parallel_size {ranks}: every tensor-parallel "
        f"rank must hold a token; give --tensor-model-parallel-size {size} or less"
    )


def stages_have_layers(c: GPTConfig) -> Complaint:
    """Complain if a stage gets no layer, or if the settings of the split contradict each other."""
    try:
        c.parallel.layer_split(c.model.num_layers)
    except ConfigError as error:
        return str(error)
    return None


def _split_is_three_shares(c: GPTConfig) -> Complaint:
    try:
        split_shares(c.data.split)
    except ConfigError as error:
        return str(error)
    return None


def _recomputes_existing_layers(c: GPTConfig) -> Complaint:
    count = c.recompute.recompute_num_layers
    counts_layers = c.recompute.recompute_granularity != "every"
    if count is None or count <= c.model.num_layers or not counts_layers:
        return None
    return (
        f"recompute_num_layers {count} is more than num_layers {c.model.num_layers}; lower the "
        "former"
    )


def interleaving_fills_stages(c: GPTConfig, dp: int) -> Complaint:
    """Complain unless an interleaved pipeline gets groups of as many microbatches as stages."""
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


# ---- notices ------------------------------------------------------------------------------------


def _data_unread(c: GPTConfig) -> Notice:
    paths = (c.data.data_path, c.data.train_data_path, c.data.valid_data_path)
    if not c.data.mock_data or not any((*paths, c.data.test_data_path)):
        return None
    return "mock_data is on: the data paths are not read"


def _groups_unread(c: GPTConfig) -> Notice:
    if c.model.group_query_attention or c.model.num_query_groups == 1:
        return None
    groups = c.model.num_query_groups
    return f"num_query_groups {groups} is not read without --group-query-attention"


def _scores_kept(c: GPTConfig) -> Notice:
    if not c.groups_keep_scores or c.run.device == "cpu":
        return None
    return (
        f"num_query_groups {c.model.query_groups} in float32: on CUDA no fused kernel of torch "
        f"takes both, and {_scores(c)}"
    )


def _scores(c: GPTConfig) -> str:
    m, t = c.model, c.training
    heads = m.num_attention_heads // c.parallel.tensor_model_parallel_size
    size = 4 * t.micro_batch_size * heads * m.seq_length**2
    return (
        f"a layer then keeps {m.seq_length} x {m.seq_length} scores of each head in fp32, "
        f"{size / 2**20:,.0f} MiB a microbatch"
    )


# Limits of torch's attention kernels on CUDA: ATen/native/transformers/cuda/sdp_utils.cpp,
# `check_cudnn_dropout`, `check_cudnn_tensor_shapes`, `check_head_dim_size_flash` and
# `check_head_dim_size_mem_efficient`; flash attention pads heads in transformers/attention.cpp.


def _attention_without_cudnn(c: GPTConfig) -> Notice:
    size, dropout = c.model.head_dim, c.model.attention_dropout
    takes_heads = _is_16_bit(c) and size % 8 == 0 and size <= LARGEST_CUDNN_HEAD
    if not takes_heads or (16 * dropout).is_integer():
        return None
    return (
        f"attention_dropout {dropout}: on CUDA torch does not run cuDNN attention, its first "
        "choice on Hopper and Blackwell GPUs, with this dropout; --attention-dropout 0 allows it"
    )


def _documents_apart(c: GPTConfig) -> Notice:
    dropout = c.model.attention_dropout
    if not c.data.reset_attention_mask or c.attends_documents_together:
        return None
    if _is_16_bit(c) and dropout:
        return (
            f"reset_attention_mask with attention_dropout {dropout}: on CUDA attention runs once "
            "for each document; --attention-dropout 0 lets one kernel take all documents"
        )
    return (
        f"reset_attention_mask with heads of {c.model.head_dim} in {c.precision.param_dtype}: on "
        "CUDA attention runs once for each document; one kernel takes all documents in 16 bits, "
        f"with heads of a multiple of 8 up to {LARGEST_FLASH_HEAD}"
    )


def _odd_heads(c: GPTConfig) -> Notice:
    size, multiple = c.model.head_dim, 8 if _is_16_bit(c) else 4
    if size % multiple == 0:
        return None
    odd = f"head size {size} is not a multiple of {multiple}: on CUDA"
    if _is_16_bit(c) and size <= LARGEST_FLASH_HEAD:
        padded = -(-size // multiple) * multiple
        return (
            f"{odd} flash attention alone takes it, by copying queries, keys and values to heads "
            f"of {padded}"
        )
    return f"{odd} no fused kernel of torch takes it, and {_scores(c)}"


def _wide_heads(c: GPTConfig) -> Notice:
    m = c.model
    if not _is_16_bit(c) or m.head_dim <= LARGEST_FLASH_HEAD or m.head_dim % 8:
        return None
    wide = f"head size {m.head_dim} is more than {LARGEST_FLASH_HEAD}: on CUDA"
    if m.query_groups < m.num_attention_heads:
        return f"{wide} no fused kernel of torch takes it with query groups, and {_scores(c)}"
    return f"{wide} memory-efficient attention takes it, but neither flash nor cuDNN attention"


def _is_16_bit(c: GPTConfig) -> bool:
    return c.precision.param_dtype != "float32"


# ---- derived values and words for the log --------------------------------------------------------


def describe_recomputation(config: GPTConfig) -> str:
    """Return a description of the recomputation interval of the fullest stage.

    It is "" unless layers are recomputed in groups of one length.
    """
    if config.recompute.recompute_method != "uniform":
        return ""
    layers, interval = config.model.num_layers, config.recompute.recompute_num_layers or 1
    return describe_interval(layers, config.parallel.longest_run(layers), interval)


def _describe_pipeline(c: GPTConfig) -> str:
    """Return a description of the stages' layers and their schedule; "" without a pipeline."""
    parallel = c.parallel
    if parallel.pipeline_model_parallel_size == 1:
        return ""
    split = parallel.layer_split(c.model.num_layers)
    schedule = "interleaved 1F1B" if len(split[0]) > 1 else "1F1B"
    if parallel.pipeline_schedule == "message-driven":
        limit = parallel.pipeline_limit or len(split)
        schedule = f"message-driven over MPI, {limit} microbatches at most"
    return f"layers {describe_split(split)}; {schedule}"


def _resolve_model(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        model,
        max_position_embeddings=model.positions,
        ffn_hidden_size=model.ffn_size,
        kv_channels=model.head_dim,
    )


def _resolve_recompute(config: GPTConfig) -> RecomputeConfig:
    recompute = config.recompute
    if recompute.recompute_granularity != "full":
        return recompute
    method, count = recompute.recompute_method or "uniform", recompute.recompute_num_layers or 1
    if method == "sqrt":
        layers = config.model.num_layers
        held = config.parallel.longest_run(layers)
        method, count = "uniform", checkpoint_interval(layers, held)
    return dataclasses.replace(recompute, recompute_method=method, recompute_num_layers=count)


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Config):
    """Every setting of a GPT run, by section."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    name: str = field(default="gpt", compare=False)

    task: ClassVar[str] = "gpt"
    example: ClassVar[str] = "configs/gpt_tiny.yaml"
    divides = recomputes = compiles = True
    refused_pairs = GPT_PAIRS
    alternatives = GPT_ALTERNATIVES
    rules = (
        _heads_divide_width,
        _groups_divide_heads,
        _sequence_has_positions,
        _rotated_channels_pair_up,
        tensor_parallel_divides,
        vocabulary_covers_ranks,
        stages_have_layers,
        _split_is_three_shares,
        _recomputes_existing_layers,
    )

    @property
    def groups_keep_scores(self) -> bool:
        """True if attention has fewer key-value heads than query heads, in fp32.

        On CUDA this attention keeps its scores.
        """
        # In torch 2.13 flash and cuDNN attention take 16 bits alone, and memory-efficient attention
        # no `enable_gqa` (`check_batch_size_and_num_heads_dense<false>` in
        # ATen/native/transformers/cuda/sdp_utils.cpp).
        grouped = self.model.query_groups < self.model.num_attention_heads
        return grouped and not _is_16_bit(self)

    @property
    def attends_documents_together(self) -> bool:
        """True if torch's kernel on CUDA for documents of different lengths takes the heads.

        `model.causal_attention` asks the same of tensors.
        """
        size = self.model.head_dim
        takes_heads = size % 8 == 0 and size <= LARGEST_FLASH_HEAD
        return _is_16_bit(self) and takes_heads and not self.model.attention_dropout

    def complaint_of_batch(self, dp: int) -> Complaint:
        return interleaving_fills_stages(self, dp)

    def own_notices(self) -> Iterator[str]:
        for notice in (_data_unread, _groups_unread, _scores_kept):
            if line := notice(self):
                yield line

    def cuda_notices(self) -> Iterator[str]:
        for notice in (_attention_without_cudnn, _documents_apart, _odd_heads, _wide_heads):
            if line := notice(self):
                yield line

    def resolved(self) -> GPTConfig:
        return dataclasses.replace(
            self, model=_resolve_model(self.model), recompute=_resolve_recompute(self)
        )

    def data_paths(self) -> list[str]:
        d = self.data
        lists = (d.data_path, d.train_data_path, d.valid_data_path, d.test_data_path)
        return [prefix for paths in lists for prefix in paths or ()]

    def descriptions(self) -> Iterator[str]:
        if told := _describe_pipeline(self):
            yield f"pipeline: {told}"
        if told := describe_recomputation(self):
            yield f"recomputation: {told}"


SECTIONS: Mapping[str, type] = GPTConfig.section_types()
"""The sections of a GPT run, in the order of files and help."""

SPECS: Mapping[str, FieldSpec] = GPTConfig.specs()
"""Every field of a GPT run by name."""
