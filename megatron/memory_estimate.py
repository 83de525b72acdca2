"""Bytes that a rank will hold, computed from the configuration. Loads no torch.

The planner prints these figures before a run starts; tests hold them against the tensors of real
ranks. Gradient paths add the bytes of their own state (`GradientPath.plan_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron.config import GPTConfig, ModelConfig
from megatron.data_parallel.bucket_plan import (
    BYTES,
    ParamShape,
    RankShapes,
    plan_buckets,
    shard_length,
)
from megatron.data_parallel.gradient_path import GradientPath
from megatron.low_memory.checkpoint_interval import recompute_spans, recomputes_attention
from megatron.model.flops import is_of_heads
from megatron.optimizer.chunks import CPU_CHUNK, CUDA_CHUNK, SETS, offload_piece
from megatron.parallel.dims import ParallelDims
from megatron.parallel.tensor_shard import TensorShard, padded_rows
from megatron.pipeline.schedule import POSTED, Kind, Operation, StagePosition, interleaved, warm_up

# ---- parameters of each rank ---------------------------------------------------------------------
#
# What each rank of a grid holds: the parameters of `model.GPT`, by logical name, without a model.
#
# A test holds these against the `ParamInfo`s and the buckets of real ranks.


WORD_TABLE = "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """A configuration on a number of ranks.

    `vocabulary`: entries, before padding; `cap`: entries of a gradient bucket; `device`: "cpu" or
    "cuda"; `cuda_aware_mpi`: whether MPI reads and writes a GPU's memory itself.
    """

    config: GPTConfig
    dims: ParallelDims
    path: GradientPath
    vocabulary: int
    cap: int
    device: str
    cuda_aware_mpi: bool = False

    @cached_property
    def split(self) -> list[list[range]]:
        """Return the runs of layers of each stage."""
        return self.config.parallel.layer_split(self.config.model.num_layers)

    def holds_embedding(self, stage: int, chunk: int = 0) -> bool:
        """Return whether a stage's chunk begins the model."""
        return stage == 0 and chunk == 0

    def holds_head(self, stage: int, chunk: int | None = None) -> bool:
        """Return whether a stage (None), or one of its chunks, ends the model."""
        last = len(self.split[stage]) - 1
        return stage == self.dims.pp - 1 and chunk in (None, last)

    def rank(
        self, stage: int = 0, tp_rank: int = 0, *, stored: Mapping[str, int] | None = None
    ) -> RankShapes:
        """Return the shapes that the ranks at this place of the grid hold.

        `stored`: entries here of each parameter that is stored in part (None: as many as the path
        will store, spread evenly).
        """
        params = {param.name: param for param in self._params(stage, tp_rank)}
        total = self.path.stored(self.config, params.values())
        if stored is None:
            stored = {name: params[name].share(count) for name, count in total.items()}
        dtype = self.config.precision.param_dtype
        entries = [p.entry(stored.get(p.name, p.numel), dtype) for p in params.values()]
        return RankShapes(
            params=params,
            buckets=plan_buckets(reversed(entries), cap=self.cap),
            ranks=self.dims.dp,
            tp=self.dims.tp,
            device=self.device,
            stored=total,
        )

    def shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Logical shapes of the parameters of a stage, by name."""
        return {param.name: param.logical_shape for param in self._params(stage, 0)}

    def _params(self, stage: int, tp_rank: int) -> Iterator[ParamShape]:
        """Yield the parameters in the order of `named_parameters`."""
        for chunk, layers in enumerate(self.split[stage]):
            yield from self._chunk(
                layers,
                tp_rank,
                has_embedding=self.holds_embedding(stage, chunk),
                has_head=self.holds_head(stage, chunk),
            )

    def _chunk(
        self, layers: Sequence[int], tp_rank: int, *, has_embedding: bool, has_head: bool
    ) -> Iterator[ParamShape]:
        model, cut = self.config.model, _Sharder(self, tp_rank)
        if has_embedding:
            yield cut.table(WORD_TABLE, tied=model.tied)
            if model.position_embedding_type == "learned_absolute":
                name = "embedding.position_embeddings.weight"
                yield cut.whole(name, (model.positions, model.hidden_size))
        for layer in layers:
            yield from _layer(model, cut, f"layers.{layer}")
        if has_head:
            yield from _norm(model, cut, "final_norm", model.hidden_size)
            if not model.tied:
                yield cut.table("output_layer.weight", tied=False)
            elif not has_embedding:
                yield cut.table(WORD_TABLE, tied=True)


def logical_shapes(
    config: GPTConfig, path: GradientPath, *, vocabulary: int
) -> dict[str, tuple[int, ...]]:
    """The whole model's parameters by logical name, however they are cut and padded."""
    dims = ParallelDims(tp=1, dp=1, pp=config.parallel.pipeline_model_parallel_size)
    # Shapes do not depend on the buckets or the device.
    grid = RankGrid(config=config, dims=dims, path=path, vocabulary=vocabulary, cap=1, device="cpu")
    return {name: shape for stage in range(dims.pp) for name, shape in grid.shapes(stage).items()}


@dataclass(frozen=True)
class _Sharder:
    """Makes parameters of what a tensor-parallel rank holds of a tensor."""

    grid: RankGrid
    rank: int

    def whole(self, name: str, shape: tuple[int, ...]) -> ParamShape:
        is_partial = self.grid.config.parallel.sequence_parallel or is_of_heads(name)
        partial = is_partial and self.grid.dims.tp > 1
        return ParamShape(name=name, logical_shape=shape, rows=shape[0], partial=partial)

    def part(
        self, name: str, shape: tuple[int, ...], *, axis: int = 0, blocks: int = 1
    ) -> ParamShape:
        ranks = self.grid.dims.tp
        if ranks == 1:
            return ParamShape(name=name, logical_shape=shape, rows=shape[0])
        shard = TensorShard.evenly(shape, axis=axis, rank=self.rank, ranks=ranks, blocks=blocks)
        return ParamShape(name=name, logical_shape=shape, rows=shard.local_shape[0], tp_shard=shard)

    def table(self, name: str, *, tied: bool) -> ParamShape:
        model, ranks = self.grid.config.model, self.grid.dims.tp
        length = self.grid.vocabulary
        shape = (length, model.hidden_size)
        shard = (
            TensorShard.evenly(shape, axis=0, rank=self.rank, ranks=ranks) if ranks > 1 else None
        )
        rows = padded_rows(
            length, rank=self.rank, ranks=ranks, multiple=model.make_vocab_size_divisible_by
        )
        return ParamShape(name=name, logical_shape=shape, rows=rows, tp_shard=shard, tied=tied)


def _layer(model: ModelConfig, cut: _Sharder, name: str) -> Iterator[ParamShape]:
    hidden, inner = model.hidden_size, model.num_attention_heads * model.head_dim
    mixed = inner + 2 * model.query_groups * model.head_dim
    blocks = 2 if model.swiglu else 1
    yield from _norm(model, cut, f"{name}.input_norm", model.hidden_size)
    yield from _columns(model, cut, f"{name}.attention.query_key_value", (mixed, hidden))
    if model.qk_layernorm:
        yield from _norm(model, cut, f"{name}.attention.q_layernorm", model.head_dim)
        yield from _norm(model, cut, f"{name}.attention.k_layernorm", model.head_dim)
    yield from _rows(model, cut, f"{name}.attention.dense", (hidden, inner))
    yield from _norm(model, cut, f"{name}.post_attention_norm", model.hidden_size)
    up = (blocks * model.ffn_size, hidden)
    yield from _columns(model, cut, f"{name}.mlp.dense_h_to_4h", up, blocks=blocks)
    yield from _rows(model, cut, f"{name}.mlp.dense_4h_to_h", (hidden, model.ffn_size))


def _norm(model: ModelConfig, cut: _Sharder, name: str, size: int) -> Iterator[ParamShape]:
    yield cut.whole(f"{name}.weight", (size,))
    if model.normalization == "LayerNorm":
        yield cut.whole(f"{name}.bias", (size,))


def _columns(
    model: ModelConfig, cut: _Sharder, name: str, shape: tuple[int, int], *, blocks: int = 1
) -> Iterator[ParamShape]:
    yield cut.part(f"{name}.weight", shape, blocks=blocks)
    if model.bias:
        yield cut.part(f"{name}.bias", shape[:1], blocks=blocks)


def _rows(
    model: ModelConfig, cut: _Sharder, name: str, shape: tuple[int, int]
) -> Iterator[ParamShape]:
    yield cut.part(f"{name}.weight", shape, axis=1)
    if model.bias:
        yield cut.whole(f"{name}.bias", shape[:1])


# ---- messages between pipeline stages ------------------------------------------------------------
#
# Bytes of messages between pipeline stages on a rank: receives that are posted ahead, and sends
# that are not known to be done.
#
# 1F1B, `GroupTransport`: `POSTED` receives of either kind; each outgoing edge keeps what it sent
# last, on a CPU, whose gloo does not tell that a send is done, all that was not answered.
#
# Message-driven, `MPITransport`: `POSTED` receives of each kind; of sends those that nobody posted
# a receive for. All microbatches on their way are among the `limit` in flight and `POSTED` of them
# have a receive, so that no more than the rest wait: those in front of a stage that is slower than
# others, as the last one with the output layer mostly is. On a GPU whose MPI does not know CUDA
# they wait in pinned host memory, of which torch takes powers of two, and so do receives; on the
# device are copies of what has landed, and of what is about to leave.


@dataclass(frozen=True)
class MessageBytes:
    """Bytes of pipeline messages on the device and in pinned memory of the host."""

    device: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class MessageCounts:
    """Messages at a time: receives that are `posted`, sends that are `kept` until they are done."""

    posted: int
    kept: int


def message_counts(grid: RankGrid, stage: int, microbatches: int, in_flight: int) -> MessageCounts:
    """The most of a rank of this stage in a step of so many microbatches.

    `in_flight`: chunk inputs that it holds at most.
    """
    parallel, stages, chunks = grid.config.parallel, grid.dims.pp, len(grid.split[stage])
    place = StagePosition(stage=stage, stages=stages, chunks=chunks)
    passes = [Operation(kind, 0, chunk) for chunk in range(chunks) for kind in Kind]
    comes = [each.kind for p in passes if (each := place.needs(p)) is not None]
    goes = [each.kind for p in passes if (each := place.makes(p)) is not None]
    if parallel.pipeline_schedule == "message-driven":
        limit = min(parallel.pipeline_limit or stages, microbatches)
        posted = min(POSTED, microbatches) * len(comes)
        return MessageCounts(posted, max(limit - POSTED, len(goes)))
    posted = min(POSTED, microbatches * len(comes))
    if grid.device == "cuda":
        return MessageCounts(posted, len(set(goes)))
    most = max(warm_up(0, stages, chunks, microbatches) + 1, stages)
    forwards, backwards = (microbatches * goes.count(kind) for kind in Kind)
    return MessageCounts(posted, min(forwards, in_flight) + min(backwards, most))


def message_bytes(
    grid: RankGrid, stage: int, size: int, *, microbatches: int, in_flight: int
) -> MessageBytes:
    """Return the bytes of pipeline messages that a rank holds, from the bytes of one message."""
    if grid.dims.pp == 1:
        return MessageBytes()
    counts = message_counts(grid, stage, microbatches, in_flight)
    driven = grid.config.parallel.pipeline_schedule == "message-driven"
    if not driven or grid.device == "cpu" or grid.cuda_aware_mpi:
        return MessageBytes(size * (counts.posted + counts.kept))
    leaving = 1 + (0 < stage < grid.dims.pp - 1)
    return MessageBytes(
        device=size * (counts.posted + leaving),
        pinned=_power_of_two(size) * (counts.posted + counts.kept),
    )


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


# ---- model state and path state ------------------------------------------------------------------
#
# Bytes of model and path state on a rank, by kind, as they lie in memory.


CHUNK = {"cpu": CPU_CHUNK, "cuda": CUDA_CHUNK}
"""Entries that the optimizer takes at a time at most."""


@dataclass(frozen=True)
class StateBytes:
    """`kept` from step to step, `passing` while a step is under way, on the device.

    On the `host` where the optimizer is offloaded.
    """

    kept: Mapping[str, int]
    passing: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def total(self) -> int:
        """Return the bytes on the device."""
        return sum(self.kept.values()) + sum(self.passing.values())


def state_bytes(grid: RankGrid, rank: RankShapes) -> StateBytes:
    """Model state and the gradient path's of a rank."""
    config = grid.config
    own = grid.path.plan_bytes(config, rank)
    grad, param = BYTES[config.precision.grad_dtype], BYTES[config.precision.param_dtype]
    moments = config.optimizer.num_moments
    sharded = config.parallel.use_distributed_optimizer and rank.ranks > 1
    shards = [
        shard_length(bucket.numel, rank.ranks) if sharded else bucket.numel
        for bucket in rank.buckets
    ]
    held = sum(bucket.numel for bucket in rank.buckets)
    kept = {
        "parameters": _parameters(rank, param, views=param == 4 and not sharded),
        "gradients": grad * (rank.ranks * sum(shards) if sharded else held),
    }
    states = {"master": 4 * sum(shards), "moments": 4 * moments * sum(shards)}
    chunk, host = CHUNK[rank.device], dict[str, int]()
    if config.offload.optimizer_cpu_offload:
        chunk = min(chunk, offload_piece(config.offload.offload_bucket_size))
        host = states
        states = {"offload buckets": SETS * 4 * (1 + moments) * min(chunk, max(shards))}
    scratch = {"scratch": 4 * min(chunk, max(shards))}
    return StateBytes(kept | states | dict(own.kept) | scratch, own.passing, host)


def _parameters(rank: RankShapes, each: int, *, views: bool) -> int:
    """`views`: parameters that are stored whole are views of their master weights."""
    return sum(
        each * param.numel
        for name, param in rank.params.items()
        if not (views and name not in rank.stored)
    )


# ---- activations ---------------------------------------------------------------------------------
#
# Bytes of activations on a rank: what autograd saves of our model, how much of it recomputation
# leaves, and for how many microbatches at a time.
#
# Counted as storages: a view costs nothing, and what two operations save is there once. The output
# of a layer belongs to who saves it, the norm behind it. Tests hold this against the saved tensors
# of real forward passes. Shapes: rows = b s tokens of a microbatch; t tensor-parallel ranks; u = t
# where these cut the sequence between layers, else 1; w bytes of an activation.


class ChunkBytes(NamedTuple):
    """Bytes of one microbatch in a chunk of a stage.

    `saved` until its backward, and `again`, the most that recomputation makes at a time.
    """

    saved: int
    again: int


@dataclass(frozen=True)
class ActivationBytes:
    """Most that a rank holds at a time.

    Of microbatches in flight, of recomputation, of messages between stages, and of gradients on
    their way through a layer. `pinned`: of messages, in host memory.
    """

    saved: int
    again: int
    messages: int
    gradients: int
    in_flight: int
    pinned: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """Return the bytes of each kind of state."""
        return {
            "activations": self.saved,
            "recomputed": self.again,
            "stage messages": self.messages,
            "of backward": self.gradients,
        }

    @property
    def total(self) -> int:
        """Return the bytes of all kinds together."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Activations:
    """Sizes of one microbatch's activations in a grid."""

    grid: RankGrid

    @cached_property
    def _rows(self) -> int:
        config = self.grid.config
        return config.training.micro_batch_size * config.model.seq_length

    @cached_property
    def _between(self) -> int:
        """Rows between layers."""
        config, tp = self.grid.config, self.grid.dims.tp
        return self._rows // (tp if config.parallel.sequence_parallel else 1)

    @cached_property
    def _cuts_sequence(self) -> bool:
        return self.grid.config.parallel.sequence_parallel and self.grid.dims.tp > 1

    @cached_property
    def _width(self) -> int:
        return BYTES[self.grid.config.precision.param_dtype]

    @property
    def hidden(self) -> int:
        """Return the bytes of a hidden state between layers, also a message between stages."""
        return self._between * self.grid.config.model.hidden_size * self._width

    @cached_property
    def norm(self) -> int:
        """Input, statistics and output of a norm."""
        model, width = self.grid.config.model, self._width
        on_cpu, entries = self.grid.device == "cpu", self._between * model.hidden_size
        if model.normalization == "LayerNorm":
            statistics = 2 * (width if on_cpu else 4)
            return 2 * self.hidden + statistics * self._between
        # A CPU has no kernel for it: input and quotient are fp32 tensors of their own.
        inner = 8 * entries if on_cpu else self.hidden
        return inner + 4 * self._between + self.hidden

    @cached_property
    def attention(self) -> int:
        """The bytes from the first projection's output to the second one's input, inclusive."""
        config, rows, width = self.grid.config, self._rows, self._width
        model, tp = config.model, self.grid.dims.tp
        inner = model.num_attention_heads * model.head_dim // tp
        keys = model.query_groups * model.head_dim // tp
        mixed, context = inner + 2 * keys, width * rows * inner
        if recomputes_attention(config.recompute):
            return width * rows * mixed + context
        if self._scores:
            return self._scores + context + self._head_norms(keeps_mixed=False)
        heads, length = model.num_attention_heads // tp, model.seq_length
        pairs = config.training.micro_batch_size * length * length
        masked = width * pairs if config.data.reset_attention_mask else 0
        if self.grid.device == "cpu" and model.attention_dropout:
            # No kernel: weights, noise and their product are there whole, all in fp32.
            weights = 4 * (3 * heads * pairs + 3 * rows * inner)
            return weights + context + self._head_norms(keeps_mixed=False)
        if self._blocks_attention:
            return width * rows * mixed + context + self._head_norms(keeps_mixed=False)
        copied = inner if model.query_groups < model.num_attention_heads else 0
        if model.position_embedding_type == "rope" or model.qk_layernorm:
            copied = inner + keys
        by_rank = self._cuts_sequence and config.training.micro_batch_size > 1
        return (
            width * rows * (mixed + copied)
            + 4 * rows * heads
            + context * (2 if by_rank else 1)
            + masked
            + self._head_norms(keeps_mixed=True)
        )

    def _head_norms(self, *, keeps_mixed: bool) -> int:
        """Return the bytes that the norms of queries and keys save beside their outputs.

        `keeps_mixed`: attention itself saves the first projection's output, of which their inputs
        are views.
        """
        model, tp, width = self.grid.config.model, self.grid.dims.tp, self._width
        if not model.qk_layernorm:
            return 0
        heads, groups = model.num_attention_heads // tp, model.query_groups // tp
        vectors = self._rows * (heads + groups)
        on_cpu = self.grid.device == "cpu"
        statistics = 4 * vectors
        quotients = inputs = 0
        if model.normalization == "LayerNorm":
            statistics = 2 * (width if on_cpu else 4) * vectors
        elif on_cpu:
            quotients = 4 * vectors * model.head_dim
        if on_cpu and width == 2 and model.normalization == "RMSNorm":
            inputs = 4 * vectors * model.head_dim  # widened
        else:
            # The queries of a group lie apart from those of the next one: a copy of them.
            copies = heads if 1 < groups < heads else 0
            inputs = width * self._rows * copies * model.head_dim
            if not keeps_mixed:
                inputs += width * self._rows * (heads + 2 * groups) * model.head_dim
        return statistics + quotients + inputs

    @property
    def _blocks_attention(self) -> bool:
        """Return whether `model.blocked_attention` serves, on every CPU alike."""
        dropout = self.grid.config.model.attention_dropout
        return self.grid.device == "cpu" and self._width == 2 and not dropout

    @property
    def mask(self) -> int:
        """Return the bytes of the documents' mask, where attention keeps the mask itself."""
        config = self.grid.config
        keeps = self._blocks_attention or config.recompute.recompute_granularity is not None
        if not (config.data.reset_attention_mask and keeps):
            return 0
        return config.training.micro_batch_size * config.model.seq_length**2

    @cached_property
    def _scores(self) -> int:
        """Return the bytes that attention with scores keeps on CUDA, 0 with a fused kernel.

        These are, in fp32, its inputs, with a copy of keys and values for each head, and the
        weights; with dropout also the remaining weights and a byte of mask each.

        In fp32 its inputs, of keys and values a copy for each head, and the weights; with dropout
        also the weights that are left, and a byte that says which these are.
        """
        config, model, tp = self.grid.config, self.grid.config.model, self.grid.dims.tp
        if self.grid.device == "cpu" or not config.masks_grouped_queries:
            return 0
        heads = model.num_attention_heads // tp
        weights = (9 if model.attention_dropout else 4) * heads * self._rows * model.seq_length
        return weights + 4 * 3 * self._rows * heads * model.head_dim

    @cached_property
    def mlp(self) -> int:
        """The bytes from the first projection's output to the second one's input, inclusive."""
        model = self.grid.config.model
        columns = model.ffn_size // self.grid.dims.tp
        return self._width * self._rows * columns * (4 if model.swiglu else 2)

    @cached_property
    def dropout(self) -> int:
        """Return the bytes that one dropout of hidden states saves: a mask, on a CPU a factor."""
        model = self.grid.config.model
        each = self._width if self.grid.device == "cpu" else 1
        return each * self._between * model.hidden_size if model.hidden_dropout else 0

    @property
    def layer(self) -> int:
        """Return the bytes that one layer saves, its input included and its output not."""
        return 2 * self.norm + self.attention + self.mlp + 2 * self.dropout

    @property
    def embedding(self) -> int:
        """Return the bytes that the embedding saves beside the batch, which exists anyway."""
        return self.dropout + (8 * self._rows if self.grid.dims.tp > 1 else 0)

    @property
    def head(self) -> int:
        """Final norm, logits and what the loss knows of each token."""
        tp = self.grid.dims.tp
        each = 8 if tp == 1 else 17  # with ranks: its target here, and whether it is here
        return self.norm + self.logits + each * self._rows

    @property
    def logits(self) -> int:
        """Return the bytes of the first rank's logits; other ranks have at most as many."""
        multiple = self.grid.config.model.make_vocab_size_divisible_by
        columns = padded_rows(
            self.grid.vocabulary, rank=0, ranks=self.grid.dims.tp, multiple=multiple
        )
        return self._width * self._rows * columns

    def chunk(self, stage: int, chunk: int = 0) -> ChunkBytes:
        """Return the bytes of one chunk of a stage, with the ends of the model in the chunk."""
        saved = again = 0
        count = len(self.grid.split[stage][chunk])
        for span in recompute_spans(count, self.grid.config.recompute):
            layers = (span.stop - span.start) * self.layer
            saved += self.hidden if span.recomputed else layers
            # The span's input is saved already.
            again = max(again, layers - self.hidden if span.recomputed else 0)
        if recomputes_attention(self.grid.config.recompute):
            again = self._core
        saved += self.mask
        saved += self.embedding if self.grid.holds_embedding(stage, chunk) else 0
        saved += self.head if self.grid.holds_head(stage, chunk) else 0
        return ChunkBytes(saved, again)

    @property
    def _core(self) -> int:
        """Return about the bytes that attention recomputes.

        Rotated or copied projections and statistics.
        """
        model, tp = self.grid.config.model, self.grid.dims.tp
        inner = model.num_attention_heads * model.head_dim // tp
        heads = model.num_attention_heads // tp
        norms = self._head_norms(keeps_mixed=True)
        return norms + (self._scores or self._rows * (2 * self._width * inner + 4 * heads))

    def of_stage(self, stage: int) -> ActivationBytes:
        """The most that a rank of this stage holds at a time."""
        count = len(self.grid.split[stage])
        chunks = [self.chunk(stage, chunk) for chunk in range(count)]
        saved, in_flight = _peak([chunk.saved for chunk in chunks], self._order(stage))
        dims, model = self.grid.dims, self.grid.config.model
        messages = message_bytes(
            self.grid,
            stage,
            self.hidden,
            microbatches=microbatches_of(self.grid),
            in_flight=in_flight,
        )
        columns = model.ffn_size // dims.tp * (2 if model.swiglu else 1)
        backward = self._width * self._rows * (columns + model.hidden_size) + self.hidden
        if self._scores:  # the gradients of the weights and of the scores
            pairs = model.num_attention_heads // dims.tp * self._rows * model.seq_length
            backward = max(backward, 2 * 4 * pairs)
        return ActivationBytes(
            saved=saved,
            again=max(chunk.again for chunk in chunks),
            messages=messages.device,
            gradients=backward,
            in_flight=in_flight,
            pinned=messages.pinned,
        )

    def _order(self, stage: int) -> Iterable[Operation]:
        parallel, stages = self.grid.config.parallel, self.grid.dims.pp
        microbatches = microbatches_of(self.grid)
        chunks = len(self.grid.split[stage])
        if parallel.pipeline_schedule == "message-driven":
            return _driven(stage, stages, microbatches, parallel.pipeline_limit or stages)
        # From there on a schedule repeats itself.
        enough = min(microbatches, 2 * stages * (chunks + 1))
        if chunks > 1:
            enough = -(-enough // stages) * stages
        return interleaved(stage, stages, chunks, enough)


def microbatches_of(grid: RankGrid) -> int:
    """Return the microbatches of one pipeline in a step of the whole global batch."""
    training = grid.config.training
    assert training.global_batch_size is not None, "the configuration is resolved"
    return training.num_microbatches(training.global_batch_size, grid.dims.dp)


def _driven(stage: int, stages: int, microbatches: int, limit: int) -> Iterator[Operation]:
    """The most that a message-driven stage can have in flight.

    The last one runs backward at once.
    """
    held = 1 if stage == stages - 1 else min(limit, microbatches)
    yield from (Operation(Kind.FORWARD, number) for number in range(held))


def _peak(sizes: list[int], order: Iterable[Operation]) -> tuple[int, int]:
    """The most bytes, and the most chunk inputs, between forward and backward at a time."""
    held = most = count = most_count = 0
    for operation in order:
        sign = 1 if operation.kind is Kind.FORWARD else -1
        held += sign * sizes[operation.chunk]
        count += sign
        most, most_count = max(most, held), max(most_count, count)
    return most, most_count
