"""The section that shapes the network. Names and defaults are Megatron-LM's unless the help says
"ours"."""

from __future__ import annotations

from typing import Literal

from megatron.config.options import (
    Interval,
    above,
    at_least,
    below_one,
    between,
    option,
    section,
)

LARGEST_DEPTH = 10_000
"""Layers: far more than any network has, and few enough to plan for each."""

ROPE_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants of Llama 3.1's rotary scaling, under the names that Hugging Face gives them. In
Megatron-LM they are fixed as well; only the factor is an option."""


@section
class ModelConfig:
    """Shape of the network."""

    num_layers: int = option(help="Number of transformer layers.", within=between(1, LARGEST_DEPTH))
    hidden_size: int = option(help="Width of the network.", within=at_least(1))
    num_attention_heads: int = option(help="Attention heads of a layer.", within=at_least(1))
    seq_length: int = option(help="Tokens in a sample.", within=at_least(1))
    max_position_embeddings: int | None = option(
        default=None,
        help="Longest sequence, in tokens, that has positions (none = seq_length).",
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
        default=False, help="Let num_query_groups heads of keys and values serve all queries."
    )
    num_query_groups: int = option(
        default=1,
        help="Key-value heads; read with group_query_attention only.",
        within=at_least(1),
    )
    position_embedding_type: Literal["learned_absolute", "rope"] = option(
        default="learned_absolute", help="How positions enter the model."
    )
    rotary_base: int = option(
        default=10000, help="Base of the rotary wavelengths.", within=at_least(2)
    )
    rotary_percent: float = option(
        default=1.0,
        help="Share of a head's channels that are rotated, (0, 1].",
        within=Interval(low=0, low_open=True, high=1),
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
        help="The vocabulary is padded to a multiple of this (1 = not padded).",
        within=at_least(1),
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = option(
        default="LayerNorm", help="Kind of normalization."
    )
    norm_epsilon: float = option(
        default=1e-5, help="Added to the variance in a normalization.", within=above(0)
    )
    qk_layernorm: bool = option(
        default=False,
        help="Normalize the query and the key of each head, before their rotation.",
    )
    swiglu: bool = option(default=False, help="Gated SiLU instead of GELU in the MLP.")
    gelu: Literal["tanh", "erf"] = option(
        default="tanh", help="Formula of GELU (ours): tanh approximation or exact erf."
    )
    untie_embeddings_and_output_weights: bool = option(
        default=False, help="Give the output layer a weight of its own."
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
        """Width of the MLP; 4 x hidden_size also with swiglu, as in Megatron."""
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
        """Longest sequence that has positions, in tokens."""
        return self.max_position_embeddings or self.seq_length

    @property
    def tied(self) -> bool:
        """Whether the output layer uses the word embedding's weight."""
        return not self.untie_embeddings_and_output_weights

    @property
    def bias(self) -> bool:
        """Whether linear layers have biases."""
        return not self.disable_bias_linear

    def padded_vocab_size(self, vocab: int) -> int:
        """Rows of the embedding for a vocabulary of `vocab` tokens."""
        multiple = self.make_vocab_size_divisible_by
        return -(-vocab // multiple) * multiple
