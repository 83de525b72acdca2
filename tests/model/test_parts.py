"""Attention, rotary positions, MLP and norms against slow references written from the formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.config.sections import ROPE_SCALING
from megatron.model import gelu
from megatron.model.attention import SelfAttention
from megatron.model.mlp import MLP
from megatron.model.norm import RMSNorm
from megatron.model.rotary import (
    Rotary,
    rotary_frequencies,
    rotary_table,
    rotate,
    scale_frequencies,
)
from tests.model.models import sharpen, small_config, small_model

CPU = torch.device("cpu")


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotary_is_a_complex_rotation(percent: float) -> None:
    heads = torch.randn(2, 7, 3, 8)
    table = rotary_table(7, head_dim=8, percent=percent, base=100.0, device=CPU)
    half = int(8 * percent) // 2
    expected = heads.clone()
    for position in range(7):
        for i in range(half):
            turn = complex(
                math.cos(position * 100.0 ** (-i / half)), math.sin(position * 100.0 ** (-i / half))
            )
            pair = torch.complex(heads[:, position, :, i], heads[:, position, :, i + half])
            expected[:, position, :, i] = (pair * turn).real
            expected[:, position, :, i + half] = (pair * turn).imag
    torch.testing.assert_close(rotate(heads, table), expected, atol=1e-6, rtol=1e-6)


def test_rope_scaling_slows_what_does_not_turn_within_the_original_length() -> None:
    frequencies = rotary_frequencies(128, base=500000.0)
    turns = 8192 * frequencies / (2 * math.pi)
    slower = frequencies / scale_frequencies(frequencies, 8.0)
    assert (slower[turns >= 4] == 1).all() and (turns >= 4).any()
    torch.testing.assert_close(slower[turns <= 1], torch.full_like(slower[turns <= 1], 8.0))
    between = slower[(turns > 1) & (turns < 4)]
    assert len(between) > 3 and (between.diff() > 0).all()
    assert 1 < between[0] and between[-1] < 8
    torch.testing.assert_close(scale_frequencies(frequencies, 1.0), frequencies)


@pytest.mark.parametrize(("percent", "factor"), [(1.0, 8.0), (1.0, 32.0), (0.5, 3.0)])
def test_scaled_frequencies_are_those_of_transformers(percent: float, factor: float) -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils", reason="optional package")
    from transformers import LlamaConfig

    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor}
    parameters |= {"partial_rotary_factor": percent, **ROPE_SCALING}
    config = LlamaConfig(head_dim=128, rope_parameters=parameters)
    expected, attention_factor = rope.ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    assert attention_factor == 1.0
    ours = scale_frequencies(rotary_frequencies(int(128 * percent), base=500000.0), factor)
    torch.testing.assert_close(ours.float(), expected, atol=0, rtol=2e-6)


def test_rotary_scores_depend_on_distance_alone() -> None:
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    table = rotary_table(50, head_dim=16, percent=1.0, base=10000.0, device=CPU)

    def score(i: int, j: int) -> float:
        at = [Rotary(table.cos[p : p + 1], table.sin[p : p + 1]) for p in (i, j)]
        return (rotate(query, at[0]) * rotate(key, at[1])).sum().item()

    assert score(3, 1) == pytest.approx(score(42, 40), abs=1e-5)


def test_rotary_gradient() -> None:
    table = rotary_table(5, head_dim=6, percent=1.0, base=10.0, device=CPU)
    exact = Rotary(table.cos.double(), table.sin.double())
    heads = torch.randn(2, 5, 2, 6, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, exact), heads)


def test_position_ids_select_the_rotation() -> None:
    model = sharpen(small_model(position_embedding_type="rope"))
    tokens = torch.arange(8)[None]
    usual = model(tokens)
    shifted = model(tokens, torch.arange(8)[None] + 5)
    torch.testing.assert_close(shifted, usual, atol=1e-5, rtol=1e-5)
    spread = model(tokens, torch.arange(8)[None] * 2)
    assert not torch.allclose(spread, usual, atol=1e-3)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_grouped_queries_equal_repeated_keys(groups: int, dtype: torch.dtype) -> None:
    config = small_config(group_query_attention=True, num_query_groups=groups)
    attention = filled(SelfAttention(config, dtype=torch.float32, device=CPU))
    assert isinstance(attention, SelfAttention)
    hidden = torch.randn(2, 9, 48)
    if dtype == torch.bfloat16:
        # Round what goes in, so that only the arithmetic differs.
        hidden = hidden.bfloat16().float()
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.copy_(parameter.bfloat16())

    per_group, size = 4 // groups, 12
    mixed = attention.query_key_value(hidden).view(2, 9, groups, per_group + 2, size)
    rows = []
    for head in range(4):
        group = head // per_group
        query = mixed[:, :, group, head % per_group]
        key, value = mixed[:, :, group, per_group], mixed[:, :, group, per_group + 1]
        scores = query @ key.transpose(1, 2) / math.sqrt(size)
        future = torch.ones(9, 9, dtype=torch.bool).triu(1)
        rows.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
    expected = attention.dense(torch.cat(rows, dim=-1))
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    got = attention.to(dtype)(hidden.to(dtype))
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


def test_mlp_formulas() -> None:
    hidden = torch.randn(2, 5, 48)

    def parts(**changes: object) -> tuple[torch.Tensor, MLP]:
        mlp = MLP(small_config(**changes), dtype=torch.float32, device=CPU)
        filled(mlp)
        return mlp.dense_h_to_4h(hidden), mlp

    inner, mlp = parts()
    cubic = math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)
    expected = mlp.dense_4h_to_h(0.5 * inner * (1 + torch.tanh(cubic)))
    torch.testing.assert_close(mlp(hidden), expected, atol=1e-5, rtol=1e-5)

    inner, mlp = parts(gelu="erf")
    expected = mlp.dense_4h_to_h(0.5 * inner * (1 + torch.erf(inner / math.sqrt(2))))
    torch.testing.assert_close(mlp(hidden), expected, atol=1e-5, rtol=1e-5)

    inner, mlp = parts(swiglu=True, ffn_hidden_size=20)
    gate, value = inner[..., :20], inner[..., 20:]
    expected = mlp.dense_4h_to_h(gate * torch.sigmoid(gate) * value)
    torch.testing.assert_close(mlp(hidden), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bit_gelu_rounds_the_exact_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gelu, "_CHUNK_ELEMENTS", 100)
    rounded = torch.linspace(-12, 12, 1001).to(dtype).requires_grad_()
    exact = rounded.detach().double().requires_grad_()
    expected, got = F.gelu(exact, approximate="tanh"), gelu.gelu_tanh(rounded)
    expected.sum().backward()
    got.sum().backward()
    assert rounded.grad is not None and exact.grad is not None
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=2**-8)
    torch.testing.assert_close(rounded.grad.double(), exact.grad, atol=1e-6, rtol=2**-8)


def test_rms_norm_formula() -> None:
    norm = filled(RMSNorm(48, epsilon=1e-3, dtype=torch.float32, device=CPU))
    hidden = torch.randn(2, 5, 48)
    weight = next(norm.parameters())
    mean_square = hidden.pow(2).mean(-1, keepdim=True)
    torch.testing.assert_close(norm(hidden), hidden / (mean_square + 1e-3).sqrt() * weight)


def test_16_bit_norm_statistics_are_fp32() -> None:
    norm = RMSNorm(4096, epsilon=0.0, dtype=torch.bfloat16, device=CPU)
    with torch.no_grad():
        norm.weight.fill_(1.0)
    hidden = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    assert torch.equal(norm(hidden), torch.ones_like(hidden))
    assert F.layer_norm(hidden, (4096,)).abs().max() == 0
