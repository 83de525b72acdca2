"""Trainers of the same GPT: ours, Hugging Face GPT-2 in a plain loop, torch's DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from megatron.config import parse, resolve
from megatron.data.data_loader import BatchReader
from megatron.errors import missing_extra
from megatron.launch import Launch, Runtime
from megatron.metrics import Metrics, NullMetrics
from megatron.model.gpt import GPT
from megatron.parallel.groups import ProcessGroups
from megatron.pretrain import build_trainer, open_metrics
from megatron.training import Trainer
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
MOMENTUM, IMAGE_DECAY = 0.9, 1e-4
IMAGE_FLAGS = (
    *("--optimizer", "sgd", "--sgd-momentum", str(MOMENTUM), "--sgd-weight-decay", "coupled"),
    *("--weight-decay", str(IMAGE_DECAY), "--clip-grad", "0"),
)
"""Flags of the optimizer of image networks in place of those of GPT."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the batch of one rank.

    `microbatches` of `batch` sequences make one of our steps. `bucket` is the number of entries of
    a bucket (None: the trainer's default). `more_flags` are passed to our trainer.
    """

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    sequence: int = 256
    vocabulary: int = 8192
    batch: int = 8
    microbatches: int = 1
    bucket: int | None = None
    more_flags: tuple[str, ...] = ()
    log_interval: int = 1

    def flags(self, *, dtype: str, ranks: int = 1, extra: Sequence[str] = ()) -> list[str]:
        """Return the flags for `pretrain_gpt.py`."""
        values = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "num-attention-heads": self.heads,
            "seq-length": self.sequence,
            "vocab-size": self.vocabulary,
            "micro-batch-size": self.batch,
            "global-batch-size": self.batch * self.microbatches * ranks,
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "lr": LEARNING_RATE,
            "lr-decay-style": "constant",
            "adam-beta1": BETAS[0],
            "adam-beta2": BETAS[1],
            "weight-decay": WEIGHT_DECAY,
            "clip-grad": CLIP,
            "train-iters": 1_000_000,
            "log-interval": self.log_interval,
        }
        flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        return [
            *flags,
            "--mock-data",
            *(["--bf16"] if dtype == "bf16" else []),
            *(["--ddp-bucket-size", str(self.bucket)] if self.bucket else []),
            *self.more_flags,
            *extra,
        ]


class Ours:
    """Our trainer as `pretrain_gpt.py` builds it, logging every step."""

    def __init__(
        self,
        flags: Sequence[str],
        groups: ProcessGroups,
        run_dir: Path,
        *,
        name: str = "ours",
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        self.trainer = _trainer(flags, groups, run_dir, torch.device(device))
        self.metrics = self.trainer.metrics

    def step(self) -> float:
        record, _ = self.trainer.train_step()
        self.metrics.step(record)
        return record.loss


class Silent:
    """A second trainer of the same settings, whose steps are not logged."""

    def __init__(self, ours: Ours) -> None:
        self.name = f"{ours.name}, metrics off"
        self._trainer = ours.trainer

    def step(self) -> float:
        record, _ = self._trainer.train_step()
        return record.loss


class HuggingFaceLoop:
    """`GPT2LMHeadModel` in a plain PyTorch loop: sdpa, fused AdamW, clip_grad_norm_.

    Parameters, gradients and moments all have the dtype; there are no fp32 master weights.
    """

    name = "Hugging Face GPT-2"

    def __init__(self, shape: Shape, *, dtype: str, batches: Batches) -> None:
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError:
            raise missing_extra("transformers", "data") from None
        config = GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=shape.sequence,
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        model: Any = GPT2LMHeadModel(config)
        self._model = model.to(DTYPES[dtype]).train()
        self._parameters = list(self._model.parameters())
        self._optimizer = adamw(self._parameters)
        self._batches = batches

    def step(self) -> float:
        ((tokens, labels),) = self._batches.next()
        # The model shifts labels itself, so it gets tokens: one target fewer per sequence.
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()


class DdpTraining:
    """A module in torch's DistributedDataParallel with torch's fused AdamW.

    With `image`, momentum SGD without clipping. `bucket_mb` None leaves DDP its own buckets (25 MiB
    after a first of one). `hook`: one of DDP's communication hooks, `fp16` or `powersgd` (of
    `rank`, from the second step on).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        name: str,
        bucket_view: bool = False,
        bucket_mb: int | None = None,
        hook: str | None = None,
        rank: int = 0,
        image: bool = False,
    ) -> None:
        self.name = name
        self.model = DistributedDataParallel(
            module, gradient_as_bucket_view=bucket_view, bucket_cap_mb=bucket_mb
        )
        if hook is not None:
            self.model.register_comm_hook(*_communication_hook(hook, rank))
        self.parameters = list(self.model.parameters())
        self._optimizer = sgd(self.parameters) if image else adamw(self.parameters)
        self._clip = 0.0 if image else CLIP
        self.backward_ended = 0.0

    def loss(self) -> torch.Tensor:
        """Run the module's forward on its next input."""
        return self.model()

    def step(self) -> float:
        loss = self.loss()
        loss.backward()
        self.backward_ended = perf_counter()
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()


class DdpLoop(DdpTraining):
    """Our GPT in torch's DistributedDataParallel.

    The tied table is one parameter. Parameters and moments have the dtype.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        dtype: str,
        batches: Batches,
        bucket_view: bool,
        name: str | None = None,
        **ddp: Any,
    ) -> None:
        config = parse(list(flags), paths=GRADIENT_PATHS)
        vocabulary = config.data.vocab_size
        assert vocabulary is not None
        model = GPT(config.model, vocab_size=vocabulary, seed=1, dtype=DTYPES[dtype], device="cpu")
        assert model.output_layer is not None and model.embedding is not None
        model.output_layer.weight = model.embedding.word_embeddings.weight
        plain = f"DDP{' (gradient_as_bucket_view)' if bucket_view else ''}"
        super().__init__(_LossModule(model), name=name or plain, bucket_view=bucket_view, **ddp)
        self._batches = batches

    def loss(self) -> torch.Tensor:
        ((tokens, labels),) = self._batches.next()
        return self.model(tokens, labels)


class Batches:
    """The microbatches that a trainer of ours would read, for the other contenders."""

    def __init__(self, trainer: Trainer) -> None:
        reader, size = trainer.readers.train, trainer.config.training.global_batch_size
        assert isinstance(reader, BatchReader) and size is not None
        self._reader = reader
        self._size, self._position = size, 0

    def next(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tokens and labels, [b, s] each, of this rank's microbatches of the next step."""
        batches = self._reader.read(self._position, self._size)
        self._position += self._size
        return [(batch.tokens, batch.labels) for batch in batches]


def adamw(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Return torch's fused AdamW; matrices decay and vectors do not, as in our trainer."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)


def sgd(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.SGD:
    """Return torch's fused SGD with momentum, and L2 weight decay of all parameters."""
    return torch.optim.SGD(
        parameters, lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=IMAGE_DECAY, fused=True
    )


@contextlib.contextmanager
def quiet(console: Path) -> Iterator[None]:
    """Redirect the output of runs to a file, so that the speed of a terminal is not measured."""
    with open(console, "w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
        yield


def _communication_hook(hook: str, rank: int) -> tuple[object, Callable[..., Any]]:
    if hook == "fp16":
        return None, fp16_compress_hook
    state = PowerSGDState(process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return state, powerSGD_hook


class _LossModule(torch.nn.Module):
    """A module whose forward returns the mean loss, as DDP needs it."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model.loss(tokens, labels) / labels.numel()


def _trainer(
    flags: Sequence[str], groups: ProcessGroups, run_dir: Path, device: torch.device
) -> Trainer:
    config = resolve(parse(list(flags), paths=GRADIENT_PATHS), groups.world.size)
    rank, ranks = groups.world.rank, groups.world.size
    launch = Launch(
        launcher="none", rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks
    )
    runtime = Runtime(launch=launch, device=device, backend="gloo")
    metrics: Metrics = NullMetrics()
    if rank == 0:
        # The console goes to a file, too, so that the speed of a terminal is not measured.
        metrics = open_metrics(GPT_TASK, config, runtime, run_dir, None)
    return build_trainer(GPT_TASK, GRADIENT_PATHS, config, runtime, groups, run_dir, metrics, None)
