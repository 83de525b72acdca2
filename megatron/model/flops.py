"""Operation and parameter counts of a model. Imports no torch, for the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron.config import ModelConfig

FORMULA = (
    "Megatron core_v0.9, forward and backward, attention counted in full (not its causal half), "
    "no recomputation: 12*L*h^2*[(1 + groups/heads + s/h)*(d*heads/h) + (ffn/h)*(1.5 if swiglu) "
    "+ V/(2*L*h)] per token"
)
"""The terms of `flops_per_token`, to be printed with every number computed from it.

L layers, h hidden, s sequence, d head size, V padded vocabulary.
"""


TOKENS_OF_A_TRAINING = 3e11
"""Training tokens of GPT-3, assumed by AxoNN's Eq. 2 (misprinted there as 3e10^11)."""
SECONDS_IN_A_DAY = 86400


def flops_per_token(config: ModelConfig, vocab_size: int) -> float:
    """Return floating-point operations per token, forward and backward, by `FORMULA`."""
    return _layer_flops(config) + _output_flops(config, vocab_size)


def recomputing_flops_per_token(config: ModelConfig, vocab_size: int) -> float:
    """Return `flops_per_token` with a second forward of each layer, as in full recomputation.

    That is 4 passes of a layer's operations instead of 3. For GPT's shapes it is AxoNN's Eq. 3
    (Narayanan et al. 2021), 96 l h^2 (1 + s / 6h + V / 16lh), where V is padded.
    """
    return 4 / 3 * _layer_flops(config) + _output_flops(config, vocab_size)


def _layer_flops(config: ModelConfig) -> float:
    """Return operations of all layers per token, forward and backward."""
    hidden, layers = config.hidden_size, config.num_layers
    groups_per_head = config.query_groups / config.num_attention_heads
    attention = 1 + groups_per_head + config.seq_length / hidden
    attention *= config.head_dim * config.num_attention_heads / hidden
    feed_forward = config.ffn_size / hidden * (1.5 if config.swiglu else 1.0)
    return 12.0 * layers * hidden**2 * (attention + feed_forward)


def _output_flops(config: ModelConfig, vocab_size: int) -> float:
    """Return operations of the output layer per token, forward and backward."""
    return 6.0 * config.hidden_size * config.padded_vocab_size(vocab_size)


class LayerProducts(NamedTuple):
    """Operations of a layer's products in one forward pass, per token.

    `attention` are the products of scores and of the context, and `last` is the last product.
    """

    total: float
    attention: float
    last: float


def layer_products(config: ModelConfig) -> LayerProducts:
    """Return the operations of one layer's forward pass per token; attention counts in full."""
    return LayerProducts(
        total=_layer_flops(config) / (3 * config.num_layers),
        attention=4.0 * config.seq_length * config.head_dim * config.num_attention_heads,
        last=2.0 * config.ffn_size * config.hidden_size,
    )


def training_days(*, step_seconds: float, tokens_per_step: float) -> float:
    """Return 3e11 t / (b s), the days for 300 billion tokens at this pace (AxoNN, Eq. 2)."""
    return TOKENS_OF_A_TRAINING * step_seconds / tokens_per_step / SECONDS_IN_A_DAY


def is_of_heads(name: str) -> bool:
    """Return whether a parameter normalizes queries or keys.

    Such a parameter is whole on each tensor-parallel rank, but its gradient covers local heads
    only.
    """
    return name.rpartition(".")[0].endswith(("attention.q_layernorm", "attention.k_layernorm"))


def parameter_count(config: ModelConfig, vocab_size: int, *, include_padding: bool = False) -> int:
    """Return the number of logical parameters; a tied table counts once.

    `include_padding` adds the rows of vocabulary padding that exist in memory.
    """
    hidden = config.hidden_size
    rows = config.padded_vocab_size(vocab_size) if include_padding else vocab_size
    vectors = 2 if config.normalization == "LayerNorm" else 1
    norm = hidden * vectors
    head_norms = 2 * config.head_dim * vectors if config.qk_layernorm else 0
    heads_size = config.num_attention_heads * config.head_dim
    projections = [
        (hidden, heads_size + 2 * config.query_groups * config.head_dim),
        (heads_size, hidden),
        (hidden, config.ffn_size * (2 if config.swiglu else 1)),
        (config.ffn_size, hidden),
    ]
    layer = (
        2 * norm
        + head_norms
        + sum(inputs * outputs + (outputs if config.bias else 0) for inputs, outputs in projections)
    )
    total = rows * hidden * (1 if config.tied else 2) + config.num_layers * layer + norm
    if config.position_embedding_type == "learned_absolute":
        total += config.positions * hidden
    return total
