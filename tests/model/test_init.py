"""First values depend on seed, name and shape alone."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.model.gpt import GPT
from megatron.model.init import initial_values, set_parameter
from tests.model.models import VOCAB, small_config, small_model


def test_values_do_not_depend_on_order_or_generators() -> None:
    first = initial_values(3, "a.weight", (7, 5), 0.02)
    torch.manual_seed(123)
    initial_values(3, "b.weight", (7, 5), 0.02)
    before = torch.get_rng_state()
    again = initial_values(3, "a.weight", (7, 5), 0.02)
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())


def test_values_differ_by_seed_and_name() -> None:
    base = initial_values(3, "a.weight", (64, 64), 1.0)
    for other in (
        initial_values(4, "a.weight", (64, 64), 1.0),
        initial_values(3, "b.weight", (64, 64), 1.0),
    ):
        correlation = (base * other).mean().item()
        assert abs(correlation) < 0.05
    assert base.std().item() == pytest.approx(1.0, abs=0.03)


def test_a_model_starts_from_them() -> None:
    model = small_model(seed=7, untie_embeddings_and_output_weights=True)
    small = 0.02 / math.sqrt(2 * 3)
    for info in model.parameter_infos():
        logical = info.param.detach()[: info.logical_shape[0]]
        if info.param.ndim == 1:
            assert logical.eq(0.0 if info.name.endswith("bias") else 1.0).all(), info.name
        else:
            output = info.name.endswith(("attention.dense.weight", "dense_4h_to_h.weight"))
            std = small if output else 0.02
            assert torch.equal(logical, initial_values(7, info.name, info.logical_shape, std))


def test_dtype_only_rounds() -> None:
    exact, rounded = small_model(), small_model(dtype=torch.bfloat16)
    for name, values in rounded.logical_values().items():
        assert torch.equal(values, exact.logical_values()[name].bfloat16())


def test_a_late_stage_starts_like_the_whole() -> None:
    stage = GPT(
        small_config(),
        vocab_size=VOCAB,
        seed=5,
        dtype=torch.float32,
        device="cpu",
        layers=range(2, 3),
        has_embedding=False,
    )
    whole = small_model().logical_values()
    for name, values in stage.logical_values().items():
        assert torch.equal(values, whole[name]), name


def test_a_wrong_shape_is_named() -> None:
    info = small_model().parameter_infos()[0]
    with pytest.raises(ValueError, match="word_embeddings"):
        set_parameter(info, torch.zeros(128, 48))
