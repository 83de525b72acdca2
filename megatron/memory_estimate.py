"""Bytes that a rank will hold, computed from the configuration. Loads no torch.

The planner prints these figures before a run starts; tests hold them against the tensors of real
ranks. Gradient paths add the bytes of their own state (`GradientPath.plan_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

from megatron.config import Config, GPTConfig, ModelConfig
from megatron.data_parallel.bucket_plan import (
    BYTES,
    ParamShape,
    RankShapes,
    main_bytes,
    moment_bytes,
    plan_buckets,
    shard_length,
    slice_alignment,
)
from megatron.data_parallel.gradient_path import GradientPath
from megatron.low_memory.checkpoint_interval import (
    recompute_spans,
    recomputes_attention,
    runs_by_operators,
)
from megatron.model.flops import is_of_heads
from megatron.optimizer.chunks import CPU_CHUNK, CUDA_CHUNK, SETS, coded_chunk, offload_piece
from megatron.parallel.dims import ParallelDims
from megatron.parallel.tensor_shard import TensorShard, padded_rows
from megatron.pipeline.schedule import POSTED, Kind, Operation, StagePosition, interleaved, warm_up

# ---- parameters of each rank ---------------------------------------------------------------------


WORD_TABLE = "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """A configuration and the grid of ranks that runs it.

    Args:
        vocabulary: Entries of the vocabulary, before padding.
        cap: Maximum number of entries of a gradient bucket.
        device: "cpu" or "cuda".
        cuda_aware_mpi: Whether MPI reads and writes GPU memory directly.
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
        """Layers of each stage, one range per model chunk."""
        return self.config.parallel.layer_split(self.config.model.num_layers)

    def holds_embedding(self, stage: int, chunk: int = 0) -> bool:
        """Return whether a chunk of the stage begins with the embedding."""
        return stage == 0 and chunk == 0

    def holds_head(self, stage: int, chunk: int | None = None) -> bool:
        """Return whether a chunk of the stage, or any chunk (None), ends with the output layer."""
        last = len(self.split[stage]) - 1
        return stage == self.dims.pp - 1 and chunk in (None, last)

    def rank(
        self, stage: int = 0, tp_rank: int = 0, *, stored: Mapping[str, int] | None = None
    ) -> RankShapes:
        """Return the shapes that a rank at this position of the grid holds.

        `stored` has the number of stored entries of parameters that are stored in part; with None,
        the path's own number is spread evenly over the ranks.
        """
        params = {param.name: param for param in self._params(stage, tp_rank)}
        total = self.path.stored(self.config, params.values())
        if stored is None:
            stored = {name: params[name].share(count) for name, count in total.items()}
        dtype = self.config.precision.param_dtype
        entries = [p.entry(stored.get(p.name, p.numel), dtype) for p in params.values()]
        return RankShapes(
            params=params,
            buckets=plan_buckets(
                reversed(entries), cap=self.cap, alignment=slice_alignment(self.config)
            ),
            ranks=self.dims.dp,
            tp=self.dims.tp,
            device=self.device,
            stored=total,
        )

    def shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Return the logical shapes of a stage's parameters, by name."""
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
    """Return the logical shapes of the whole model's parameters, by name."""
    dims = ParallelDims(tp=1, dp=1, pp=config.parallel.pipeline_model_parallel_size)
    # Shapes do not depend on the buckets or the device.
    grid = RankGrid(config=config, dims=dims, path=path, vocabulary=vocabulary, cap=1, device="cpu")
    return {name: shape for stage in range(dims.pp) for name, shape in grid.shapes(stage).items()}


@dataclass(frozen=True)
class _Sharder:
    """Describes the part of each tensor that one tensor-parallel rank holds."""

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
        rows = padded_rows(length, ranks=ranks, multiple=model.make_vocab_size_divisible_by)
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
# 1F1B, `GroupTransport`: `POSTED` receives in each direction. Each outgoing edge keeps its last
# message; on a CPU it keeps all unanswered messages, since gloo does not report completed sends.
#
# Message-driven, `MPITransport`: `POSTED` receives in each direction, and the sends whose receive
# is not posted yet. At most `limit` microbatches are in flight and `POSTED` of them have a receive,
# so at most the others wait, in front of the slowest stage (usually the last one, which has the
# output layer). On a GPU whose MPI does not know CUDA, all these messages are in pinned host
# memory, which torch allocates in powers of two; the device has copies of messages that have just
# arrived or are about to leave.


@dataclass(frozen=True)
class MessageBytes:
    """The bytes of pipeline messages on the device and in pinned host memory."""

    device: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class MessageCounts:
    """Numbers of messages in memory: `posted` receives, and sends `kept` until they complete."""

    posted: int
    kept: int


def message_counts(grid: RankGrid, stage: int, microbatches: int, in_flight: int) -> MessageCounts:
    """Return the most messages that a rank of the stage holds in a step of `microbatches`.

    `in_flight` is the maximum number of chunk inputs that the stage holds.
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
    """Return the bytes of pipeline messages that a rank holds; one message has `size` bytes."""
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


CHUNK = {"cpu": CPU_CHUNK, "cuda": CUDA_CHUNK}
"""Maximum number of entries that the optimizer updates at a time."""


@dataclass(frozen=True)
class StateBytes:
    """The bytes of model state and path state on a rank, by kind.

    `kept` persists between steps, `passing` exists only during a step; both are on the device.
    `host` is in host memory, for an offloaded optimizer.
    """

    kept: Mapping[str, int]
    passing: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def total(self) -> int:
        """Total bytes on the device."""
        return sum(self.kept.values()) + sum(self.passing.values())


class StateSettings(Protocol):
    """The part of a `RankGrid` that `state_bytes` reads, which every task has."""

    @property
    def config(self) -> Config:
        """The configuration."""
        ...

    @property
    def path(self) -> GradientPath:
        """The gradient path."""
        ...


def state_bytes(grid: StateSettings, rank: RankShapes) -> StateBytes:
    """Return the bytes of a rank's model state and of its gradient path's state."""
    config = grid.config
    own = grid.path.plan_bytes(config, rank)
    grad, param = BYTES[config.precision.grad_dtype], BYTES[config.precision.param_dtype]
    num_shards = config.parallel.num_shards(rank.ranks)
    sharded, on_node = num_shards > 1, config.parallel.dp_inner_size > 1
    shards = [
        shard_length(bucket.numel, num_shards, slice_alignment(config)) if sharded else bucket.numel
        for bucket in rank.buckets
    ]
    lends = [not sharded or grid.path.lends_grad(config, bucket.kind) for bucket in rank.buckets]
    views = main_views(config, rank)
    kept = {
        "parameters": param * sum(rank.params[name].numel for name in rank.params.keys() - views),
        "gradients": grad
        * sum(
            num_shards * numel if sharded and (lent or on_node) else bucket.numel
            for bucket, numel, lent in zip(rank.buckets, shards, lends, strict=True)
        ),
    }
    states = {"master": 0, "moments": 0}
    for bucket, numel in zip(rank.buckets, shards, strict=True):
        matrix = bucket.kind.matrix
        states["master"] += main_bytes(config, numel, matrix=matrix)
        states["moments"] += moment_bytes(config, numel, matrix=matrix)
        if sharded and matrix and views & bucket.slices.keys():
            # The shards of all ranks are the parameters.
            states["master"] += param * numel * (num_shards - 1)
    chunk, host = CHUNK[rank.device], dict[str, int]()
    if config.offload.optimizer_cpu_offload:
        chunk = min(chunk, offload_piece(config.offload.offload_bucket_size))
        host = states
        states = {"offload buckets": _offload_buffers(config, rank, chunk)}
    longest = max(chunk, coded_chunk(chunk, rank.device)) if _has_coded(config, rank) else chunk
    scratch = {"scratch": 4 * min(longest, max(shards))}
    # Two buckets at a time gather updated values beside gradients that are still needed, or all of
    # them until the next forward.
    beside = [0] + [
        0 if lent else param * num_shards * numel for numel, lent in zip(shards, lends, strict=True)
    ]
    gathered = max(one + next_one for one, next_one in pairwise(beside))
    if config.parallel.overlap_param_gather:
        gathered = sum(beside)
    passing = dict(own.passing) | ({"gathered values": gathered} if gathered else {})
    return StateBytes(kept | states | dict(own.kept) | scratch, passing, host)


def main_views(config: Config, rank: RankShapes) -> set[str]:
    """Return the parameters that are views of the main parameters, which they are stored with."""
    whole = {name for name in rank.params if name not in rank.stored}
    if config.offload.optimizer_cpu_offload:
        return set()
    sharded = config.parallel.num_shards(rank.ranks) > 1
    if config.precision.param_dtype == "float32":
        return set() if sharded else whole
    if config.optimizer.main_params_dtype == "fp32":
        return set()
    views: set[str] = set()
    for bucket in rank.buckets:
        if bucket.kind.matrix and not (sharded and bucket.slices.keys() - whole):
            views |= bucket.slices.keys() & whole
    return views


def _has_coded(config: Config, rank: RankShapes) -> bool:
    """Return whether states of some bucket are not fp32."""
    options = config.optimizer
    is_coded = {options.main_params_dtype, *options.moment_dtypes} != {"fp32"}
    return is_coded and any(bucket.kind.matrix for bucket in rank.buckets)


def _offload_buffers(config: Config, rank: RankShapes, chunk: int) -> int:
    """Return the bytes of the device's buffers for pieces of offloaded states."""
    is_coded = _has_coded(config, rank)
    longest: dict[bool, int] = {}
    for bucket in rank.buckets:
        coded = is_coded and bucket.kind.matrix
        most = coded_chunk(chunk, rank.device) if coded else chunk
        longest[coded] = max(longest.get(coded, 0), min(most, bucket.numel))
    return SETS * sum(
        main_bytes(config, numel, matrix=coded) + moment_bytes(config, numel, matrix=coded)
        for coded, numel in longest.items()
    )


# ---- activations ---------------------------------------------------------------------------------
#
# Bytes that autograd saves, the part that recomputation drops, and the microbatches held at a time.
# Storages are counted: a view costs nothing, and a tensor that two operations save counts once. The
# output of a layer counts with the norm behind the layer, which saves it. Tests compare with the
# saved tensors of real forward passes. Shapes: rows = b s tokens of a microbatch; t tensor-parallel
# ranks; u = t where these shard the sequence between layers, else 1; w bytes of an activation.


class ChunkBytes(NamedTuple):
    """The activation bytes of one microbatch in a chunk of a stage.

    `saved` is kept until backward; `again` is the maximum that recomputation allocates at a time.
    """

    saved: int
    again: int


@dataclass(frozen=True)
class ActivationBytes:
    """The maximum bytes that a rank holds at a time, by kind.

    The kinds are activations of microbatches in flight, recomputation, messages between stages, and
    gradients inside a layer. `pinned` messages are in host memory.
    """

    saved: int
    again: int
    messages: int
    gradients: int
    in_flight: int
    pinned: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes on the device by kind."""
        return {
            "activations": self.saved,
            "recomputed": self.again,
            "stage messages": self.messages,
            "of backward": self.gradients,
        }

    @property
    def total(self) -> int:
        """Bytes on the device, of all kinds together."""
        return sum(self.kinds.values())


OPERATORS = 8
"""Operators of a transformer layer that `--recompute-granularity every` counts."""


@dataclass(frozen=True)
class Activations:
    """The sizes of one microbatch's activations in a grid."""

    grid: RankGrid

    @cached_property
    def _rows(self) -> int:
        config = self.grid.config
        return config.training.micro_batch_size * config.model.seq_length

    @cached_property
    def _between(self) -> int:
        """Rows of a hidden state between layers."""
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
        """Bytes of a hidden state between layers, which is also a message between stages."""
        return self._between * self.grid.config.model.hidden_size * self._width

    @cached_property
    def norm(self) -> int:
        """Bytes that a norm saves: input, statistics and output."""
        model, width = self.grid.config.model, self._width
        on_cpu, entries = self.grid.device == "cpu", self._between * model.hidden_size
        if model.normalization == "LayerNorm":
            statistics = 2 * (width if on_cpu else 4)
            return 2 * self.hidden + statistics * self._between
        # The CPU has no fused kernel: input and quotient are separate fp32 tensors.
        inner = 8 * entries if on_cpu else self.hidden
        return inner + 4 * self._between + self.hidden

    @cached_property
    def attention(self) -> int:
        """Bytes from the first projection's output to the second one's input, inclusive."""
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
        if self.grid.device == "cpu" and model.attention_dropout:
            # Without a kernel, weights, dropout noise and their product exist whole, in fp32.
            weights = 4 * (3 * heads * pairs + 3 * rows * inner)
            return weights + context + self._head_norms(keeps_mixed=False)
        if self._blocks_attention:
            return width * rows * mixed + context + self._head_norms(keeps_mixed=False)
        copied = inner if model.query_groups < model.num_attention_heads else 0
        if model.position_embedding_type == "rope" or model.qk_layernorm:
            copied = inner + keys
        by_rank = self._cuts_sequence and config.training.micro_batch_size > 1
        copies_context = by_rank or self._joins_documents
        return (
            width * rows * (mixed + copied)
            + 4 * rows * heads
            + context * (2 if copies_context else 1)
            + self._head_norms(keeps_mixed=True)
        )

    def _head_norms(self, *, keeps_mixed: bool) -> int:
        """Return the bytes that the norms of queries and keys save in addition to their outputs.

        `keeps_mixed`: attention itself saves the first projection's output, so the inputs of these
        norms, views of that output, cost nothing unless they are copied.
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
            # The queries of a group are not contiguous with those of the next group, so they are
            # copied.
            copies = heads if 1 < groups < heads else 0
            inputs = width * self._rows * copies * model.head_dim
            if not keeps_mixed:
                inputs += width * self._rows * (heads + 2 * groups) * model.head_dim
        return statistics + quotients + inputs

    @property
    def _blocks_attention(self) -> bool:
        """True if `model.blocked_attention` is used, which is the same on every CPU."""
        dropout = self.grid.config.model.attention_dropout
        return self.grid.device == "cpu" and self._width == 2 and not dropout

    @property
    def _joins_documents(self) -> bool:
        """True if the contexts of documents are computed one by one, and then copied together."""
        config = self.grid.config
        together = self.grid.device != "cpu" and config.attends_documents_together
        return config.data.reset_attention_mask and not together

    @cached_property
    def _scores(self) -> int:
        """Bytes that attention with a score matrix keeps on CUDA, 0 with a fused kernel.

        These are, in fp32, its inputs, with a copy of keys and values for each head, and the
        weights; with dropout also the remaining weights and a mask of one byte per weight.
        """
        config, model, tp = self.grid.config, self.grid.config.model, self.grid.dims.tp
        if self.grid.device == "cpu" or not config.groups_keep_scores:
            return 0
        heads = model.num_attention_heads // tp
        weights = (9 if model.attention_dropout else 4) * heads * self._rows * model.seq_length
        return weights + 4 * 3 * self._rows * heads * model.head_dim

    @cached_property
    def mlp(self) -> int:
        """Bytes from the first projection's output to the second one's input, inclusive."""
        model = self.grid.config.model
        columns = model.ffn_size // self.grid.dims.tp
        return self._width * self._rows * columns * (4 if model.swiglu else 2)

    @cached_property
    def dropout(self) -> int:
        """Bytes that one dropout of hidden states saves: a mask, on a CPU a factor."""
        model = self.grid.config.model
        each = self._width if self.grid.device == "cpu" else 1
        return each * self._between * model.hidden_size if model.hidden_dropout else 0

    @property
    def layer(self) -> int:
        """Bytes that one layer saves, including its input and excluding its output."""
        return 2 * self.norm + self.attention + self.mlp + 2 * self.dropout

    @property
    def embedding(self) -> int:
        """Bytes that the embedding saves in addition to the batch."""
        return self.dropout + (8 * self._rows if self.grid.dims.tp > 1 else 0)

    @property
    def head(self) -> int:
        """Bytes of the final norm, the logits and the loss's data for each token."""
        tp = self.grid.dims.tp
        # With tensor parallelism also the local target, and whether this rank has it.
        each = 8 if tp == 1 else 17
        no_norm = self.grid.config.recompute.recompute_granularity == "no-norm"
        norm = self.norm - (self._norm_output if no_norm else 0)
        return norm + self.logits + each * self._rows

    @property
    def logits(self) -> int:
        """Bytes of a rank's logits."""
        multiple = self.grid.config.model.make_vocab_size_divisible_by
        columns = padded_rows(self.grid.vocabulary, ranks=self.grid.dims.tp, multiple=multiple)
        return self._width * self._rows * columns

    @property
    def head_gradient(self) -> int:
        """Bytes of the gradient of the output layer's weights, before a bucket receives it."""
        return self.logits // self._rows * self.grid.config.model.hidden_size

    def chunk(self, stage: int, chunk: int = 0) -> ChunkBytes:
        """Return the bytes of one chunk of a stage, with the model's ends that are in it."""
        count = len(self.grid.split[stage][chunk])
        saved, again = sum(self.by_layer(count)), self._again(count)
        saved += self.embedding if self.grid.holds_embedding(stage, chunk) else 0
        saved += self.head if self.grid.holds_head(stage, chunk) else 0
        return ChunkBytes(saved, again)

    def by_layer(self, count: int) -> list[int]:
        """Return the bytes that each of `count` consecutive layers of a chunk saves."""
        recompute = self.grid.config.recompute
        length = recompute.recompute_num_layers or 1
        if not runs_by_operators(recompute):
            return [
                (self.hidden if index == span.start else 0) if span.recomputed else self.layer
                for span in recompute_spans(count, recompute)
                for index in range(span.start, span.stop)
            ]
        if recompute.recompute_granularity == "ops":
            return [self.hidden + self._products] * count
        if recompute.recompute_granularity == "no-norm":
            return [self.layer - 2 * self._norm_output] * count
        if recompute.recompute_granularity == "every":
            return self._between_runs(count, length)
        return [0 if index % length else self.hidden for index in range(count)]

    def _again(self, count: int) -> int:
        """Return the bytes that backward recomputes at a time."""
        recompute = self.grid.config.recompute
        length = min(recompute.recompute_num_layers or 1, count)
        granularity = recompute.recompute_granularity
        if recomputes_attention(recompute):
            return self._core
        if not runs_by_operators(recompute):
            # The input of the recomputed layers is saved already.
            spans = recompute_spans(count, recompute)
            longest = max((span.stop - span.start for span in spans if span.recomputed), default=0)
            return longest * self.layer - self.hidden if longest else 0
        if granularity == "ops":
            return max(self.layer - self.hidden - self._products, 0)
        if granularity == "no-norm":
            return self._norm_output
        if granularity == "every":
            layers = -(-(recompute.recompute_num_layers or 1) // OPERATORS)
            return min(layers, count) * self.layer - self.hidden
        if granularity == "residual":
            return length * self.layer - self.hidden
        star = self.layer - 2 * self._norm_output - self.hidden
        return (length - 1) * self.hidden + star + self._norm_output

    @property
    def _norm_output(self) -> int:
        """Bytes that a norm saves in addition to its input: its output and what it divides by."""
        return self.norm - self.hidden

    @cached_property
    def _columns(self) -> tuple[int, int, int, int]:
        """Bytes of four outputs: QKV projection, attention, first MLP projection, activation."""
        model, tp = self.grid.config.model, self.grid.dims.tp
        context = model.num_attention_heads * model.head_dim // tp
        mixed = context + 2 * model.query_groups * model.head_dim // tp
        inner = model.ffn_size // tp
        each = self._width * self._rows
        projected = inner * (2 if model.swiglu else 1)
        return each * mixed, each * context, each * projected, each * inner

    @property
    def _products(self) -> int:
        """Bytes of the results of a layer's products and attention."""
        model, tp = self.grid.config.model, self.grid.dims.tp
        mixed, context, projected, _ = self._columns
        heads = model.num_attention_heads // tp
        statistics = 4 * self._rows * heads
        if self._blocks_attention:
            statistics = 0
        elif self.grid.device == "cpu" and model.attention_dropout:
            # Without a kernel, attention is two products in fp32.
            context = 4 * context // self._width
            statistics = 4 * heads * self._rows * model.seq_length
        return mixed + context + statistics + projected + 2 * self.hidden

    def _between_runs(self, count: int, length: int) -> list[int]:
        """Return the bytes of what passes between runs of operators, by layer."""
        mixed, context, projected, inner = self._columns
        # The branch that each operator of a layer reads, beside the hidden state.
        branches = (0, self.hidden, mixed, context, 0, self.hidden, projected, inner)
        assert len(branches) == OPERATORS
        found = [0] * count
        for start in range(0, OPERATORS * count, length):
            layer, place = divmod(start, OPERATORS)
            found[layer] += branches[place]
            before = start - length
            # A hidden state is read by four operators and counts once.
            if before < 0 or before // 4 != start // 4:
                found[layer] += self.hidden
        return found

    @property
    def _core(self) -> int:
        """Estimated bytes that attention recomputes: rotated or copied projections, statistics."""
        model, tp = self.grid.config.model, self.grid.dims.tp
        inner = model.num_attention_heads * model.head_dim // tp
        heads = model.num_attention_heads // tp
        norms = self._head_norms(keeps_mixed=True)
        return norms + (self._scores or self._rows * (2 * self._width * inner + 4 * heads))

    def of_stage(self, stage: int) -> ActivationBytes:
        """Return the maximum that a rank of this stage holds at a time."""
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
        # Later microbatches repeat the same pattern.
        enough = min(microbatches, 2 * stages * (chunks + 1))
        if chunks > 1:
            enough = -(-enough // stages) * stages
        return interleaved(stage, stages, chunks, enough)


def microbatches_of(grid: RankGrid) -> int:
    """Return the number of microbatches of one pipeline in a step."""
    training = grid.config.training
    assert training.global_batch_size is not None, "the configuration is resolved"
    return training.num_microbatches(training.global_batch_size, grid.dims.dp)


def _driven(stage: int, stages: int, microbatches: int, limit: int) -> Iterator[Operation]:
    """Yield the order that lets a message-driven stage have the most microbatches in flight.

    The last stage runs the backward of each microbatch at once.
    """
    held = 1 if stage == stages - 1 else min(limit, microbatches)
    yield from (Operation(Kind.FORWARD, number) for number in range(held))


def _peak(sizes: list[int], order: Iterable[Operation]) -> tuple[int, int]:
    """Return the maximum bytes, and the maximum number of chunk inputs, held at a time."""
    held = most = count = most_count = 0
    for operation in order:
        sign = 1 if operation.kind is Kind.FORWARD else -1
        held += sign * sizes[operation.chunk]
        count += sign
        most, most_count = max(most, held), max(most_count, count)
    return most, most_count
