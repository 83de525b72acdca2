"""Batched log-likelihoods of given continuations, each after its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.model.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Tokens to be predicted, at least one, after a context of at least one token."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]

    def cut(self, length: int) -> Continuation:
        """Shorten the context from the left so that at most `length` inputs remain.

        The last token is no input. `tokens` must fit.
        """
        assert len(self.tokens) <= length, "no room for a context"
        room = length + 1 - len(self.tokens)
        return Continuation(context=self.context[-room:], tokens=self.tokens)


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """The natural log-probability of a continuation, and whether greedy decoding yields it."""

    log: float
    greedy: bool


@torch.inference_mode()
def likelihoods(
    model: GPT, continuations: Sequence[Continuation], *, batch_size: int
) -> list[Likelihood]:
    """Return a likelihood for each continuation, in order; none may exceed the model's positions.

    Sequences of similar length share a batch, padded on the right, which causal attention ignores.
    Logits are computed at predicted positions only; their log-softmax is fp32, and
    log-probabilities are summed in fp64. The model must be in evaluation mode.
    """
    assert not model.training, "dropout would be drawn"
    order = sorted(range(len(continuations)), key=lambda i: -_inputs(continuations[i]))
    results: dict[int, Likelihood] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        found = _batch(model, [continuations[i] for i in chosen])
        results |= dict(zip(chosen, found, strict=True))
    return [results[i] for i in range(len(continuations))]


def _inputs(continuation: Continuation) -> int:
    return len(continuation.context) + len(continuation.tokens) - 1


def _batch(model: GPT, batch: Sequence[Continuation]) -> list[Likelihood]:
    longest = max(map(_inputs, batch))
    tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
    for row, one in enumerate(batch):
        inputs = (*one.context, *one.tokens)[:-1]
        tokens[row, : len(inputs)] = torch.tensor(inputs)
    hidden = model.transform(model.embed(tokens.to(model.device)))  # [b, s, h]
    results = []
    for row, one in enumerate(batch):
        last = _inputs(one)
        predicting = hidden[row : row + 1, last - len(one.tokens) : last]
        logits = model.project(predicting)[0, :, : model.vocab_size].float()
        wanted = torch.tensor(one.tokens, device=logits.device)
        logs = logits.log_softmax(-1).gather(1, wanted[:, None])
        greedy = bool((logits.argmax(-1) == wanted).all())
        results.append(Likelihood(log=float(logs.double().sum()), greedy=greedy))
    return results
