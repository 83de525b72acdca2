"""Training of the plain GPT-2 of `plain_gpt.py` with the settings of a run of ours.

It starts from the same weights and reads the same samples in the same order. Module, optimizer,
clipping, schedule and loop are torch's or this file's. Only flags, samples and initial numbers are
shared, so a mistake anywhere else shows up as a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megatron.config import GPTConfig, parse, resolve
from megatron.data.data_loader import BatchReader
from megatron.launch import Launch
from megatron.model.gpt import GPT
from megatron.pretrain import build_groups
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS
from tools.bench.common.contenders import Shape
from tools.bench.common.plain_gpt import PlainGPT

_ALONE = Launch(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)
_OF_A_LAYER = {
    "norm_1": "input_norm",
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "norm_2": "post_attention_norm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_OF_THE_MODEL = {
    "tokens": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "norm": "final_norm",
}


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Mean token losses of each step, and of the validation samples after the last step."""

    losses: list[float]
    valid_loss: float


def train(
    flags: Sequence[str],
    *,
    micro_batch: int,
    fp32_norm: bool = False,
    after_step: Callable[[int, float], None] | None = None,
) -> LossCurve:
    """Train all steps of these flags of `pretrain_gpt.py` in this process, in fp32.

    Gradients of `micro_batch` samples are added up. `fp32_norm`: clip by plain `clip_grad_norm_`.
    `after_step` receives each step and its loss.
    """
    config = resolve(parse(list(flags), paths=GRADIENT_PATHS), 1)
    _check(config)
    train_reader, valid_reader, vocabulary = _open_data(config, micro_batch)
    model = plain_gpt(config, vocabulary)
    optimizer, schedule = _optimizer(model, config)
    batch = config.training.global_batch_size
    assert batch is not None, "resolve fills it in"
    losses: list[float] = []
    for step in range(config.total_iterations()):
        loss = _accumulate(model, train_reader, step * batch, batch)
        if fp32_norm:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        else:
            _clip(model, config.optimizer.clip_grad)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss)
        if after_step is not None:
            after_step(step + 1, loss)
    with torch.no_grad():
        parts = [
            sum(loss.item() for loss in _losses(model, valid_reader, number * batch, batch))
            for number in range(config.evaluation.eval_iters)
        ]
    return LossCurve(losses=losses, valid_loss=sum(parts) / len(parts))


def plain_gpt(config: GPTConfig, vocabulary: int) -> PlainGPT:
    """Return the plain model with the initial weights of a run of ours."""
    model = config.model
    ours = GPT(
        model, vocab_size=vocabulary, seed=config.training.seed, dtype=torch.float32, device="cpu"
    )
    shape = Shape(
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        sequence=model.seq_length,
        vocabulary=vocabulary,
    )
    plain = PlainGPT(shape)
    plain.load_state_dict(plain_values(ours.logical_values(), heads=shape.heads))
    return plain


def plain_values(values: Mapping[str, torch.Tensor], *, heads: int) -> dict[str, torch.Tensor]:
    """Convert our parameters by logical name to the plain model's.

    Ours store query, key and value head by head, the plain model stores them for all heads.
    """
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        owner, _, kind = name.rpartition(".")
        if not name.startswith("layers."):
            found[f"{_renamed(owner, _OF_THE_MODEL)}.{kind}"] = value
            continue
        _, number, part = owner.split(".", 2)
        if part == "attention.query_key_value":
            value = value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        found[f"blocks.{number}.{_renamed(part, _OF_A_LAYER)}.{kind}"] = value
    return found


def _renamed(name: str, names: Mapping[str, str]) -> str:
    return next(theirs for theirs, ours in names.items() if ours == name)


def _check(config: GPTConfig) -> None:
    """Assert that the loop below implements these settings."""
    options = config.optimizer
    assert config.precision.param_dtype == "float32" and options.optimizer == "adam"
    assert options.lr is not None and options.lr_decay_style == "cosine"
    assert config.model.attention_dropout == config.model.hidden_dropout == 0
    assert not config.training.skip_train and options.clip_grad > 0


def _open_data(config: GPTConfig, micro_batch: int) -> tuple[BatchReader, BatchReader, int]:
    """Return the training data, the validation data, and the size of the vocabulary."""
    config = replace(config, training=replace(config.training, micro_batch_size=micro_batch))
    groups = build_groups(config, _ALONE)
    opened = GPT_TASK.open(config)
    readers = opened.readers(groups, torch.device("cpu"), log=lambda line: None)
    train, valid = readers.train, readers.valid
    assert isinstance(train, BatchReader) and isinstance(valid, BatchReader)
    return train, valid, opened.vocabulary.size


def _optimizer(
    model: PlainGPT, config: GPTConfig
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Return torch's AdamW, with decay for matrices but not for vectors.

    The learning rate rises linearly from 0, then follows half a cosine.
    """
    options, steps = config.optimizer, config.total_iterations()
    assert options.lr is not None
    parameters, decay = list(model.parameters()), options.weight_decay
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = options.adam_beta1, options.adam_beta2
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.adam_eps)
    warm_up, least = options.lr_warmup_iters, options.min_lr / options.lr

    def factor(step: int) -> float:
        if step <= warm_up and warm_up:
            return step / warm_up
        along = (step - warm_up) / (steps - warm_up)
        return least + (1 - least) * (1 + math.cos(math.pi * along)) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _accumulate(model: PlainGPT, reader: BatchReader, first: int, count: int) -> float:
    """Compute gradients of the mean loss of samples [first, first + count); return that loss."""
    total = 0.0
    for loss in _losses(model, reader, first, count):
        loss.backward()
        total += loss.item()
    return total


def _clip(model: PlainGPT, norm: float) -> None:
    """Clip gradients by a norm computed in fp64.

    On the CPU `clip_grad_norm_` adds squares one by one in fp32: the norm of a word table is too
    small by 8e-4, and after 50 steps of AdamW losses differ by 3e-3.
    """
    parameters = list(model.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]
    nn.utils.clip_grads_with_norm_(parameters, norm, torch.stack(norms).square().sum().sqrt())


def _losses(model: PlainGPT, reader: BatchReader, first: int, count: int) -> Iterator[torch.Tensor]:
    """Yield the part of the batch's mean loss that each microbatch adds."""
    for batch in reader.read(first, count):
        yield model(batch.tokens, batch.labels) * (len(batch.tokens) / count)
