"""Recomputation changes memory and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import RecomputeConfig
from megatron.low_memory.checkpoint_interval import Span, recompute_spans
from tests.model.models import gradients, random_tokens, small_model

SETTINGS = {
    "default": RecomputeConfig(recompute_granularity="full"),
    "uniform 1": RecomputeConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
    "uniform 2": RecomputeConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
    ),
    "block 2": RecomputeConfig(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=2
    ),
    "selective": RecomputeConfig(recompute_granularity="selective"),
}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.3, "attention_dropout": 0.2}


def saved_bytes(model: Any, tokens: torch.Tensor) -> int:
    """Bytes of distinct storages that autograd keeps between forward and backward, weights
    left out."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.transform(model.embed(tokens))
    return sum(sizes.values())


def test_spans() -> None:
    assert recompute_spans(2, None) == [Span(0, 1, False), Span(1, 2, False)]
    for nothing in (RecomputeConfig(), SETTINGS["selective"]):
        assert recompute_spans(2, nothing) == recompute_spans(2, None)
    assert recompute_spans(2, SETTINGS["default"]) == [Span(0, 1, True), Span(1, 2, True)]
    assert recompute_spans(5, SETTINGS["uniform 2"]) == [
        Span(0, 2, True),
        Span(2, 4, True),
        Span(4, 5, True),
    ]
    assert recompute_spans(3, SETTINGS["block 2"]) == [
        Span(0, 1, True),
        Span(1, 2, True),
        Span(2, 3, False),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_are_bitwise_the_same_with_dropout(setting: str, dtype: torch.dtype) -> None:
    tokens, labels = random_tokens(), random_tokens(seed=1)
    plain = small_model(dtype=dtype, **DROPOUT)
    recomputing = small_model(dtype=dtype, recompute=SETTINGS[setting], **DROPOUT)
    losses = []
    for model in (plain, recomputing):
        model.streams.at(3, 1)
        loss = model.loss(tokens, labels)
        # As in a pipeline: the next microbatch's forward runs before this one's backward.
        model.streams.at(3, 2)
        model.loss(labels, tokens)
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(losses[0], losses[1])
    expected = gradients(plain)
    for name, grad in gradients(recomputing).items():
        assert torch.equal(grad, expected[name]), name


def test_less_is_saved() -> None:
    tokens = random_tokens(4)
    sizes = {
        name: saved_bytes(small_model(recompute=setting), tokens)
        for name, setting in ({"none": None} | SETTINGS).items()
    }
    hidden_bytes = 4 * 16 * 48 * 4
    assert sizes["uniform 1"] <= 4 * hidden_bytes
    assert sizes["uniform 2"] < sizes["uniform 1"] < sizes["block 2"] < sizes["none"] / 2


def test_selective_leaves_out_what_grows_with_the_square() -> None:
    tokens = random_tokens(4)
    models = {
        name: small_model(recompute=SETTINGS.get(name), attention_dropout=0.2, hidden_dropout=0.1)
        for name in ("none", "selective")
    }
    sizes = {name: saved_bytes(model, tokens) for name, model in models.items()}
    scores = 3 * 4 * 4 * 16 * 16 * 4  # layers, batch, heads, queries, keys, bytes
    assert sizes["selective"] <= sizes["none"] - 2 * scores
    # Projections are kept: they are multiplied once.
    with torch.profiler.profile() as profile:
        models["selective"].loss(tokens, tokens).backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::linear"] == 4 * 3 + 1
    assert counts["aten::scaled_dot_product_attention"] == 2 * 3


@pytest.mark.parametrize("setting", ["uniform 1", "selective"])
def test_without_gradients_nothing_is_wrapped(setting: str) -> None:
    model = small_model(recompute=SETTINGS[setting])
    with torch.no_grad():
        assert not model(random_tokens()).requires_grad


def test_bf16_kernels_of_the_cpu_recompute_the_same_bits() -> None:
    tokens, labels = random_tokens(), random_tokens(seed=1)
    models = [
        small_model(dtype=torch.bfloat16, recompute=setting)
        for setting in (None, SETTINGS["uniform 2"])
    ]
    for model in models:
        model.loss(tokens, labels).backward()
    expected = gradients(models[0])
    for name, grad in gradients(models[1]).items():
        assert torch.equal(grad, expected[name]), name
