"""Rules between the model's sizes, the batch and the grid; see `megatron.config.rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config.config import Config


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
    """Raise `ConfigError` unless every tensor-parallel rank holds a token of a vocabulary of `size`
    tokens."""
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
