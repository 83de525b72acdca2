"""DC-Transformer: an encoder and a decoder whose layers mix positions by dynamic convolutions.

Wu et al. 2019, "Pay Less Attention with Lightweight and Dynamic Convolutions", in the shape of
fairseq's `lightconv_iwslt_de_en` without gated linear units, which Sohoni et al. 2019 train. Layers
normalize after each residual sum.

    encoder layer:  x + linear2(conv(linear1(x))), norm; x + fc2(relu(fc1(x))), norm
    decoder layer:  the same with a causal conv, and attention to the encoder before fc1

Shapes: b sentence pairs, s source positions, t target positions, c channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.data.dictionary import PAD
from megatron.data_parallel.bucket import ParamInfo
from megatron.low_memory.activation_checkpoint import (
    Block,
    Operator,
    recomputed,
    run_blocks,
)
from megatron.low_memory.checkpoint_interval import Span, recompute_spans, runs_by_operators
from megatron.model.chunk import ModelChunk, whole_parameters
from megatron.model.dynamic_convolution import DynamicConvolution, Matrix
from megatron.model.init import initial_values, set_parameter, uniform_values
from megatron.model.label_smoothing import smoothed_sums
from megatron.model.norm import LayerNorm
from megatron.tensor_parallel.products import multiply, widen
from megatron.tensor_parallel.rng import EMBEDDING_STREAM, DropoutStreams

if TYPE_CHECKING:
    from megatron.config import RecomputeConfig
    from megatron.data.pair_reader import PairBatch
    from megatron.tasks.translation_config import DCTransformerConfig

DECODER_EMBEDDING_STREAM = EMBEDDING_STREAM - 1
"""The layer number of the dropout of the decoder's embedding. Decoder layers follow the encoder's.
"""
_LONGEST_WAVE = 10000.0


class Linear(nn.Module):
    """A linear layer with a bias: [..., inputs] -> [..., outputs]."""

    def __init__(self, inputs: int, outputs: int, **placed: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **placed))
        self.bias = nn.Parameter(torch.empty(outputs, **placed))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [..., inputs] -> [..., outputs]."""
        return multiply(hidden, self.weight, self.bias)


class EncoderAttention(nn.Module):
    """Attention of target positions to the encoder's output."""

    def __init__(self, config: DCTransformerConfig, **placed: Any) -> None:
        super().__init__()
        size = config.embed_dim
        self.heads = config.attention_heads
        self.dropout = config.attention_dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            Linear(size, size, **placed) for _ in range(4)
        )

    def project(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [b, heads, s, c / heads] of the encoder's output [b, s, c]."""
        return self._by_head(self.k_proj(memory)), self._by_head(self.v_proj(memory))

    def forward(
        self,
        hidden: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """Attend: [b, t, c] -> [b, t, c]. `visible`: bool [b, 1, 1, s], False for padding."""
        return self.attend(self.q_proj(hidden), keys, values, visible)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """Attend with projected queries: [b, t, c] -> [b, t, c]."""
        context = F.scaled_dot_product_attention(
            widen(self._by_head(queries)),
            widen(keys),
            widen(values),
            attn_mask=visible,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out_proj(context.transpose(1, 2).flatten(2).to(queries.dtype))

    def _by_head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(2, (self.heads, -1)).transpose(1, 2)


class _Layer(nn.Module):
    """The parts that encoder and decoder layers share."""

    def __init__(
        self, config: DCTransformerConfig, kernel: int, *, causal: bool, **placed: Any
    ) -> None:
        super().__init__()
        size, epsilon = config.embed_dim, config.norm_epsilon
        self.dropout = config.dropout
        self.linear1 = Linear(size, size, **placed)
        self.conv = DynamicConvolution(
            size,
            heads=config.attention_heads,
            kernel_size=kernel,
            padding=kernel - 1 if causal else kernel // 2,
            weight_dropout=config.weight_dropout,
            **placed,
        )
        self.linear2 = Linear(size, size, **placed)
        self.conv_layer_norm = LayerNorm(size, epsilon=epsilon, **placed)
        self.fc1 = Linear(size, config.ffn_size, **placed)
        self.fc2 = Linear(config.ffn_size, size, **placed)
        self.final_layer_norm = LayerNorm(size, epsilon=epsilon, **placed)

    def add_feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return norm(x + fc2(relu(fc1(x)))): [b, t, c] -> [b, t, c]."""
        branch = self.fc2(F.relu(self.fc1(hidden)))
        return self.final_layer_norm(hidden + self.drop(branch))

    def drop(self, branch: torch.Tensor) -> torch.Tensor:
        """Apply dropout to the output of a block."""
        return F.dropout(branch, self.dropout, self.training)

    def mixing_operators(self, seed: Callable[[], None], padding: torch.Tensor | None) -> Block:
        """Return the operators before the first norm, on hidden states and a branch.

        Args:
            seed: Called before the first dropout.
            padding: bool [b, s, 1], True for positions that the convolution must not see.
        """

        def mix(hidden: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, ...]:
            seed()
            if padding is not None:
                branch = branch.masked_fill(padding, 0.0)
            return hidden, self.conv(branch)

        def add(hidden: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor]:
            return (hidden + self.drop(self.linear2(branch)),)

        return (
            Operator(lambda hidden: (hidden, self.linear1(hidden)), "product"),
            Operator(mix, "product"),
            Operator(add, "product"),
        )

    def feed_forward_operators(self) -> Block:
        """Return `add_feed_forward` as operators on hidden states and a branch."""

        def add(hidden: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor]:
            return (hidden + self.drop(self.fc2(branch)),)

        return (
            Operator(lambda hidden: (hidden, self.fc1(hidden)), "product"),
            Operator(lambda hidden, branch: (hidden, F.relu(branch)), "other"),
            Operator(add, "product"),
            Operator(lambda hidden: (self.final_layer_norm(hidden),), "norm"),
        )


class EncoderLayer(_Layer):
    """A layer of the encoder."""

    def forward(self, hidden: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [b, s, c] -> [b, s, c]. `padding`: bool [b, s, 1], True for padding."""
        # A kernel reaches over padding, which must not change a sentence.
        branch = self.conv(self.linear1(hidden).masked_fill(padding, 0.0))
        hidden = self.conv_layer_norm(hidden + self.drop(self.linear2(branch)))
        return self.add_feed_forward(hidden)

    def operators(self, padding: torch.Tensor, seed: Callable[[], None]) -> Block:
        """Return `forward` as operators; `seed` is called before the first dropout."""
        return (
            *self.mixing_operators(seed, padding),
            Operator(lambda hidden: (self.conv_layer_norm(hidden),), "norm"),
            *self.feed_forward_operators(),
        )


@dataclass
class DecoderCache:
    """The state of one decoder layer in incremental decoding, for b hypotheses.

    `window` [b, k, c]: the latest inputs of the convolution, the newest last. `keys` and `values`
    [b, heads, s, c / heads] are those of the encoder's output.
    """

    window: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def reorder(self, rows: torch.Tensor, *, sources: bool) -> None:
        """Replace the hypotheses by those at `rows` (int64 [b']), in place of this object.

        `sources`: whether the source sentence of any row changes.
        """
        self.window = self.window.index_select(0, rows)
        if sources:
            self.keys = self.keys.index_select(0, rows)
            self.values = self.values.index_select(0, rows)


class DecoderLayer(_Layer):
    """A layer of the decoder."""

    def __init__(self, config: DCTransformerConfig, kernel: int, **placed: Any) -> None:
        super().__init__(config, kernel, causal=True, **placed)
        self.encoder_attn = EncoderAttention(config, **placed)
        self.encoder_attn_layer_norm = LayerNorm(
            config.embed_dim, epsilon=config.norm_epsilon, **placed
        )

    def forward(
        self,
        hidden: torch.Tensor,
        memory: torch.Tensor | None,
        visible: torch.Tensor,
        cache: DecoderCache | None = None,
    ) -> torch.Tensor:
        """Apply the layer: [b, t, c] -> [b, t, c].

        Args:
            hidden: outputs of the layer before; with a cache those of the newest position, t = 1.
            memory: the encoder's output [b, s, c]; None with a cache.
            visible: bool [b, 1, 1, s], False for padding of the source.
            cache: of this layer; takes in the position.
        """
        branch = self.linear1(hidden)
        if cache is None:
            assert memory is not None, "a cache holds what is read of the memory"
            branch = self.conv(branch)
            keys, values = self.encoder_attn.project(memory)
        else:
            cache.window = torch.cat((cache.window[:, 1:], branch), 1)
            branch = self.conv.step(branch, cache.window)
            keys, values = cache.keys, cache.values
        hidden = self.conv_layer_norm(hidden + self.drop(self.linear2(branch)))
        branch = self.encoder_attn(hidden, keys, values, visible)
        hidden = self.encoder_attn_layer_norm(hidden + self.drop(branch))
        return self.add_feed_forward(hidden)

    def operators(
        self, memory: torch.Tensor, visible: torch.Tensor, seed: Callable[[], None]
    ) -> Block:
        """Return `forward` without a cache as operators; `seed` is called before dropout."""
        attention = self.encoder_attn

        def attend(hidden: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor]:
            keys, values = attention.project(memory)
            branch = attention.attend(queries, keys, values, visible)
            return (hidden + self.drop(branch),)

        return (
            *self.mixing_operators(seed, None),
            Operator(lambda hidden: (self.conv_layer_norm(hidden),), "norm"),
            Operator(lambda hidden: (hidden, attention.q_proj(hidden)), "product"),
            Operator(attend, "product"),
            Operator(lambda hidden: (self.encoder_attn_layer_norm(hidden),), "norm"),
            *self.feed_forward_operators(),
        )


class Encoder(nn.Module):
    """The embedding of source tokens and the encoder's layers."""

    def __init__(self, config: DCTransformerConfig, entries: int, **placed: Any) -> None:
        super().__init__()
        self.embed_tokens = Matrix(entries, config.embed_dim, **placed)
        self.layers = nn.ModuleList(
            EncoderLayer(config, kernel, causal=False, **placed)
            for kernel in config.encoder_kernels
        )


class Decoder(nn.Module):
    """The embedding of target tokens, the decoder's layers and the output projection."""

    def __init__(self, config: DCTransformerConfig, entries: int, **placed: Any) -> None:
        super().__init__()
        self.embed_tokens = Matrix(entries, config.embed_dim, **placed)
        self.layers = nn.ModuleList(
            DecoderLayer(config, kernel, **placed) for kernel in config.decoder_kernels
        )
        self.output_projection = Matrix(entries, config.embed_dim, **placed)


class DCTransformer(ModelChunk):
    """A DC-Transformer, the only chunk of its pipeline.

    Args:
        config: the shape.
        source_size: entries of the source dictionary.
        target_size: entries of the target dictionary.
        seed: of initial values and dropout.
        recompute: which activations of the encoder's and of the decoder's layers are recomputed in
            backward.
        dtype: dtype of the parameters, which are allocated on `device` and initialized once.
    """

    def __init__(
        self,
        config: DCTransformerConfig,
        *,
        source_size: int,
        target_size: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str,
        recompute: RecomputeConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.source_size, self.target_size = source_size, target_size
        self.device = torch.device(device)
        self.streams = DropoutStreams(seed, device=self.device)
        placed: dict[str, Any] = {"dtype": dtype, "device": self.device}
        self.encoder = Encoder(config, source_size, **placed)
        self.decoder = Decoder(config, target_size, **placed)
        self._by_operators = recompute if runs_by_operators(recompute) else None
        self._encoder_spans = recompute_spans(len(self.encoder.layers), recompute)
        self._decoder_spans = recompute_spans(len(self.decoder.layers), recompute)
        self._infos = whole_parameters(self)
        initialise(self._infos, seed=seed)

    def forward(self, source: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits [b, t, target dictionary] of the tokens after each target position.

        Args:
            source: int64 [b, s], padded on the right with PAD.
            inputs: int64 [b, t], the target tokens so far, padded on the right.
        """
        return self.project(self.decode(inputs, self.encode(source), source))

    def loss(
        self, source: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return [label-smoothed loss, negative log-likelihood], sums over target tokens; fp32 [2].

        The caller divides by the target tokens of the global batch.

        Args:
            source: int64 [b, s].
            inputs: int64 [b, t].
            targets: int64 [b, t], the tokens after each position of `inputs`; PAD does not count.
        """
        logits = self(source, inputs).flatten(0, 1)
        return smoothed_sums(
            logits, targets.flatten(), smoothing=self.config.label_smoothing, ignored=PAD
        )

    @property
    def begins(self) -> bool:
        """True, since the model is the only chunk and takes batches."""
        return True

    def run(self, iteration: int, batch: PairBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return `loss` of a microbatch; `iteration` and the microbatch's number seed dropout."""
        assert hidden is None, "the model is one chunk"
        self.streams.at(iteration, batch.index)
        return self.loss(batch.source, batch.inputs, batch.targets)

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        """Encode int64 tokens [b, s] as [b, s, c]; rows of padding are undefined."""
        padding = (source == PAD)[:, :, None]
        hidden = self._embed(self.encoder.embed_tokens, source, stream=EMBEDDING_STREAM)

        if self._by_operators is not None:
            blocks: list[Block] = []
            for index, layer in enumerate(self.encoder.layers):
                assert isinstance(layer, EncoderLayer)
                blocks.append(layer.operators(padding, self._seeding(index)))
            return self._run_by_operators(blocks, hidden)

        def run(index: int, hidden: torch.Tensor) -> torch.Tensor:
            return self.encoder.layers[index](hidden, padding)

        return self._run_layers(self._encoder_spans, run, hidden, first_stream=0)

    def decode(
        self, inputs: torch.Tensor, memory: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        """Return the last decoder layer's output [b, t, c] for whole target sentences.

        Args:
            inputs: int64 [b, t].
            memory: the encoder's output [b, s, c].
            source: int64 [b, s], which tells padding.
        """
        visible = visible_positions(source)
        hidden = self._embed(self.decoder.embed_tokens, inputs, stream=DECODER_EMBEDDING_STREAM)

        first = len(self.encoder.layers)
        if self._by_operators is not None:
            blocks: list[Block] = []
            for index, layer in enumerate(self.decoder.layers):
                assert isinstance(layer, DecoderLayer)
                blocks.append(layer.operators(memory, visible, self._seeding(first + index)))
            return self._run_by_operators(blocks, hidden)

        def run(index: int, hidden: torch.Tensor) -> torch.Tensor:
            return self.decoder.layers[index](hidden, memory, visible)

        return self._run_layers(self._decoder_spans, run, hidden, first_stream=first)

    def start_decoding(self, memory: torch.Tensor) -> list[DecoderCache]:
        """Return the caches of all decoder layers before the first target position."""
        caches = []
        for layer in self.decoder.layers:
            assert isinstance(layer, DecoderLayer)
            keys, values = layer.encoder_attn.project(memory)
            window = memory.new_zeros(len(memory), layer.conv.kernel_size, memory.shape[2])
            caches.append(DecoderCache(window=window, keys=keys, values=values))
        return caches

    def decode_next(
        self,
        tokens: torch.Tensor,
        position: int,
        visible: torch.Tensor,
        caches: Sequence[DecoderCache],
    ) -> torch.Tensor:
        """Return logits [b, target dictionary] of the tokens after one more target position.

        Args:
            tokens: int64 [b], the tokens at `position`.
            position: number of the position, which the caches have not seen.
            visible: `visible_positions` of the source.
            caches: of `start_decoding`, changed in place.
        """
        assert not self.training, "dropout would be drawn"
        hidden = self._embed(self.decoder.embed_tokens, tokens[:, None], stream=0, first=position)
        for layer, cache in zip(self.decoder.layers, caches, strict=True):
            hidden = layer(hidden, None, visible, cache)
        return self.project(hidden)[:, 0]

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project the decoder's output [b, t, c] to logits [b, t, target dictionary]."""
        return multiply(hidden, self.decoder.output_projection.weight)

    def _embed(
        self, table: Matrix, tokens: torch.Tensor, *, stream: int, first: int = 0
    ) -> torch.Tensor:
        """Embed tokens [b, n] at the positions from `first` as [b, n, c]."""
        size = self.config.embed_dim
        hidden = F.embedding(tokens, table.weight) * math.sqrt(size)
        waves = sinusoids(first, tokens.shape[1], size, device=self.device)
        if self.training:
            self.streams.enter(stream)
        dropped = F.dropout(hidden + waves.to(hidden.dtype), self.config.dropout, self.training)
        return dropped

    def _run_by_operators(self, blocks: Sequence[Block], hidden: torch.Tensor) -> torch.Tensor:
        (hidden,) = run_blocks(
            blocks, hidden, recompute=self._by_operators, preserve_rng=self.training
        )
        return hidden

    def _seeding(self, layer: int) -> Callable[[], None]:
        """Return a function that seeds the dropout of a layer in this forward pass."""
        # Recomputation runs after the streams have moved on, so the current position is kept.
        position = self.streams.position

        def seed() -> None:
            if self.training:
                self.streams.enter(layer, position=position)

        return seed

    def _run_layers(
        self,
        spans: Sequence[Span],
        run: Callable[[int, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        *,
        first_stream: int,
    ) -> torch.Tensor:
        """Run all layers of one side; backward recomputes each recomputed span as a whole."""
        # Recomputation runs after the streams have moved on, so the current position is kept.
        position = self.streams.position

        def run_span(span: Span, hidden: torch.Tensor) -> torch.Tensor:
            for index in range(span.start, span.stop):
                if self.training:
                    self.streams.enter(first_stream + index, position=position)
                hidden = run(index, hidden)
            return hidden

        for span in spans:
            if span.recomputed and torch.is_grad_enabled():
                hidden = recomputed(run_span, span, hidden)
            else:
                hidden = run_span(span, hidden)
        return hidden


def visible_positions(source: torch.Tensor) -> torch.Tensor:
    """Return the mask of the attention to the source [b, s]: bool [b, 1, 1, s]."""
    return (source != PAD)[:, None, None]


def sinusoids(first: int, count: int, size: int, *, device: torch.device) -> torch.Tensor:
    """Return the position embeddings of `count` positions from `first`, fp32 [count, size].

    fairseq's form: all sines, then all cosines, with wavelengths from 2 pi to 10000 * 2 pi in
    geometric progression; positions begin at 0 here. An odd size ends in a column of zeros.
    """
    half = size // 2
    step = math.log(_LONGEST_WAVE) / max(half - 1, 1)
    rates = torch.exp(torch.arange(half, dtype=torch.float32, device=device) * -step)
    places = torch.arange(first, first + count, dtype=torch.float32, device=device)
    angles = places[:, None] * rates
    return F.pad(torch.cat((angles.sin(), angles.cos()), 1), (0, size % 2))


def initialise(infos: Sequence[ParamInfo], *, seed: int) -> None:
    """Fill parameters in place as fairseq does; values depend on seed, name and shape alone.

    Embeddings and the output projection are N(0, 1 / c), other matrices Xavier-uniform, with a
    gain of 1 / sqrt(2) for the attention's query, key and value; norm weights 1, biases 0.
    """
    for info in infos:
        shape = info.logical_shape
        if len(shape) == 1:
            values = torch.full(shape, 0.0 if info.name.endswith("bias") else 1.0)
        elif info.name.endswith(("embed_tokens.weight", "output_projection.weight")):
            values = initial_values(seed, info.name, shape, shape[1] ** -0.5)
        else:
            gain = 0.5 if info.name.endswith(_PACKED_PROJECTIONS) else 1.0
            values = uniform_values(seed, info.name, shape, math.sqrt(gain * 6 / sum(shape)))
        set_parameter(info, values)


_PACKED_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
"""Projections that fairseq keeps, and initializes, as one matrix of three times the height."""
