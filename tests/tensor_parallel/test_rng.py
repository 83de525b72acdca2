"""Dropout is a function of seed, iteration, microbatch and layer."""

from __future__ import annotations

from typing import Any

import torch

from megatron.tensor_parallel.rng import EMBEDDING_STREAM, DropoutStreams
from tests.model.models import random_tokens, small_model

DROPOUT: dict[str, Any] = {"hidden_dropout": 0.3, "attention_dropout": 0.2}


def test_keys_are_distinct() -> None:
    keys = set()
    for seed in (1, 2):
        streams = DropoutStreams(seed, device=torch.device("cpu"))
        for iteration in range(3):
            for microbatch in range(3):
                streams.at(iteration, microbatch)
                for layer in (EMBEDDING_STREAM, 0, 1):
                    for rank in range(2):
                        keys.add(streams.key(layer, sharded_rank=rank))
    assert len(keys) == 2 * 3 * 3 * 3 * 2


def test_same_place_same_output_whatever_ran_before() -> None:
    model = small_model(**DROPOUT)
    tokens = random_tokens()
    model.streams.at(4, 2)
    first = model(tokens)
    torch.manual_seed(0)
    model.streams.at(9, 9)
    model(random_tokens(1, seed=3))
    model.streams.at(4, 2)
    assert torch.equal(model(tokens), first)


def test_another_microbatch_iteration_or_seed_draws_another_mask() -> None:
    tokens = random_tokens()
    outputs = []
    for seed, iteration, microbatch in ((5, 4, 2), (5, 4, 3), (5, 5, 2), (6, 4, 2)):
        model = small_model(**DROPOUT)
        model.streams.seed = seed
        model.streams.at(iteration, microbatch)
        outputs.append(model(tokens))
    for i, one in enumerate(outputs):
        for other in outputs[:i]:
            assert not torch.allclose(one, other)


def test_layers_draw_from_different_streams() -> None:
    streams = DropoutStreams(1, device=torch.device("cpu"))
    draws = []
    for layer in (EMBEDDING_STREAM, 0, 1):
        streams.enter(layer)
        draws.append(torch.rand(8))
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])


def test_without_dropout_no_generator_is_touched() -> None:
    tokens = random_tokens()
    for model in (small_model(), small_model(**DROPOUT).eval()):
        before = torch.get_rng_state()
        model(tokens)
        assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_drops_nothing() -> None:
    tokens = random_tokens()
    assert torch.equal(small_model(**DROPOUT).eval()(tokens), small_model()(tokens))
