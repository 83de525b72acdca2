"""Beam search against searches that try every sentence, or every step without caches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron.data.dictionary import BOS, EOS, PAD
from megatron.errors import CheckpointError
from megatron.model.beam_search import Beam, Hypothesis, beam_search
from megatron.model.dc_transformer import DCTransformer
from tests.model.translations import random_pairs, small_shape

ENTRIES = 6
"""Ids that may follow: EOS and 3 others."""


def searched(*, seed: int = 0, spread: float = 3.0) -> DCTransformer:
    model = DCTransformer(
        small_shape(), source_size=24, target_size=ENTRIES, seed=seed, dtype=torch.float32,
        device="cpu",
    )  # fmt: skip
    # Far from uniform, so that the order of hypotheses does not hang on rounding.
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(spread)
    model.train(False)
    return model


def likelihoods(model: DCTransformer, source: torch.Tensor, prefix: tuple[int, ...]):
    """Return the log-likelihoods of what follows a prefix, by one pass over the whole sentence."""
    with torch.no_grad():
        logits = model(source, torch.tensor([[EOS, *prefix]]))[0, -1].double()
    return logits.log_softmax(0)


def every_sentence(
    model: DCTransformer, source: torch.Tensor, *, longest: int, penalty: float
) -> list[Hypothesis]:
    words = [token for token in range(ENTRIES) if token not in (BOS, PAD, EOS)]
    found = []
    for length in range(1, longest + 1):
        for sentence in itertools.product(words, repeat=length):
            # After the longest sentences an end has to follow, whatever its likelihood.
            total = sum(
                likelihoods(model, source, sentence[:place])[token].item()
                for place, token in enumerate((*sentence, EOS))
            )
            found.append(Hypothesis(sentence, total / (length + 1) ** penalty))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def step_by_step(
    model: DCTransformer, source: torch.Tensor, *, size: int, longest: int, penalty: float
) -> list[Hypothesis]:
    """Search as `beam_search` does, with sorted lists and without caches."""
    alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[Hypothesis] = []
    for length in range(longest + 1):
        options = []
        for total, prefix in alive:
            logs = likelihoods(model, source, prefix)
            for token in range(ENTRIES):
                forbidden = (BOS, PAD) if length else (BOS, PAD, EOS)
                if token not in forbidden and (length < longest or token == EOS):
                    options.append((total + logs[token].item(), prefix, token))
        options = sorted(options, key=lambda option: -option[0])[: 2 * size]
        ends = [o for o in options[:size] if o[2] == EOS][: size - len(done)]
        done += [Hypothesis(prefix, total / (length + 1) ** penalty) for total, prefix, _ in ends]
        alive = [(total, (*prefix, token)) for total, prefix, token in options if token != EOS]
        alive = alive[:size]
        if len(done) == size or not alive:
            break
    return sorted(done, key=lambda hypothesis: -hypothesis.score)


def same(found: list[Hypothesis], wanted: list[Hypothesis]) -> None:
    assert [h.tokens for h in found] == [h.tokens for h in wanted]
    for one, other in zip(found, wanted, strict=True):
        # A score is a sum of at most 12 log-likelihoods. In fp32 each addition to a total below 64
        # rounds by up to 2e-6, and the log-likelihoods themselves are off by about as much.
        assert math.isclose(one.score, other.score, rel_tol=0.0, abs_tol=5e-5)


@pytest.mark.push
@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.7])
def test_a_beam_that_holds_everything_finds_the_best_sentence(penalty: float) -> None:
    longest = 3  # 3 + 9 + 27 sentences
    for seed in range(3):
        model = searched(seed=seed)
        source, _, _ = random_pairs([(5, 2)], seed=seed)
        wanted = every_sentence(model, source, longest=longest, penalty=penalty)
        beam = Beam(size=len(wanted), length_penalty=penalty, max_len_b=longest)
        (found,) = beam_search(model, source, beam)
        same(found, wanted)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_small_beam_equals_a_search_without_caches(size: int, penalty: float) -> None:
    for seed in range(4):
        model = searched(seed=seed)
        source, _, _ = random_pairs([(6, 2)], seed=seed)
        beam = Beam(size=size, length_penalty=penalty, max_len_b=7)
        (found,) = beam_search(model, source, beam)
        same(found, step_by_step(model, source, size=size, longest=7, penalty=penalty))


def test_sentences_are_searched_as_if_alone() -> None:
    model = searched(seed=5)
    source, _, _ = random_pairs([(3, 2), (9, 2), (6, 2), (1, 2)])
    beam = Beam(size=3, max_len_a=1.0, max_len_b=2)
    together = beam_search(model, source, beam)
    for row, found in enumerate(together):
        length = int((source[row] != PAD).sum())
        (alone,) = beam_search(model, source[row : row + 1, :length], beam)
        same(found, alone)
        assert all(len(h.tokens) <= length + 2 for h in found)


@pytest.mark.parametrize("beam", [Beam(size=1), Beam(size=4), Beam(size=2, max_len_b=0)])
def test_a_translation_is_never_empty(beam: Beam) -> None:
    """The end is the likeliest token everywhere, so the best translation is one token long."""
    model = searched()
    values = dict(model.named_parameters())
    with torch.no_grad():
        # Every position has the same logits, whatever came before.
        values["decoder.layers.1.final_layer_norm.weight"].zero_()
        values["decoder.layers.1.final_layer_norm.bias"].zero_()
        values["decoder.layers.1.final_layer_norm.bias"][0] = 1.0
        model.decoder.output_projection.weight[:, 0] = torch.tensor([0.0, 0.0, 5.0, 1.0, 2.0, 1.5])
    source, _, _ = random_pairs([(5, 2), (3, 2)])
    logs = torch.tensor([0.0, 0.0, 5.0, 1.0, 2.0, 1.5]).log_softmax(0).tolist()
    for found in beam_search(model, source, beam):
        assert found[0].tokens == (4,)
        assert math.isclose(found[0].score, (logs[4] + logs[EOS]) / 2, rel_tol=1e-5)
        assert all(hypothesis.tokens for hypothesis in found)


def test_a_model_whose_numbers_went_wrong_translates_nothing() -> None:
    model = searched()
    with torch.no_grad():
        model.decoder.output_projection.weight[3] = torch.nan
    source, _, _ = random_pairs([(5, 2)])
    with pytest.raises(CheckpointError, match="computes NaN; give another step"):
        beam_search(model, source, Beam(size=2))


def test_sources_move_only_where_a_sentence_has_ended() -> None:
    model = searched()
    source, _, _ = random_pairs([(5, 2), (3, 2)])
    (cache, *_) = model.start_decoding(model.encode(source))
    cache.window.normal_()
    window, keys, values = cache.window.clone(), cache.keys, cache.values
    cache.reorder(torch.tensor([1, 0]), sources=False)
    assert torch.equal(cache.window, window[[1, 0]])
    assert cache.keys is keys and cache.values is values
    cache.reorder(torch.tensor([1]), sources=True)
    assert torch.equal(cache.window, window[[0]])
    assert torch.equal(cache.keys, keys[[1]]) and torch.equal(cache.values, values[[1]])


def test_a_length_penalty_favours_longer_translations() -> None:
    model = searched(seed=1, spread=1.0)
    source, _, _ = random_pairs([(5, 2)])
    lengths = []
    for penalty in (0.0, 3.0):
        beam = Beam(size=40, length_penalty=penalty, max_len_b=3)
        (found,) = beam_search(model, source, beam)
        lengths.append(len(found[0].tokens))
    assert lengths[0] < lengths[1]
