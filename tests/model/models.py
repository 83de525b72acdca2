"""Small models for tests."""

from __future__ import annotations

from typing import Any

import torch

from megatron.config import ModelConfig, RecomputeConfig
from megatron.model.gpt import GPT

VOCAB = 101

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "erf": {"gelu": "erf"},
    "rope": {"position_embedding_type": "rope"},
    "partial rope": {"position_embedding_type": "rope", "rotary_percent": 0.5},
    "untied": {"untie_embeddings_and_output_weights": True},
    "grouped": {"group_query_attention": True, "num_query_groups": 2},
    "swiglu": {"swiglu": True, "ffn_hidden_size": 64},
    "no bias": {"disable_bias_linear": True},
    "rms": {"normalization": "RMSNorm"},
    "wide heads": {"kv_channels": 24},
    "query and key norms": {"qk_layernorm": True},
    "llama with head norms": {
        "qk_layernorm": True,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "group_query_attention": True,
        "num_query_groups": 2,
    },
    "llama": {
        "position_embedding_type": "rope",
        "swiglu": True,
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "group_query_attention": True,
        "num_query_groups": 1,
        "max_position_embeddings": 40,
    },
}


def small_config(**changes: Any) -> ModelConfig:
    """Three layers of width 48, four heads, no dropout."""
    base: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "seq_length": 16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return ModelConfig(**(base | changes))


def small_model(
    *,
    seed: int = 5,
    dtype: torch.dtype = torch.float32,
    recompute: RecomputeConfig | None = None,
    **changes: Any,
) -> GPT:
    """A model of `small_config`."""
    torch.set_num_threads(1)
    return GPT(
        small_config(**changes),
        vocab_size=VOCAB,
        seed=seed,
        dtype=dtype,
        device="cpu",
        recompute=recompute,
    )


def sharpen(model: GPT) -> GPT:
    """Make weights large enough that attention and activations leave their linear range, and
    norms and biases different from 1 and 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for info in model.parameter_infos():
            rows = info.param[: info.logical_shape[0]]
            rows.add_(torch.randn(rows.shape, generator=generator).to(rows.dtype) * 0.15)
    return model


def random_tokens(batch: int = 2, length: int = 16, *, seed: int = 0) -> torch.Tensor:
    """Token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    """Gradient of each logical parameter: the sum over its leaves, without padding rows."""
    result = {}
    for info in model.parameter_infos():
        grads = [leaf.grad for leaf in info.leaves]
        assert all(grad is not None for grad in grads), info.name
        total = sum(grad for grad in grads if grad is not None)
        assert isinstance(total, torch.Tensor)
        result[info.name] = total[: info.logical_shape[0]]
    return result
