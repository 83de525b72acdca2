"""Text generation by sampling one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.errors import CheckpointError
from megatron.model.attention import KeyValueCache
from megatron.model.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of the next token.

    `temperature`: divides the logits, which must stay finite. `top_k`: sample among the k likeliest
    tokens, 0 for all. `greedy`: take the likeliest token.
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
    """Yield up to `max_new_tokens` ids that follow a non-empty prompt; stop before `end_token`.

    The model must be whole and in evaluation mode. It sees the last `seq_length` tokens, as
    training reached no later position; longer texts shift positions, which invalidates cached keys,
    so that every token costs a full pass.

    Args:
        generator: CPU generator for sampling.
        vocab_size: sample smaller ids only, if the model has more ids than its tokenizer.

    Raises:
        CheckpointError: The model computes NaN or infinities, as weights of a run that diverged do.
    """
    assert len(prompt) > 0, "an empty prompt has no next token"
    assert not model.training, "dropout would be drawn"
    window = model.config.seq_length
    tokens = list(prompt)
    caches: list[KeyValueCache] | None = None
    if use_cache and len(tokens) <= window:
        caches = _caches(model, min(window, len(tokens) + max_new_tokens))
    for _ in range(max_new_tokens):
        if caches is not None and len(tokens) <= window:
            logits = _next_logits(model, tokens, start=caches[0].length, caches=caches)
        else:
            logits = _next_logits(model, tokens[-window:], start=0, caches=None)
        logits = logits[:vocab_size]
        if not logits.isfinite().all():
            raise CheckpointError("the model computes NaN or infinities; give another step")
        token = pick(logits, sampling, generator)
        if token == end_token:
            return
        tokens.append(token)
        yield token


def pick(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Return the next token id from fp32 logits [vocabulary] on the CPU, as `sampling` says."""
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
    """Return logits [vocabulary] after `tokens`, the first `start` of which the caches hold."""
    new = torch.tensor([tokens[start:]], device=model.device)
    position_ids = torch.arange(start, len(tokens), device=model.device)[None]
    hidden = model.embed(new, position_ids)
    hidden = model.transform(hidden, position_ids, caches=caches)
    return model.project(hidden[:, -1:])[0, 0, : model.vocab_size].float().cpu()


def _caches(model: GPT, capacity: int) -> list[KeyValueCache]:
    config = model.config
    shape = (1, config.query_groups, capacity, config.head_dim)
    like = next(model.parameters()).detach()
    return [KeyValueCache(shape, like=like) for _ in model.layers]
