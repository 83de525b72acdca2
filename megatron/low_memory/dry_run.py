"""One rank's training step in one process, on fake or on real tensors, whatever the grid is.

The rank is built by the code that trains: chunks of the task, gradient engine, optimizer. Only its
groups are fake: collectives have the shapes of the grid and send nothing. On fake tensors nothing
is computed and nothing allocated, so that a model of any size fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import Config, GPTConfig
from megatron.data.batches import Batch
from megatron.data_parallel.buffers import BufferSet
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.node_reducer import NodeReducer
from megatron.data_parallel.reducer import StepContext
from megatron.documents import Documents
from megatron.errors import ConfigError
from megatron.low_memory.memory_recorder import (
    MemoryRecorder,
    SavedActivations,
    count_flops,
    layer_of,
    reachable,
    unique,
)
from megatron.low_memory.planned_memory import translation_batch
from megatron.model.dc_transformer_shapes import parameter_count, training_flops
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import Group, ProcessGroups
from megatron.pipeline.schedule import Kind, Operation, interleaved
from megatron.pipeline.stage import Chunk, Stage
from megatron.pretrain import Paths, build_engine, build_optimizer, build_parts
from megatron.tasks.translation import build_model
from megatron.tasks.translation_config import TranslationConfig
from megatron.tasks.vision_config import VisionConfig

WORD = 5
"""The id that all tokens of a translation profile have."""
DRY_PATHS = ("dense",)
"""Gradient paths without states of their own, whose step does not depend on values."""


class Profiled(Protocol):
    """The part of a `LoadedTask` that a profile needs: a dataclass with a field `config`.

    No data are read.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def summary(self) -> str:
        """The model in a few words."""
        ...

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of forward and backward of one sample."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint must share."""
        ...

    def chunks(self, groups: ProcessGroups, device: torch.device) -> Sequence[Chunk]:
        """Build the chunks of this rank's stage."""
        ...

    def message_shape(self, groups: ProcessGroups) -> tuple[int, ...]:
        """Return the shape of the tensor that one chunk hands to the next."""
        ...


class FakeGroup(Group):
    """A group whose other ranks do not exist.

    A gathered tensor has this rank's rows from each, and a reduced one this rank's values.
    """

    def all_reduce(self, tensor: torch.Tensor, op: Any, **how: Any) -> None:
        """Leave the tensor as it is."""

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor, **how: Any) -> None:
        """Copy `mine` to the place of every rank in `out`."""
        out.view(self.size, -1).copy_(mine.view(1, -1).expand(self.size, -1))

    def broadcast(self, tensor: torch.Tensor, source: int, **how: Any) -> None:
        """Leave the tensor as it is."""

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor, op: Any, **how: Any) -> None:
        """Copy this rank's rows of `whole` to `out`."""
        out.view(-1).copy_(whole.view(self.size, -1)[self.rank])

    def all_gather_str(self, text: str) -> list[str]:
        """Return this rank's text for every rank."""
        return [text] * self.size

    def raise_on_all_ranks(self, work: Callable[[], Any]) -> Any:
        """Run `work`; what it raises stays here."""
        return work()


def fake_groups(dims: ParallelDims, rank: int) -> ProcessGroups:
    """Return the groups of a rank of a grid without starting the other ranks."""

    def line(lines: Sequence[tuple[int, ...]]) -> FakeGroup:
        mine = next((ranks for ranks in lines if rank in ranks), (rank,))
        return FakeGroup(mine, mine.index(rank))

    pipelines = dims.lines("pp")
    return ProcessGroups(
        dims=dims,
        tp=line(dims.lines("tp")),
        dp=line(dims.lines("dp")),
        pp=line(pipelines),
        embedding=line([tuple(dict.fromkeys((each[0], each[-1]))) for each in pipelines]),
        world=line([tuple(range(dims.world_size))]),
        inner=line(dims.inner_lines()) if dims.dp_inner > 1 else None,
        outer=line(dims.outer_lines()) if dims.dp_inner > 1 else None,
    )


@dataclass(kw_only=True)
class DryRank:
    """A rank of a grid with its model, gradients and optimizer states, and a step that it runs."""

    config: Config
    groups: ProcessGroups
    opened: Profiled
    stage: Stage
    engine: GradientEngine
    optimizer: BucketOptimizer
    buffers: BufferSet

    @classmethod
    def build(
        cls,
        opened: Profiled,
        config: Config,
        paths: Paths,
        groups: ProcessGroups,
        device: torch.device,
    ) -> DryRank:
        """Build the rank on a device, on fake tensors inside `fake_tensors`."""
        stage = Stage(opened.chunks(groups, device))
        infos = stage.parameter_infos()
        path = paths[config.gradient.grad_path]
        parts = build_parts(path, config, infos, groups, None, opened.identity())
        engine = build_engine(config, infos, parts, groups)
        if isinstance(engine.reducer, NodeReducer):
            engine.reducer.thread = _AtOnce()
        optimizer, _ = build_optimizer(config, engine, stage)
        buffers = BufferSet(stage.buffer_infos(), groups.dp)
        return cls(
            config=config,
            groups=groups,
            opened=opened,
            stage=stage,
            engine=engine,
            optimizer=optimizer,
            buffers=buffers,
        )

    @property
    def chunks(self) -> list[nn.Module]:
        """The model's chunks."""
        return self.stage.modules

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.stage.chunks[0].device

    def recorder(self) -> MemoryRecorder:
        """Return a recorder that knows what this rank holds, for `step`."""
        recorder = MemoryRecorder()
        held = reachable(self.stage, self.engine, self.optimizer, self.buffers)
        recorder.begin(self.chunks, self.states(), held)
        return recorder

    def states(self) -> list[torch.Tensor]:
        """Return the storages of gradients in buckets, fp32 copies and moments."""
        held = [bucket.grad for bucket in self.engine.buckets]
        held += [b.storage for b in self.engine.buckets if b.storage is not None]
        for state in self.optimizer.states:
            held += state.tensors
        return held

    def state_bytes(self) -> tuple[int, int]:
        """Return the bytes of the model with its buffers, and of the optimizer's states.

        An fp32 parameter that is a view of its fp32 copy belongs to the model.
        """
        model = [tensor for chunk in self.chunks for tensor in unique(chunk.parameters())]
        buffers = [tensor for chunk in self.chunks for tensor in chunk.buffers()]
        storages = {
            each.untyped_storage()._cdata: each.untyped_storage().nbytes()
            for each in (*model, *self.states())
        }
        parameters = sum(tensor.nbytes for tensor in model)
        return (
            parameters + sum(buffer.nbytes for buffer in buffers),
            sum(storages.values()) - parameters,
        )

    def batch(self, index: int) -> Batch:
        """Return a microbatch of a task's shapes, numbered `index` in the global batch."""
        return dry_batch(self.config, index, self.device)

    def hidden(self) -> torch.Tensor:
        """Return a hidden state between two chunks, of zeros."""
        dtype = getattr(torch, self.config.precision.param_dtype)
        return torch.zeros(self.opened.message_shape(self.groups), dtype=dtype, device=self.device)

    def order(self) -> list[Operation]:
        """Return the passes of a step, of at most two microbatches for each chunk of the pipeline.

        Further microbatches repeat the memory of these.
        """
        training, stages = self.config.training, self.groups.pp.size
        assert training.global_batch_size is not None, "the configuration is resolved"
        microbatches = training.num_microbatches(training.global_batch_size, self.groups.dp.size)
        chunks = len(self.stage.chunks)
        enough = min(microbatches, 2 * stages * chunks)
        enough = -(-enough // stages) * stages if chunks > 1 else enough
        return list(interleaved(self.groups.pp.rank, stages, chunks, enough))

    def forward(self, operation: Operation, batch: Batch) -> None:
        """Run the forward pass of a chunk on zeros."""
        begins = self.stage.chunks[operation.chunk].begins
        hidden = None if begins else self.hidden()
        self.stage.forward(0, batch, hidden, chunk=operation.chunk)

    def backward(self, operation: Operation) -> None:
        """Run the backward pass of a chunk on a gradient of zeros."""
        ends = self.groups.pp.rank == self.groups.pp.size - 1
        ends = ends and operation.chunk == len(self.stage.chunks) - 1
        gradient = 1.0 if ends else self.hidden()
        self.stage.backward(operation.microbatch, gradient, chunk=operation.chunk)

    def step(self, recorder: MemoryRecorder | None = None) -> None:
        """Run one training step: passes, reduction, update."""

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            if recorder is None:
                yield
                return
            with recorder.phase(name):
                yield

        with recorder or nullcontext():
            self._step(phase)

    def _step(self, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        order = self.order()
        batches = {each.microbatch: self.batch(each.microbatch) for each in order}
        last = {each.chunk: each.microbatch for each in order if each.kind is Kind.BACKWARD}
        self.engine.begin(StepContext(t=self.optimizer.applied + 1))
        for operation in order:
            if operation.kind is Kind.FORWARD:
                with phase("forward"):
                    self.forward(operation, batches[operation.microbatch])
                continue
            if last[operation.chunk] == operation.microbatch:
                self.engine.expect_last_backward(self.stage.names(operation.chunk))
            with phase("backward"):
                self.backward(operation)
        self.optimizer.finish_param_gather()
        with phase("update"):
            clip = self.config.optimizer.clip_grad
            step = self.engine.finish(tag=1, clip_norm=clip)
            self.optimizer.step(step, lr=1e-3, weight_decay=0.0)
            self.engine.commit(step)
            self.buffers.commit()

    def stored(self) -> SavedActivations:
        """Return what the forward pass of one microbatch stores for backward, by layer."""
        batch = self.batch(0)
        known = [*reachable(self.stage, self.engine, self.optimizer)]
        known += [each for each in vars(batch).values() if _is_whole_numbers(each)]
        saved = SavedActivations(self.chunks, known, layer_of)
        for chunk in range(len(self.stage.chunks)):
            with saved.watch():
                self.forward(Operation(Kind.FORWARD, 0, chunk), batch)
        for chunk in reversed(range(len(self.stage.chunks))):
            self.engine.begin(StepContext(t=1))
            self.backward(Operation(Kind.BACKWARD, 0, chunk))
        return saved

    def flops(self) -> PassFlops:
        """Count the products of one microbatch through all chunks of this rank."""
        counts = PassFlops(0, 0)
        for chunk in range(len(self.stage.chunks)):
            operation = Operation(Kind.FORWARD, 0, chunk)
            self.engine.begin(StepContext(t=1))
            with count_flops() as counter:
                self.forward(operation, self.batch(0))
            forward = _total(counter)
            with count_flops() as counter:
                self.backward(operation)
            counts = PassFlops(counts.forward + forward, counts.backward + _total(counter))
        return counts


@dataclass(frozen=True)
class DryTranslation:
    """The translation task without its data, for a profile: dictionaries of these sizes."""

    config: TranslationConfig
    source_size: int
    target_size: int

    @property
    def summary(self) -> str:
        """The model in a few words."""
        count = parameter_count(self.config.model, **self._sizes)
        return f"DC-Transformer, {count:,} parameters"

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of forward and backward of the profile's microbatch."""
        pairs, length = translation_batch(self.config)
        return training_flops(
            self.config.model,
            pairs=pairs,
            source=length,
            target=length,
            target_size=self.target_size,
        )

    def identity(self) -> dict[str, Any]:
        """Return nothing: no checkpoint is read."""
        return {}

    def chunks(self, groups: ProcessGroups, device: torch.device) -> list[Any]:
        """Build the model."""
        return [build_model(self.config, self._sizes, device)]

    def message_shape(self, groups: ProcessGroups) -> tuple[int, ...]:
        """Return one axis: there is one chunk, which hands nothing on."""
        return (1,)

    @property
    def _sizes(self) -> dict[str, int]:
        return {"source_size": self.source_size, "target_size": self.target_size}


@dataclass(frozen=True)
class PassFlops:
    """FLOPs of the products of one microbatch; those of recomputation are among `backward`."""

    forward: int
    backward: int


def _is_whole_numbers(each: object) -> bool:
    return isinstance(each, torch.Tensor) and not each.is_floating_point()


def _total(counter: FlopCounterMode) -> int:
    return counter.get_total_flops()


class _AtOnce(Executor):
    """Runs work when it is submitted.

    Threads may not share fake tensors, and no other rank has to be waited for.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class _ZeroScalars(TorchDispatchMode):
    """Answers 0 where the host reads a number of a fake tensor, which has none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 0.0 if dtype.is_floating_point else False if dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors of shapes alone inside the context."""
    with warnings.catch_warnings(), FakeTensorMode(), _ZeroScalars():
        # The layout asks whether a parameter is a view already; it binds the same either way.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def check_tracked(config: Config) -> None:
    """Check that a step needs neither values, which fake tensors do not have, nor other threads.

    Raises:
        ConfigError: The gradient path, its wire or the optimizer needs them.
    """
    _refuse(
        config,
        path="chooses entries by value, which fake tensors do not have; only {} is tracked",
        wire="means are encoded in a thread of their own and not tracked",
        offload="updates run in threads of their own and are not tracked",
    )


def check_measured(config: Config) -> None:
    """Check that `DryRank.states` has all states of the rank, and none in another memory.

    Raises:
        ConfigError: The gradient path, its wire or the optimizer keeps other states.
    """
    _refuse(
        config,
        path="keeps masks or residuals, which are not measured; only {} is",
        wire="means are not encoded by the ranks of a profile",
        offload="fp32 copies and moments are in the host's memory, which is not measured apart "
        "from the model's",
    )


def _refuse(config: Config, *, path: str, wire: str, offload: str) -> None:
    """Raise `ConfigError` with the reason for the first setting that a profile cannot follow."""
    name = config.gradient.grad_path
    if name not in DRY_PATHS:
        raise ConfigError(f"grad_path: {name} {path.format(', '.join(DRY_PATHS))}")
    if config.gradient.grad_wire is not None:
        raise ConfigError(f"grad_wire: {wire}")
    if config.offload.optimizer_cpu_offload:
        raise ConfigError(f"optimizer_cpu_offload: {offload}")


def dry_batch(config: Config, index: int, device: torch.device) -> Batch:
    """Return a microbatch of a task's shapes, all tokens and pixels equal.

    Raises:
        ConfigError: The task has no such batch here.
    """
    size = config.training.micro_batch_size
    if isinstance(config, GPTConfig):
        from megatron.data.data_loader import DeviceMicrobatch

        ids = torch.zeros(size, config.model.seq_length, dtype=torch.int64, device=device)
        data, documents = config.data, None
        if data.reset_attention_mask:
            documents = Documents.of(np.zeros(ids.shape, np.int64), device)
        return DeviceMicrobatch(
            index=index,
            tokens=ids,
            labels=torch.zeros_like(ids),
            loss_mask=torch.zeros_like(ids, dtype=torch.float32) if data.eod_mask_loss else None,
            position_ids=torch.zeros_like(ids) if data.reset_position_ids else None,
            documents=documents,
            counted=ids.numel(),
        )
    if isinstance(config, VisionConfig):
        from megatron.data.image_reader import ImageBatch

        model = config.model
        return ImageBatch(
            images=torch.zeros(size, 3, model.img_h, model.img_w, device=device),
            labels=torch.zeros(size, dtype=torch.int64, device=device),
            index=index,
            counted=size,
        )
    if isinstance(config, TranslationConfig):
        from megatron.data.pair_reader import PairBatch

        shape = translation_batch(config)
        # No token is padding, whose id is not 0 everywhere.
        source, inputs, targets = (
            torch.full(shape, WORD, dtype=torch.int64, device=device) for _ in range(3)
        )
        return PairBatch(
            source=source, inputs=inputs, targets=targets, index=index, counted=targets.numel()
        )
    raise ConfigError(f"task: {config.task} has no batch to profile with")
