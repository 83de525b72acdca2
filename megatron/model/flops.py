"""Counting arithmetic and parameters of a model. Imports no torch: the planner uses it too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.config import ModelConfig

FORMULA = (
    "Megatron core_v0.9, forward and backward, attention counted in full (not its causal half), "
    "no recomputation: 12*L*h^2*[(1 + groups/heads + s/h)*(d*heads/h) + (ffn/h)*(1.5 if swiglu) "
    "+ V/(2*L*h)] per token"
)
"""What `flops_per_token` counts: L layers, h hidden, s sequence, d head size, V padded
vocabulary. Print it beside every number that comes from it."""


def flops_per_token(config: ModelConfig, vocab_size: int) -> float:
    """Floating-point operations of one token's forward and backward pass by `FORMULA`."""
    hidden, layers = config.hidden_size, config.num_layers
    groups_per_head = config.query_groups / config.num_attention_heads
    attention = 1 + groups_per_head + config.seq_length / hidden
    attention *= config.head_dim * config.num_attention_heads / hidden
    feed_forward = config.ffn_size / hidden * (1.5 if config.swiglu else 1.0)
    output = config.padded_vocab_size(vocab_size) / (2 * layers * hidden)
    return 12.0 * layers * hidden**2 * (attention + feed_forward + output)


def parameter_count(config: ModelConfig, vocab_size: int, *, include_padding: bool = False) -> int:
    """Number of logical parameters; a tied table counts once. `include_padding` adds the rows of
    vocabulary padding that exist in memory."""
    hidden = config.hidden_size
    rows = config.padded_vocab_size(vocab_size) if include_padding else vocab_size
    norm = hidden * (2 if config.normalization == "LayerNorm" else 1)
    heads_size = config.num_attention_heads * config.head_dim
    projections = [
        (hidden, heads_size + 2 * config.query_groups * config.head_dim),
        (heads_size, hidden),
        (hidden, config.ffn_size * (2 if config.swiglu else 1)),
        (config.ffn_size, hidden),
    ]
    layer = 2 * norm + sum(
        inputs * outputs + (outputs if config.bias else 0) for inputs, outputs in projections
    )
    total = rows * hidden * (1 if config.tied else 2) + config.num_layers * layer + norm
    if config.position_embedding_type == "learned_absolute":
        total += config.positions * hidden
    return total
