"""Tests of stages and their runner without processes, over a mailbox."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.config import ModelConfig
from megatron.config.sections import split_layers
from megatron.data.data_loader import DeviceMicrobatch
from megatron.documents import Documents
from megatron.model.gpt import GPT
from megatron.parallel.groups import ALONE, Group
from megatron.pipeline.runner import Pipeline
from megatron.pipeline.schedule import StagePosition
from megatron.pipeline.stage import Stage
from megatron.timers import Timers
from tests.pipeline.loopback import Loopback, Mailbox, on_threads

MODEL = ModelConfig(
    num_layers=6,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    untie_embeddings_and_output_weights=True,
)
VOCABULARY, SCALE = 24, 0.25


def model(layers: range, tp: Group = ALONE) -> GPT:
    whole = range(MODEL.num_layers)
    return GPT(
        MODEL,
        vocab_size=VOCABULARY,
        seed=3,
        dtype=torch.float32,
        device="cpu",
        tp=tp,
        layers=layers,
        has_embedding=layers.start == whole.start,
        has_head=layers.stop == whole.stop,
    )


def microbatches(count: int) -> list[DeviceMicrobatch]:
    """Return microbatches of two documents each, which attention keeps apart on every stage."""
    generator = torch.Generator().manual_seed(5)
    shape = (2, MODEL.seq_length)
    documents = np.tile(np.arange(MODEL.seq_length) > 2, (2, 1)).astype(np.int64)
    return [
        DeviceMicrobatch(
            tokens=torch.randint(VOCABULARY, shape, generator=generator),
            labels=torch.randint(VOCABULARY, shape, generator=generator),
            loss_mask=None,
            position_ids=None,
            documents=Documents.of(documents, torch.device("cpu")),
            index=7 + index,
            counted=2 * MODEL.seq_length,
        )
        for index in range(count)
    ]


def pipelines(stages: int, per_turn: int | None, mailbox: Mailbox) -> list[Pipeline]:
    split = split_layers(MODEL.num_layers, stages, per_virtual_stage=per_turn)
    return [
        Pipeline(
            stage=Stage([model(layers) for layers in runs]),
            place=StagePosition(stage=rank, stages=stages, chunks=len(runs)),
            transport=Loopback(mailbox),
            engine=SimpleNamespace(expect_last_backward=lambda names: None),  # type: ignore[arg-type]
            timers=Timers(0),
            at=lambda phase: None,
        )
        for rank, runs in enumerate(split)
    ]


def gradients(lines: list[Pipeline]) -> dict[str, torch.Tensor]:
    infos = [info for line in lines for info in line.stage.parameter_infos()]
    return {info.name: info.param.grad for info in infos if info.param.grad is not None}


@pytest.mark.parametrize(
    ("stages", "per_turn", "count"),
    [(2, None, 3), (4, None, 2), (3, 1, 6), (2, 1, 4), (6, None, 7)],
)
def test_any_cut_has_the_gradients_of_the_whole(
    stages: int, per_turn: int | None, count: int
) -> None:
    def run(lines: list[Pipeline], name: str, **more: Any) -> list[torch.Tensor]:
        batches = microbatches(count)
        return on_threads(
            [partial(getattr(each, name), batches, iteration=1, **more) for each in lines]
        )

    whole, mailbox = pipelines(1, None, Mailbox()), Mailbox()
    (loss,) = run(whole, "forward_backward", scale=SCALE)
    lines = pipelines(stages, per_turn, mailbox)
    *others, last = run(lines, "forward_backward", scale=SCALE)
    torch.testing.assert_close(last, loss, rtol=1e-6, atol=0)
    assert all(other == 0 for other in others) and mailbox.is_empty
    boundaries = stages * len(lines[0].stage.chunks) - 1
    assert len(mailbox.order) == 2 * count * boundaries
    found, wanted = gradients(lines), gradients(whole)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    *_, evaluated = run(lines, "forward")
    torch.testing.assert_close(evaluated, loss, rtol=1e-6, atol=0)
    assert mailbox.is_empty and not any(line.stage._graphs for line in lines)


def test_an_output_goes_once_it_is_sent_and_a_graph_once_it_was_used() -> None:
    first, last = (Stage([model(layers)]) for (layers,) in split_layers(MODEL.num_layers, 2))
    (batch,) = microbatches(1)
    output = first.forward(1, batch)
    memory = StorageWeakRef(output.untyped_storage())
    received = output.clone()
    del output
    assert memory.expired(), "backward does not need it"
    assert last.forward(1, batch, received).shape == (1,)
    gradient = last.backward(batch.index, SCALE)
    assert gradient is not None and gradient.shape == received.shape
    assert first.backward(batch.index, gradient) is None
    with pytest.raises(KeyError):
        last.backward(batch.index, SCALE)
