"""Counts against the real model and against the published sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.config import ModelConfig
from megatron.model.flops import FORMULA, flops_per_token, parameter_count
from tests.model.models import VARIANTS, VOCAB, small_config, small_model


@pytest.mark.parametrize("variant", VARIANTS)
def test_count_equals_the_model(variant: str) -> None:
    model = small_model(**VARIANTS[variant])
    config = small_config(**VARIANTS[variant])
    infos = model.parameter_infos()
    logical = sum(info.param[: info.logical_shape[0]].numel() for info in infos)
    assert parameter_count(config, VOCAB) == logical
    stored = sum(info.param.numel() for info in infos)
    assert parameter_count(config, VOCAB, include_padding=True) == stored


def gpt2_small() -> ModelConfig:
    return ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024)


def test_gpt2_small_has_its_published_size() -> None:
    assert parameter_count(gpt2_small(), 50257) == 124_439_808


def test_flops_are_six_per_weight_plus_attention() -> None:
    config = gpt2_small()
    # Matrices used by every token: 12 h^2 a layer and the padded output layer.
    weights = 12 * 12 * 768**2 + 50304 * 768
    attention = 12 * 12 * 768 * 1024
    assert flops_per_token(config, 50257) == pytest.approx(6 * weights + attention)
    assert "core_v0.9" in FORMULA and "causal" in FORMULA


def test_swiglu_and_groups_are_counted() -> None:
    base = small_config(ffn_hidden_size=96)
    gated = small_config(ffn_hidden_size=96, swiglu=True)
    extra = flops_per_token(gated, VOCAB) - flops_per_token(base, VOCAB)
    assert extra == pytest.approx(6 * 3 * 48 * 96)
    grouped = small_config(ffn_hidden_size=96, group_query_attention=True, num_query_groups=1)
    saved = flops_per_token(base, VOCAB) - flops_per_token(grouped, VOCAB)
    assert saved == pytest.approx(6 * 3 * 48 * 2 * 36)


def test_counting_loads_no_torch() -> None:
    code = "import sys, megatron.model.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
