"""Llama weights between Hugging Face's names and layout and ours, as pure functions.

Llama keeps queries, keys and values apart, each for all heads, and gate and value of the MLP apart;
ours has one matrix of both: for each query group its query heads, its key and its value, and the
gate above the value. Rotation pairs the same coordinates in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megatron.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.config import ModelConfig

_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_INNER = {
    "input_norm": ("input_layernorm",),
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "post_attention_norm": ("post_attention_layernorm",),
    "mlp.dense_h_to_4h": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.dense_4h_to_h": ("mlp.down_proj",),
}
# Wavelengths that old releases of the library saved with the weights.
_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def llama_names(name: str) -> tuple[str, ...]:
    """Names in a LlamaForCausalLM of the parts of the tensor with a logical name. Raises
    `CheckpointError`."""
    if name in _OUTER:
        return (_OUTER[name],)
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _INNER:
        raise CheckpointError(f"{name}: Llama has no such tensor; it cannot hold this model")
    return tuple(f"model.layers.{match[1]}.{part}.weight" for part in _INNER[match[2]])


def llama_parts(name: str, tensor: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, ...]:
    """The tensor with a logical name as `llama_names` has it; each part is contiguous."""
    if name.endswith(".query_key_value.weight"):
        grouped = _by_group(tensor, config)
        parts = grouped.split([grouped.shape[1] - 2, 1, 1], dim=1)
        return tuple(part.reshape(-1, tensor.shape[1]) for part in parts)
    if name.endswith(".dense_h_to_4h.weight"):
        return tuple(part.contiguous() for part in tensor.chunk(2))
    return (tensor.contiguous(),)


def from_llama(state: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """State of a LlamaForCausalLM as tensors by logical name. Raises `CheckpointError` for a tensor
    that is missing or that Llama does not have."""
    left = {name for name in state if not _BUFFER.fullmatch(name)}
    if config.tied:
        left.discard(_OUTER["output_layer.weight"])
    names = [name for name in _OUTER if name != "output_layer.weight" or not config.tied]
    for number in range(config.num_layers):
        names += [f"layers.{number}.{inner}.weight" for inner in _INNER]
    result = {}
    for name in names:
        parts = []
        for theirs in llama_names(name):
            if theirs not in state:
                raise CheckpointError(
                    f"{theirs}: missing; the model has {config.num_layers} layers"
                )
            parts.append(state[theirs])
            left.discard(theirs)
        result[name] = _joined(name, parts, config)
    if left:
        raise CheckpointError(f"{min(left)}: not a tensor of a Llama as config.json has it")
    return result


def _joined(name: str, parts: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    if name.endswith(".query_key_value.weight"):
        groups, size, width = config.query_groups, config.head_dim, parts[0].shape[-1]
        stacked = [part.reshape(groups, -1, size, width) for part in parts]
        return torch.cat(stacked, dim=1).reshape(-1, width)
    return torch.cat(parts).contiguous() if len(parts) > 1 else parts[0].contiguous()


def _by_group(rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """[rows, h] as [groups, heads of a group + 2, head size, h]."""
    return rows.reshape(config.query_groups, -1, config.head_dim, rows.shape[1])
