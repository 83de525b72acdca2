"""Conversion between Hugging Face's `config.json` of GPT-2 and Llama and the model section.

Models that a format cannot represent exactly are refused by field, as they would load there and
compute something else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.config.fields import show
from megatron.config.sections import ROPE_SCALING
from megatron.errors import ConfigError

GPT2, LLAMA = "gpt2", "llama"
_MOST = 1 << 20
"""The largest accepted size in config.json; a product of three is still a tensor length."""
_TITLES = {GPT2: "GPT-2", LLAMA: "Llama"}
_GELU = {"tanh": "gelu_new", "erf": "gelu"}
_GELU_BACK = {
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_fast": "tanh",
    "gelu": "erf",
}


def choose_format(config: ModelConfig) -> str:
    """Return `GPT2` if that format can hold the model, else `LLAMA`.

    Raises:
        ConfigError: neither format can; the error names each conflicting field.
    """
    problems = {GPT2: _not_gpt2(config), LLAMA: _not_llama(config)}
    for name, found in problems.items():
        if not found:
            return name
    told = "; ".join(f"{_TITLES[name]}'s needs {', '.join(p)}" for name, p in problems.items())
    raise ConfigError(f"no format of Hugging Face's holds this model exactly: {told}")


def _not_gpt2(config: ModelConfig) -> list[str]:
    return _unlike(
        config,
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        swiglu=False,
        disable_bias_linear=False,
        qk_layernorm=False,
        query_groups=config.num_attention_heads,
        head_dim=config.hidden_size / config.num_attention_heads,
    )


def _not_llama(config: ModelConfig) -> list[str]:
    return _unlike(
        config,
        position_embedding_type="rope",
        rotary_percent=1.0,
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        qk_layernorm=False,
    )


_FIELDS = {"query_groups": "num_query_groups", "head_dim": "kv_channels"}


def _unlike(config: ModelConfig, **wanted: Any) -> list[str]:
    return [
        f"{_FIELDS.get(name, name)}: {value:g} (is {getattr(config, name)})"
        if isinstance(value, float)
        else f"{_FIELDS.get(name, name)}: {value} (is {getattr(config, name)})"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]


def to_hf_config(
    config: ModelConfig,
    format: str,
    *,
    vocab_size: int,
    bos: int | None,
    eod: int | None,
    dtype: str,
) -> dict[str, Any]:
    """Return the `config.json` of a model in the format chosen by `choose_format`."""
    common = {
        "model_type": format,
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_method_std,
        "bos_token_id": bos,
        "eos_token_id": eod,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if format == LLAMA:
        return common | {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": config.hidden_size,
            "intermediate_size": config.ffn_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.query_groups,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.positions,
            "rms_norm_eps": config.norm_epsilon,
            "rope_theta": float(config.rotary_base),
            "rope_scaling": _rope_scaling(config),
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": config.attention_dropout,
        }
    return common | {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_positions": config.positions,
        "n_ctx": config.positions,
        "n_inner": config.ffn_size,
        "activation_function": _GELU[config.gelu],
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """Return `rope_scaling`, which every release of transformers reads along with `rope_theta`."""
    if not config.use_rope_scaling:
        return None
    return {"rope_type": "llama3", "factor": config.rope_scaling_factor, **ROPE_SCALING}


def from_hf_config(values: Mapping[str, Any], *, seq_length: int | None) -> ModelConfig:
    """Return the model section of a `config.json`; `seq_length` None means all positions.

    Raises `ConfigError` for a key that this model cannot represent.
    """
    kind = values.get("model_type")
    if kind not in tuple(_TITLES):
        known = ", ".join(_TITLES)
        raise ConfigError(f"config.json: model_type: {show(kind)}; only {known} can be imported")
    made = _from_llama(values) if kind == LLAMA else _from_gpt2(values)
    positions = made["max_position_embeddings"]
    if seq_length is not None and not 1 <= seq_length <= positions:
        raise ConfigError(f"--seq-length: {seq_length}; the model has positions 1 to {positions}")
    made["seq_length"] = seq_length or positions
    made["init_method_std"] = _number(values, "initializer_range", 0.02)
    if made["hidden_size"] % made["num_attention_heads"] and not made["kv_channels"]:
        raise ConfigError(
            f"config.json: {made['num_attention_heads']} heads do not divide a width of "
            f"{made['hidden_size']}"
        )
    return ModelConfig(**made)


def _from_gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    _require(values, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    _require(values, add_cross_attention=False)
    activation = values.get("activation_function", "gelu_new")
    if activation not in tuple(_GELU_BACK):
        known = ", ".join(_GELU_BACK)
        raise ConfigError(
            f"config.json: activation_function: {show(activation)}; known are {known}"
        )
    width, heads = _whole(values, "n_embd", 768), _whole(values, "n_head", 12)
    return {
        "num_layers": _whole(values, "n_layer", 12),
        "hidden_size": width,
        "num_attention_heads": heads,
        "kv_channels": width // heads if width % heads == 0 else None,
        "max_position_embeddings": _whole(values, "n_positions", 1024),
        "ffn_hidden_size": _whole(values, "n_inner", 4 * width),
        "gelu": _GELU_BACK[activation],
        "norm_epsilon": _number(values, "layer_norm_epsilon", 1e-5),
        "untie_embeddings_and_output_weights": not values.get("tie_word_embeddings", True),
        "attention_dropout": _number(values, "attn_pdrop", 0.1),
        "hidden_dropout": _number(values, "resid_pdrop", 0.1),
    }


def _from_llama(values: Mapping[str, Any]) -> dict[str, Any]:
    _require(values, hidden_act="silu", attention_bias=False, mlp_bias=False)
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: rope_parameters: {show(rope)}; must be an object")
    scaling = _scaling_of(rope, positions=values.get("max_position_embeddings"))
    base = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    whole = type(base) is int or isinstance(base, float) and base.is_integer()
    if not whole or not 2 <= base < 2**63:
        raise ConfigError(
            f"config.json: rope_theta: {show(base)}; must be a whole number of at least 2 here"
        )
    width, heads = _whole(values, "hidden_size", 4096), _whole(values, "num_attention_heads", 32)
    groups = _whole(values, "num_key_value_heads", heads)
    return {
        "num_layers": _whole(values, "num_hidden_layers", 32),
        "hidden_size": width,
        "num_attention_heads": heads,
        "kv_channels": _whole(values, "head_dim", width // heads),
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "position_embedding_type": "rope",
        "rotary_base": int(base),
        **scaling,
        "normalization": "RMSNorm",
        "norm_epsilon": _number(values, "rms_norm_eps", 1e-6),
        "swiglu": True,
        "disable_bias_linear": True,
        "ffn_hidden_size": _whole(values, "intermediate_size", 11008),
        "max_position_embeddings": _whole(values, "max_position_embeddings", 2048),
        "untie_embeddings_and_output_weights": not values.get("tie_word_embeddings", False),
        "attention_dropout": _number(values, "attention_dropout", 0.0),
        "hidden_dropout": 0.0,
    }


def _scaling_of(rope: Mapping[str, Any], *, positions: Any) -> dict[str, Any]:
    """Return model fields for `rope`'s frequencies; `positions` is the default original length."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind != "llama3":
        raise ConfigError(
            f"config.json: rope_type: {show(kind)}; only default and llama3 can be imported"
        )
    _require({"original_max_position_embeddings": positions, **rope}, **ROPE_SCALING)
    factor = rope.get("factor")
    if (
        not isinstance(factor, int | float)
        or isinstance(factor, bool)
        or not 1 <= factor <= sys.float_info.max
    ):
        raise ConfigError(f"config.json: factor: {show(factor)}; must be a number of at least 1")
    return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}


def _require(values: Mapping[str, Any], **wanted: Any) -> None:
    for key, value in wanted.items():
        if values.get(key, value) != value:
            raise ConfigError(
                f"config.json: {key}: {values[key]!r:.60}; our model computes with {value!r} only"
            )


def _whole(values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= _MOST:
        raise ConfigError(
            f"config.json: {key}: {show(value)}; must be a whole number from 1 to {_MOST}"
        )
    return value


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key, default)
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"config.json: {key}: {show(value)}; must be a number of at least 0")
    return float(value)
