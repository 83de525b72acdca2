"""Parameter shapes and operations of a DC-Transformer. Imports no torch, for the planner."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.tasks.translation_config import DCTransformerConfig

BLOCK = 64
"""Longest run of positions that one band matrix of `dynamic_convolution` covers.

A band matrix has k taps in each of its rows of BLOCK + k - 1 entries: longer rows waste products,
shorter rows copy more overlapping inputs."""
FORMULA = (
    "2 operations for each multiplication with an addition of linear layers, attention and the "
    "taps of convolutions, forward, and twice as many backward, no recomputation; padding of a "
    "pack counts; embeddings, normalizations and activations do not"
)
"""The terms of `training_flops`, to be printed with every number computed from it."""


def logical_shapes(
    config: DCTransformerConfig, *, source_size: int, target_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by logical name, in the order of the model."""
    size, inner = config.embed_dim, config.ffn_size
    shapes: dict[str, tuple[int, ...]] = {"encoder.embed_tokens.weight": (source_size, size)}
    for number, kernel in enumerate(config.encoder_kernels):
        shapes |= _layer(f"encoder.layers.{number}", size, inner, config.attention_heads * kernel)
    shapes["decoder.embed_tokens.weight"] = (target_size, size)
    for number, kernel in enumerate(config.decoder_kernels):
        name = f"decoder.layers.{number}"
        shapes |= _layer(name, size, inner, config.attention_heads * kernel)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{name}.encoder_attn.{part}", size, size)
        shapes |= _norm(f"{name}.encoder_attn_layer_norm", size)
    shapes["decoder.output_projection.weight"] = (target_size, size)
    return shapes


def parameter_count(config: DCTransformerConfig, *, source_size: int, target_size: int) -> int:
    """Return the number of parameters: 38,685,184 with 8,848 and 6,632 entries by default."""
    shapes = logical_shapes(config, source_size=source_size, target_size=target_size)
    return sum(math.prod(shape) for shape in shapes.values())


def forward_flops(
    config: DCTransformerConfig, *, pairs: int, source: int, target: int, target_size: int
) -> int:
    """Return the operations of the forward pass of a pack by `FORMULA`.

    Args:
        config: the shape of the model.
        pairs: sentence pairs of the pack.
        source: padded source tokens of each pair.
        target: padded target tokens of each pair.
        target_size: entries of the target dictionary.
    """
    size, inner, heads = config.embed_dim, config.ffn_size, config.attention_heads

    def layer(kernel: int) -> int:
        """Return the multiplications at a position, without attention."""
        return 2 * size**2 + (heads * kernel + kernel) * size + 2 * size * inner

    in_source = sum(map(layer, config.encoder_kernels))
    # Keys and values of every decoder layer.
    in_source += config.decoder_layers * 2 * size**2
    in_target = sum(map(layer, config.decoder_kernels)) + size * target_size
    # Query, output, scores and context.
    in_target += config.decoder_layers * (2 * size**2 + 2 * source * size)
    return 2 * pairs * (source * in_source + target * in_target)


def training_flops(
    config: DCTransformerConfig, *, pairs: int, source: int, target: int, target_size: int
) -> int:
    """Return the operations of forward and backward of a pack by `FORMULA`."""
    once = forward_flops(config, pairs=pairs, source=source, target=target, target_size=target_size)
    return 3 * once


def _layer(name: str, size: int, inner: int, taps: int) -> dict[str, tuple[int, ...]]:
    return {
        **_linear(f"{name}.linear1", size, size),
        f"{name}.conv.weight_linear.weight": (taps, size),
        **_linear(f"{name}.linear2", size, size),
        **_norm(f"{name}.conv_layer_norm", size),
        **_linear(f"{name}.fc1", inner, size),
        **_linear(f"{name}.fc2", size, inner),
        **_norm(f"{name}.final_layer_norm", size),
    }


def _linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
