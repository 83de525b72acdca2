"""Bytes of activations on a rank: what autograd saves of our model, how much of it recomputation
leaves, and for how many microbatches at a time.

Counted as storages: a view costs nothing, and what two operations save is there once. The output of
a layer belongs to who saves it, the norm behind it. Tests hold this against the saved tensors of
real forward passes. Shapes: rows = b s tokens of a microbatch; t tensor-parallel ranks; u = t where
these cut the sequence between layers, else 1; w bytes of an activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.data_parallel.path import BYTES
from megatron.low_memory.spans import recompute_spans, recomputes_attention
from megatron.parallel.cut import padded_rows
from megatron.pipeline.schedule import Kind, Operation, interleaved
from megatron.planning.layout import Grid
from megatron.planning.messages import message_bytes


class ChunkBytes(NamedTuple):
    """Of one microbatch in a chunk of a stage: what is `saved` until its backward, and what of it
    is made `again`, at most at a time, while that runs."""

    saved: int
    again: int


@dataclass(frozen=True)
class ActivationBytes:
    """Most that a rank holds at a time: of microbatches in flight, of recomputation, of messages
    between stages, and of gradients on their way through a layer. `pinned`: of messages, in
    host memory."""

    saved: int
    again: int
    messages: int
    gradients: int
    in_flight: int
    pinned: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """By kind."""
        return {
            "activations": self.saved,
            "recomputed": self.again,
            "stage messages": self.messages,
            "of backward": self.gradients,
        }

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Activations:
    """Sizes of one microbatch's activations in a grid."""

    grid: Grid

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
        """Of a hidden state between layers, which is also a message between stages."""
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
        """From the first projection's output to the second one's input, both included."""
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
        """What the norms of queries and keys save beside their outputs. `keeps_mixed`: attention
        itself saves the first projection's output, of which their inputs are views."""
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
        """Whether `model.blocked_attention` serves, on every CPU alike."""
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
        """What attention with scores keeps on CUDA, 0 where a fused kernel serves: in fp32 its
        inputs, of keys and values a copy for each head, and the weights; with dropout also the
        weights that are left, and a byte that says which these are."""
        config, model, tp = self.grid.config, self.grid.config.model, self.grid.dims.tp
        if self.grid.device == "cpu" or not config.masks_grouped_queries:
            return 0
        heads = model.num_attention_heads // tp
        weights = (9 if model.attention_dropout else 4) * heads * self._rows * model.seq_length
        return weights + 4 * 3 * self._rows * heads * model.head_dim

    @cached_property
    def mlp(self) -> int:
        """From the first projection's output to the second one's input, both included."""
        model = self.grid.config.model
        columns = model.ffn_size // self.grid.dims.tp
        return self._width * self._rows * columns * (4 if model.swiglu else 2)

    @cached_property
    def dropout(self) -> int:
        """What one dropout of hidden states saves: which of them, or on a CPU by what factor."""
        model = self.grid.config.model
        each = self._width if self.grid.device == "cpu" else 1
        return each * self._between * model.hidden_size if model.hidden_dropout else 0

    @property
    def layer(self) -> int:
        """Of one layer, its input included and its output not."""
        return 2 * self.norm + self.attention + self.mlp + 2 * self.dropout

    @property
    def embedding(self) -> int:
        """Beside the batch, which is there anyway."""
        return self.dropout + (8 * self._rows if self.grid.dims.tp > 1 else 0)

    @property
    def head(self) -> int:
        """Final norm, logits and what the loss knows of each token."""
        tp = self.grid.dims.tp
        each = 8 if tp == 1 else 17  # with ranks: its target here, and whether it is here
        return self.norm + self.logits + each * self._rows

    @property
    def logits(self) -> int:
        """Of the first rank's share of the vocabulary, no other's being larger by more than one."""
        multiple = self.grid.config.model.make_vocab_size_divisible_by
        columns = padded_rows(
            self.grid.vocabulary, rank=0, ranks=self.grid.dims.tp, multiple=multiple
        )
        return self._width * self._rows * columns

    def chunk(self, stage: int, chunk: int = 0) -> ChunkBytes:
        """Of one of a stage's runs of layers, with the ends of the model that it has."""
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
        """Of what attention makes again, about: rotated or copied projections and statistics."""
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


def microbatches_of(grid: Grid) -> int:
    """Of one pipeline in a step of the whole global batch."""
    training = grid.config.training
    assert training.global_batch_size is not None, "the configuration is resolved"
    return training.num_microbatches(training.global_batch_size, grid.dims.dp)


def _driven(stage: int, stages: int, microbatches: int, limit: int) -> Iterator[Operation]:
    """The most that a message-driven stage can have in flight: the last one runs backward at
    once."""
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
