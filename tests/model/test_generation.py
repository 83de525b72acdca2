"""Sampling is deterministic, and the cache changes its cost only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.errors import CheckpointError
from megatron.model import generation
from megatron.model.attention import KeyValueCache
from megatron.model.generation import Sampling, generate, pick
from megatron.model.gpt import GPT
from tests.model.models import VARIANTS, VOCAB, sharpen, small_model

GREEDY = Sampling(greedy=True)
PROMPT = [3, 14, 15, 92]


def spiky(**changes: Any) -> GPT:
    return sharpen(small_model(**changes)).eval()


def run(model: GPT, count: int, **options: object) -> list[int]:
    chosen: dict = {"sampling": GREEDY} | options
    return list(generate(model, PROMPT, max_new_tokens=count, **chosen))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_changes_nothing(variant: str) -> None:
    model = spiky(**VARIANTS[variant])
    # 30 tokens pass the window of 16.
    assert run(model, 30, use_cache=True) == run(model, 30, use_cache=False)


@pytest.mark.parametrize(("count", "capacity"), [(3, 7), (30, 16)])
def test_caches_hold_the_text_and_no_more(
    count: int, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Noted(KeyValueCache):
        def __init__(self, shape: tuple[int, int, int, int], *, like: torch.Tensor) -> None:
            made.append(shape[2])
            super().__init__(shape, like=like)

    monkeypatch.setattr(generation, "KeyValueCache", Noted)
    model = spiky()
    assert len(run(model, count)) == count
    assert made == [capacity] * len(model.layers)
    made.clear()
    beyond = PROMPT * (model.config.seq_length // len(PROMPT) + 1)
    assert len(list(generate(model, beyond, max_new_tokens=2, sampling=GREEDY))) == 2
    assert made == [], "no cache is used beyond the window"


def test_positions_that_training_never_reached_are_not_used() -> None:
    model = spiky(max_position_embeddings=40)
    unused = "embedding.position_embeddings.weight"
    table = model.logical_values()[unused].clone()
    table[model.config.seq_length :] = torch.nan
    found = run(model, 30)
    model.load_values({**model.logical_values(), unused: table})
    assert run(model, 30) == found


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=VOCAB)])
def test_ids_that_the_tokenizer_lacks_are_never_drawn(sampling: Sampling) -> None:
    few = VOCAB // 3
    # A high temperature makes every id about as likely as the others.
    hot = Sampling(temperature=1e6, top_k=sampling.top_k, greedy=sampling.greedy)
    found = run(
        spiky(), 60, sampling=hot, vocab_size=few, generator=torch.Generator().manual_seed(1)
    )
    assert len(found) == 60 and max(found) < few


def test_greedy_follows_the_likeliest_token() -> None:
    model = spiky()
    tokens = list(PROMPT)
    for token in run(model, 5):
        logits = model(torch.tensor([tokens]))[0, -1, :VOCAB]
        assert token == int(logits.argmax())
        tokens.append(token)


def test_draws_follow_the_generator() -> None:
    model = spiky()

    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return run(model, 10, sampling=Sampling(temperature=5.0), generator=generator)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=3)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_that_diverged_continues_nothing(sampling: Sampling, value: float) -> None:
    model = spiky()
    values = {name: kept.clone() for name, kept in model.logical_values().items()}
    values["final_norm.bias"][0] = value
    model.load_values(values)
    with pytest.raises(CheckpointError, match="the model computes NaN or infinities"):
        run(model, 2, sampling=sampling)


def test_it_stops_before_the_end_token() -> None:
    model = spiky()
    tokens = run(model, 8)
    stop = tokens[4]
    assert run(model, 8, end_token=stop) == tokens[: tokens.index(stop)]


def test_padding_is_never_drawn() -> None:
    model = small_model().eval()
    generator = torch.Generator().manual_seed(0)
    hot = Sampling(temperature=1e6)
    drawn = run(model, 200, sampling=hot, generator=generator, use_cache=False)
    assert max(drawn) < VOCAB and len(set(drawn)) > 60


def test_top_k_limits_the_candidates() -> None:
    logits = torch.arange(10.0) / 10
    generator = torch.Generator().manual_seed(0)
    few = Sampling(temperature=10.0, top_k=3)
    assert {pick(logits, few, generator) for _ in range(100)} == {7, 8, 9}
    counts = torch.zeros(10)
    for _ in range(4000):
        counts[pick(logits, Sampling(temperature=0.5), generator)] += 1
    torch.testing.assert_close(counts / 4000, (logits / 0.5).softmax(0), atol=0.03, rtol=0)
