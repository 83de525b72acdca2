"""Conversion between weights of Hugging Face's GPT-2 and Llama and this model's logical names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megatron.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.config import ModelConfig


_LLAMA_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LLAMA_INNER = {
    "input_norm": ("input_layernorm",),
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "post_attention_norm": ("post_attention_layernorm",),
    "mlp.dense_h_to_4h": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.dense_4h_to_h": ("mlp.down_proj",),
}
# Frequency buffers saved by old releases of transformers.
_LLAMA_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def llama_names(name: str) -> tuple[str, ...]:
    """Return the LlamaForCausalLM names of the parts of a logical tensor.

    Raises `CheckpointError` if Llama has no such tensor.
    """
    if name in _LLAMA_OUTER:
        return (_LLAMA_OUTER[name],)
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _LLAMA_INNER:
        raise CheckpointError(f"{name}: Llama has no such tensor; it cannot hold this model")
    return tuple(f"model.layers.{match[1]}.{part}.weight" for part in _LLAMA_INNER[match[2]])


def llama_parts(name: str, tensor: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, ...]:
    """Split a logical tensor into the contiguous parts named by `llama_names`."""
    if name.endswith(".query_key_value.weight"):
        grouped = _by_group(tensor, config)
        parts = grouped.split([grouped.shape[1] - 2, 1, 1], dim=1)
        return tuple(part.reshape(-1, tensor.shape[1]) for part in parts)
    if name.endswith(".dense_h_to_4h.weight"):
        return tuple(part.contiguous() for part in tensor.chunk(2))
    return (tensor.contiguous(),)


def from_llama(state: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Convert the state of a LlamaForCausalLM to tensors by logical name.

    Raises `CheckpointError` for a missing or an unknown tensor, and for one that `config` gives
    another shape so that it cannot be joined with others.
    """
    left = {name for name in state if not _LLAMA_BUFFER.fullmatch(name)}
    if config.tied:
        left.discard(_LLAMA_OUTER["output_layer.weight"])
    names = [name for name in _LLAMA_OUTER if name != "output_layer.weight" or not config.tied]
    for number in range(config.num_layers):
        names += [f"layers.{number}.{inner}.weight" for inner in _LLAMA_INNER]
    result = {}
    for name in names:
        parts = []
        for theirs in llama_names(name):
            if theirs not in state:
                inner = theirs.removeprefix("model.")
                near = next((known for known in state if known.endswith(inner)), None)
                there = f"the file has {near}" if near else f"it has {config.num_layers} layers"
                raise CheckpointError(f"{theirs}: missing; {there}")
            parts.append(state[theirs])
            left.discard(theirs)
        if len(parts) > 1:
            for theirs, part, rows in zip(
                llama_names(name), parts, _part_rows(name, config), strict=True
            ):
                _check_shape(theirs, part, (rows, config.hidden_size))
        result[name] = _joined(name, parts, config)
    if left:
        raise CheckpointError(f"{min(left)}: not a tensor of a Llama as config.json has it")
    return result


def _part_rows(name: str, config: ModelConfig) -> tuple[int, ...]:
    """Return the rows of each part of a logical tensor that has several."""
    if name.endswith(".query_key_value.weight"):
        keys = config.query_groups * config.head_dim
        return config.num_attention_heads * config.head_dim, keys, keys
    return config.ffn_size, config.ffn_size


def _check_shape(theirs: str, tensor: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise CheckpointError(
            f"{theirs}: {tuple(tensor.shape)}, config.json makes it {wanted}; the two are not of "
            "one model"
        )


def _joined(name: str, parts: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    if name.endswith(".query_key_value.weight"):
        groups, size, width = config.query_groups, config.head_dim, parts[0].shape[-1]
        stacked = [part.reshape(groups, -1, size, width) for part in parts]
        return torch.cat(stacked, dim=1).reshape(-1, width)
    return torch.cat(parts).contiguous() if len(parts) > 1 else parts[0].contiguous()


def _by_group(rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Reshape [rows, h] to [groups, heads of a group + 2, head size, h]."""
    return rows.reshape(config.query_groups, -1, config.head_dim, rows.shape[1])


_GPT2_OUTER = {
    "wte.weight": "embedding.word_embeddings.weight",
    "wpe.weight": "embedding.position_embeddings.weight",
    "ln_f.weight": "final_norm.weight",
    "ln_f.bias": "final_norm.bias",
}
_GPT2_INNER = {
    "ln_1": "input_norm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense",
    "ln_2": "post_attention_norm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
_INNER_BACK = {ours: theirs for theirs, ours in _GPT2_INNER.items()}
_OUTER_BACK = {ours: theirs for theirs, ours in _GPT2_OUTER.items()}
_HEAD = "lm_head.weight"
# Causal-mask buffers saved by old releases of transformers.
_GPT2_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def from_gpt2(
    state: Mapping[str, torch.Tensor], *, num_heads: int, hidden_size: int
) -> dict[str, torch.Tensor]:
    """Convert the state of a GPT2LMHeadModel or GPT2Model to tensors by logical name.

    The output layer is omitted if it equals the token table (tied). Raises `CheckpointError` for a
    tensor that GPT-2 does not have, and for one that cannot be cut into `num_heads` heads.
    """
    result: dict[str, torch.Tensor] = {}
    for full_name, tensor in state.items():
        name = full_name.removeprefix("transformer.")
        if _GPT2_BUFFER.fullmatch(name) or full_name == _HEAD:
            continue
        ours = _GPT2_OUTER.get(name) or _inner_name(
            name, r"h\.(\d+)\.(.+)\.(\w+)", "layers", _GPT2_INNER
        )
        if ours is None:
            raise CheckpointError(f"{full_name}: not a GPT-2 tensor; only GPT-2 can be converted")
        if ours.startswith("layers.") and tensor.ndim == 2:
            tensor = tensor.t()
        if ".query_key_value." in ours:
            if tensor.ndim == 0 or tensor.shape[0] % (3 * num_heads):
                vector = (3 * hidden_size,)
                wanted = vector if name.endswith(".bias") else (hidden_size, *vector)
                _check_shape(full_name, state[full_name], wanted)
            tensor = _interleave(tensor, 3, num_heads)
        result[ours] = tensor.contiguous()
    head, table = state.get(_HEAD), result.get("embedding.word_embeddings.weight")
    if head is not None and (table is None or not torch.equal(head, table)):
        result["output_layer.weight"] = head
    return result


def to_gpt2(values: Mapping[str, torch.Tensor], *, num_heads: int) -> dict[str, torch.Tensor]:
    """Convert weights or gradients by logical name to the state of a GPT2LMHeadModel.

    The model must have learned positions, LayerNorm, biases and one key per head. Raises
    `CheckpointError` for a name that GPT-2 does not have.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in values.items():
        theirs = gpt2_name(name)
        result[theirs] = gpt2_tensor(name, tensor, num_heads=num_heads)
    result.setdefault(_HEAD, result["transformer.wte.weight"])
    return result


def gpt2_name(name: str) -> str:
    """Return the GPT2LMHeadModel name of a logical tensor, or raise `CheckpointError`."""
    if name == "output_layer.weight":
        return _HEAD
    theirs = _OUTER_BACK.get(name) or _inner_name(
        name, r"layers\.(\d+)\.(.+)\.(\w+)", "h", _INNER_BACK
    )
    if theirs is None:
        raise CheckpointError(f"{name}: GPT-2 has no such tensor; it cannot hold this model")
    return f"transformer.{theirs}"


def gpt2_tensor(name: str, tensor: torch.Tensor, *, num_heads: int) -> torch.Tensor:
    """Convert a logical tensor to GPT-2's layout, contiguous, or raise `CheckpointError`."""
    if ".query_key_value." in name:
        if tensor.ndim == 2 and tensor.shape[0] != 3 * tensor.shape[1]:
            raise CheckpointError(
                f"{name}: shape {tuple(tensor.shape)}; GPT-2 has three rows for each column, "
                "no query groups and no other head size"
            )
        tensor = _interleave(tensor, num_heads, 3)
    if name.startswith("layers.") and tensor.ndim == 2:
        tensor = tensor.t()
    return tensor.contiguous()


def _inner_name(name: str, pattern: str, prefix: str, names: Mapping[str, str]) -> str | None:
    match = re.fullmatch(pattern, name)
    if match is None or match[2] not in names or match[3] not in ("weight", "bias"):
        return None
    return f"{prefix}.{match[1]}.{names[match[2]]}.{match[3]}"


def _interleave(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Reorder rows from (outer, inner, head size) to (inner, outer, head size)."""
    size = rows.shape[0] // (outer * inner)
    split = rows.reshape(outer, inner, size, *rows.shape[1:])
    return split.transpose(0, 1).reshape(rows.shape)
