"""Small DC-Transformers and sentence pairs for tests, and a model of slow loops to compare with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron.data.dictionary import EOS, PAD
from megatron.model.dc_transformer import DCTransformer
from megatron.tasks.translation_config import DCTransformerConfig

SOURCE, TARGET = 24, 16
"""Entries of the small dictionaries."""
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "weight_dropout": 0.0}


def small_shape(**changes: Any) -> DCTransformerConfig:
    shape = {"encoder_layers": 2, "decoder_layers": 2, "embed_dim": 16, "attention_heads": 2}
    return DCTransformerConfig(**{**shape, **NO_DROPOUT, **changes})


def small_translator(
    *, seed: int = 3, dtype: torch.dtype = torch.float32, recompute: Any = None, **changes: Any
) -> DCTransformer:
    return DCTransformer(
        small_shape(**changes),
        source_size=SOURCE,
        target_size=TARGET,
        seed=seed,
        dtype=dtype,
        device="cpu",
        recompute=recompute,
    )


def random_pairs(
    lengths: list[tuple[int, int]], *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return source, inputs and targets of pairs with these numbers of tokens, EOS included."""
    generator = torch.Generator().manual_seed(seed)
    longest = [max(side) for side in zip(*lengths, strict=True)]
    source, inputs, targets = (
        torch.full((len(lengths), n), PAD) for n in (longest[0], longest[1], longest[1])
    )
    for row, (s, t) in enumerate(lengths):
        source[row, :s] = torch.randint(EOS + 1, SOURCE, (s,), generator=generator)
        targets[row, :t] = torch.randint(EOS + 1, TARGET, (t,), generator=generator)
        source[row, s - 1] = targets[row, t - 1] = EOS
        inputs[row, 0] = EOS
        inputs[row, 1:t] = targets[row, : t - 1]
    return source, inputs, targets


# ---- the model, position by position -------------------------------------------------------------


def slow_convolution(x: torch.Tensor, weight: torch.Tensor, *, heads: int, padding: int):
    """Convolve one sentence [t, c] by the definition: a loop over positions, heads and taps."""
    length, size = x.shape
    taps = weight.shape[0] // heads
    rows = []
    for t in range(length):
        kernels = (x[t] @ weight.t()).view(heads, taps)
        kernels = torch.stack([k.exp() / k.exp().sum() for k in kernels])
        totals = []
        for head, channels in enumerate(x.split(size // heads, dim=1)):
            total = torch.zeros_like(channels[t])
            for j in range(taps):
                if 0 <= t + j - padding < length:
                    total = total + kernels[head, j] * channels[t + j - padding]
            totals.append(total)
        rows.append(torch.cat(totals))
    return torch.stack(rows)


def slow_logits(
    values: Mapping[str, torch.Tensor],
    shape: DCTransformerConfig,
    source: list[int],
    inputs: list[int],
) -> torch.Tensor:
    """Return logits [t, entries] of one pair without padding, from parameters by logical name."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ values[f"{name}.weight"].t() + values[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(1, keepdim=True)
        variance = centred.pow(2).mean(1, keepdim=True)
        scaled = centred / (variance + shape.norm_epsilon).sqrt()
        return scaled * values[f"{name}.weight"] + values[f"{name}.bias"]

    def embed(tokens: list[int], side: str) -> torch.Tensor:
        table, half = values[f"{side}.embed_tokens.weight"], shape.embed_dim // 2
        rows = []
        for place, token in enumerate(tokens):
            angles = [place * math.exp(-math.log(10000) * i / (half - 1)) for i in range(half)]
            wave = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            rows.append(table[token] * shape.embed_dim**0.5 + table.new_tensor(wave))
        return torch.stack(rows)

    def mixed(x: torch.Tensor, name: str, padding: int) -> torch.Tensor:
        weight = values[f"{name}.conv.weight_linear.weight"]
        inner = linear(x, f"{name}.linear1")
        inner = slow_convolution(inner, weight, heads=shape.attention_heads, padding=padding)
        return norm(x + linear(inner, f"{name}.linear2"), f"{name}.conv_layer_norm")

    def fed_forward(x: torch.Tensor, name: str) -> torch.Tensor:
        inner = linear(x, f"{name}.fc1").clamp(min=0)
        return norm(x + linear(inner, f"{name}.fc2"), f"{name}.final_layer_norm")

    memory = embed(source, "encoder")
    for number, kernel in enumerate(shape.encoder_kernels):
        name = f"encoder.layers.{number}"
        memory = fed_forward(mixed(memory, name, kernel // 2), name)
    x = embed(inputs, "decoder")
    for number, kernel in enumerate(shape.decoder_kernels):
        name = f"decoder.layers.{number}"
        x = mixed(x, name, kernel - 1)
        query, key, value = (
            linear(rows, f"{name}.encoder_attn.{part}")
            for part, rows in (("q_proj", x), ("k_proj", memory), ("v_proj", memory))
        )
        width = shape.embed_dim // shape.attention_heads
        contexts = []
        for head in range(shape.attention_heads):
            at = slice(head * width, (head + 1) * width)
            weights = (query[:, at] @ key[:, at].t() / width**0.5).softmax(1)
            contexts.append(weights @ value[:, at])
        branch = linear(torch.cat(contexts, 1), f"{name}.encoder_attn.out_proj")
        x = fed_forward(norm(x + branch, f"{name}.encoder_attn_layer_norm"), name)
    return x @ values["decoder.output_projection.weight"].t()


def slow_sums(logits: torch.Tensor, targets: list[int], smoothing: float) -> torch.Tensor:
    """Return the smoothed loss and the negative log-likelihood of one sentence, summed."""
    logs = logits.log_softmax(1)
    likelihoods = torch.stack([-logs[t, token] for t, token in enumerate(targets)])
    spread = -logs.mean(1)
    return torch.stack(
        [((1 - smoothing) * likelihoods + smoothing * spread).sum(), likelihoods.sum()]
    )
