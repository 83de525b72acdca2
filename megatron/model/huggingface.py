"""GPT-2 weights between Hugging Face's names and layout and ours, as pure functions.

GPT-2 keeps projections as [inputs, outputs] and stacks all queries, all keys, all values; ours
are [outputs, inputs] with each head's query, key and value side by side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from megatron.errors import CheckpointError

_OUTER = {
    "wte.weight": "embedding.word_embeddings.weight",
    "wpe.weight": "embedding.position_embeddings.weight",
    "ln_f.weight": "final_norm.weight",
    "ln_f.bias": "final_norm.bias",
}
_INNER = {
    "ln_1": "input_norm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense",
    "ln_2": "post_attention_norm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
_INNER_BACK = {ours: theirs for theirs, ours in _INNER.items()}
_OUTER_BACK = {ours: theirs for theirs, ours in _OUTER.items()}
_HEAD = "lm_head.weight"
# Causal-mask buffers that old releases of the library saved with the weights.
_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def from_gpt2(state: Mapping[str, torch.Tensor], *, num_heads: int) -> dict[str, torch.Tensor]:
    """State of a GPT2LMHeadModel (or GPT2Model) as tensors by logical name.

    The output layer is left out where it equals the token table (tied). Raises `CheckpointError`
    for a tensor that GPT-2 does not have.
    """
    result: dict[str, torch.Tensor] = {}
    for full_name, tensor in state.items():
        name = full_name.removeprefix("transformer.")
        if _BUFFER.fullmatch(name) or full_name == _HEAD:
            continue
        ours = _OUTER.get(name) or _inner_name(name, r"h\.(\d+)\.(.+)\.(\w+)", "layers", _INNER)
        if ours is None:
            raise CheckpointError(f"{full_name}: not a GPT-2 tensor; only GPT-2 can be converted")
        if ours.startswith("layers.") and tensor.ndim == 2:
            tensor = tensor.t()
        if ".query_key_value." in ours:
            tensor = _interleave(tensor, 3, num_heads)
        result[ours] = tensor.contiguous()
    head, table = state.get(_HEAD), result.get("embedding.word_embeddings.weight")
    if head is not None and (table is None or not torch.equal(head, table)):
        result["output_layer.weight"] = head
    return result


def to_gpt2(values: Mapping[str, torch.Tensor], *, num_heads: int) -> dict[str, torch.Tensor]:
    """Tensors by logical name as the state of a GPT2LMHeadModel.

    Takes gradients as well as weights. Raises `CheckpointError` for a name that GPT-2 has no
    place for; the model must have learned positions, LayerNorm, biases, one key per head.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in values.items():
        theirs = gpt2_name(name)
        result[theirs] = gpt2_tensor(name, tensor, num_heads=num_heads)
    result.setdefault(_HEAD, result["transformer.wte.weight"])
    return result


def gpt2_name(name: str) -> str:
    """Name in a GPT2LMHeadModel of the tensor with a logical name. Raises `CheckpointError`."""
    if name == "output_layer.weight":
        return _HEAD
    theirs = _OUTER_BACK.get(name) or _inner_name(
        name, r"layers\.(\d+)\.(.+)\.(\w+)", "h", _INNER_BACK
    )
    if theirs is None:
        raise CheckpointError(f"{name}: GPT-2 has no such tensor; it cannot hold this model")
    return f"transformer.{theirs}"


def gpt2_tensor(name: str, tensor: torch.Tensor, *, num_heads: int) -> torch.Tensor:
    """The tensor with a logical name in GPT-2's layout, contiguous. Raises `CheckpointError`."""
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
