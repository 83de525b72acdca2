"""Beam search over the translations of a DC-Transformer, as fairseq searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron.data.dictionary import BOS, EOS, PAD
from megatron.errors import CheckpointError
from megatron.model.dc_transformer import DCTransformer, visible_positions


@dataclass(frozen=True, kw_only=True)
class Beam:
    """Parameters of the search.

    `size`: hypotheses that are kept at each position. `length_penalty`: exponent of the length in
    the score, log-likelihood / length ** length_penalty, where the end of the sentence counts as a
    token; 0 for the log-likelihood itself, larger for longer translations. A translation of n
    source tokens, their end included, has at least 1 token before its end (fairseq's `min_len`) and
    at most `max_len_a` * n + `max_len_b`.
    """

    size: int = 4
    length_penalty: float = 1.0
    max_len_a: float = 0.0
    max_len_b: int = 200

    def limit(self, source_length: int) -> int:
        """Return the longest translation of a source, in tokens before its end."""
        return max(int(self.max_len_a * source_length + self.max_len_b), 1)


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation: its tokens without the end, and its score."""

    tokens: tuple[int, ...]
    score: float


@dataclass
class _Sentence:
    """The search for one source sentence: hypotheses so far, the best first, and finished ones."""

    number: int
    limit: int
    prefixes: list[tuple[int, ...]]
    finished: list[Hypothesis] = field(default_factory=list[Hypothesis])


@torch.inference_mode()
def beam_search(model: DCTransformer, source: torch.Tensor, beam: Beam) -> list[list[Hypothesis]]:
    """Return the finished hypotheses of each source sentence, the best score first.

    At each position the 2 * size best continuations of a sentence's hypotheses are looked at: an
    end among the first `size` finishes its hypothesis, others become the next hypotheses. A
    sentence is done when `size` hypotheses are finished, or none is left.

    Args:
        model: In evaluation mode.
        source: int64 [b, s] on the model's device, padded on the right.
        beam: Parameters.

    Raises:
        CheckpointError: The model computes NaN.
    """
    assert not model.training, "dropout would be drawn"
    lengths = (source != PAD).sum(1).tolist()
    sentences = [
        _Sentence(number, beam.limit(length), [()]) for number, length in enumerate(lengths)
    ]
    found = list(sentences)
    size = beam.size
    rows = torch.arange(len(sentences), device=source.device).repeat_interleave(size)
    visible = visible_positions(source)[rows]
    caches = model.start_decoding(model.encode(source))
    for cache in caches:
        cache.reorder(rows, sources=True)
    last = torch.full_like(rows, EOS)
    # One hypothesis begins; the other rows of a sentence are dead.
    scores = torch.full((len(sentences), size), -torch.inf, device=source.device)
    scores[:, 0] = 0.0
    position = 0
    while sentences:
        logits = model.decode_next(last, position, visible, caches)
        steps = logits.float().log_softmax(1).unflatten(0, (len(sentences), size))
        if steps.isnan().any():
            raise CheckpointError("the model computes NaN; give another step")
        totals = scores[:, :, None] + _allowed(steps, sentences, position)
        count, entries = totals.shape[1] * totals.shape[2], totals.shape[2]
        best, places = totals.flatten(1).topk(min(2 * size, count))
        chosen: list[tuple[int, int, float]] = []
        going: list[_Sentence] = []
        for at, (sentence, values, where) in enumerate(
            zip(sentences, best.tolist(), places.tolist(), strict=True)
        ):
            candidates = [(*divmod(p, entries), v) for p, v in zip(where, values, strict=True)]
            if kept := _advance(sentence, candidates, position, beam):
                going.append(sentence)
                # Dead rows repeat the first.
                kept += [(kept[0][0], PAD, -torch.inf)] * (size - len(kept))
                chosen += [(at * size + row, token, value) for row, token, value in kept]
        if not going:
            break
        fewer, sentences = len(going) < len(sentences), going
        rows = torch.tensor([row for row, _, _ in chosen], device=source.device)
        last = torch.tensor([token for _, token, _ in chosen], device=source.device)
        values = [value for _, _, value in chosen]
        scores = torch.tensor(values, device=source.device).view(len(sentences), size)
        # The hypotheses of a sentence share its source.
        visible = visible[rows] if fewer else visible
        for cache in caches:
            cache.reorder(rows, sources=fewer)
        position += 1
    return [
        sorted(sentence.finished, key=lambda hypothesis: -hypothesis.score) for sentence in found
    ]


def translate(
    model: DCTransformer,
    sources: Sequence[Sequence[int]],
    beam: Beam,
    *,
    batch_size: int = 32,
    watch: Callable[[int], None] = lambda done: None,
) -> list[Hypothesis]:
    """Return the best translation of each source sentence, in the order given.

    Args:
        model: In evaluation mode.
        sources: Token ids that end in `EOS`.
        beam: Parameters of the search.
        batch_size: Sentences that are searched together, those of similar lengths.
        watch: Called after each batch with the number of sentences done.
    """
    found: dict[int, Hypothesis] = {}
    order = sorted(range(len(sources)), key=lambda place: len(sources[place]))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        longest = len(sources[places[-1]])
        rows = [[*sources[place], *[PAD] * (longest - len(sources[place]))] for place in places]
        for place, hypotheses in zip(
            places, beam_search(model, torch.tensor(rows, device=model.device), beam), strict=True
        ):
            found[place] = hypotheses[0]
        watch(len(found))
    return [found[place] for place in range(len(sources))]


def _allowed(steps: torch.Tensor, sentences: Sequence[_Sentence], position: int) -> torch.Tensor:
    """Return log-likelihoods [sentences, size, entries] with -inf for tokens that cannot follow."""
    steps[:, :, [BOS, PAD] if position else [BOS, PAD, EOS]] = -torch.inf
    for at, sentence in enumerate(sentences):
        if position >= sentence.limit:
            end = steps[at, :, EOS].clone()
            steps[at] = -torch.inf
            steps[at, :, EOS] = end
    return steps


def _advance(
    sentence: _Sentence,
    candidates: Sequence[tuple[int, int, float]],
    position: int,
    beam: Beam,
) -> list[tuple[int, int, float]]:
    """Finish and extend the hypotheses of a sentence, and return those that go on.

    `candidates` and the result are (hypothesis, token, log-likelihood of all tokens), the best
    first. An empty result means that the sentence is done.
    """
    kept: list[tuple[int, int, float]] = []
    for rank, (row, token, value) in enumerate(candidates):
        if value == -torch.inf or len(kept) == beam.size:
            break
        if token != EOS:
            kept.append((row, token, value))
        elif rank < beam.size and len(sentence.finished) < beam.size:
            score = value / (position + 1) ** beam.length_penalty
            sentence.finished.append(Hypothesis(sentence.prefixes[row], score))
    if len(sentence.finished) == beam.size:
        return []
    sentence.prefixes = [(*sentence.prefixes[row], token) for row, token, _ in kept]
    return kept
