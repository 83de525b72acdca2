"""Sampling text from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.model.attention import KeyValueCache
from megatron.model.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings by which the next token is drawn.

    `temperature`: divides the logits, more than 0. `top_k`: the draw is among that many likeliest
    tokens, 0 = all. `greedy`: the likeliest token, no draw.
    """

    temperature: float = 1.0
    top_k: int = 0
    greedy: bool = False


def generate(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    end_token: int | None = None,
    vocab_size: int | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids that follow a prompt of at least one token.

    Stops before `end_token`.

    The model must be whole and in evaluation mode. It sees the last `positions` tokens; once the
    text is longer, keys can no longer be kept (their positions shift) and every token costs a
    full pass. `generator`: of the CPU, for draws. `vocab_size`: only smaller ids are drawn, for a
    model that has more ids than its tokenizer.
    """
    assert len(prompt) > 0, "an empty prompt has no next token"
    assert not model.training, "dropout would be drawn"
    window = model.config.positions
    tokens = list(prompt)
    caches: list[KeyValueCache] | None = _caches(model) if use_cache else None
    for _ in range(max_new_tokens):
        if caches is not None and len(tokens) <= window:
            logits = _next_logits(model, tokens, start=caches[0].length, caches=caches)
        else:
            logits = _next_logits(model, tokens[-window:], start=0, caches=None)
        token = pick(logits[:vocab_size], sampling, generator)
        if token == end_token:
            return
        tokens.append(token)
        yield token


def pick(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Draw a token id from fp32 logits [vocabulary] on the CPU."""
    if sampling.greedy:
        return int(logits.argmax())
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        values, candidates = scaled.topk(sampling.top_k)
        drawn = torch.multinomial(values.softmax(0), 1, generator=generator)
        return int(candidates[drawn])
    return int(torch.multinomial(scaled.softmax(0), 1, generator=generator))


@torch.inference_mode()
def _next_logits(
    model: GPT, tokens: Sequence[int], *, start: int, caches: list[KeyValueCache] | None
) -> torch.Tensor:
    """Logits [vocabulary] after `tokens`, whose first `start` the caches already hold."""
    new = torch.tensor([tokens[start:]], device=model.device)
    position_ids = torch.arange(start, len(tokens), device=model.device)[None]
    hidden = model.embed(new, position_ids)
    hidden = model.transform(hidden, position_ids, caches=caches)
    return model.project(hidden[:, -1:])[0, 0, : model.vocab_size].float().cpu()


def _caches(model: GPT) -> list[KeyValueCache]:
    config = model.config
    shape = (1, config.query_groups, config.positions, config.head_dim)
    like = next(model.parameters()).detach()
    return [KeyValueCache(shape, like=like) for _ in model.layers]
