"""The GPT model: embedding, layers, final norm, output layer.

The parts have methods of their own (`embed`, `transform`, `project`), and each part is optional, so
that a pipeline stage is the same class with a range of layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.data_parallel.bucket import ParamInfo
from megatron.documents import Documents
from megatron.low_memory.activation_checkpoint import (
    Block,
    Operator,
    recomputed,
    run_blocks,
)
from megatron.low_memory.checkpoint_interval import (
    Span,
    recompute_spans,
    recomputes_attention,
    runs_by_operators,
)
from megatron.model.attention import KeyValueCache
from megatron.model.chunk import ModelChunk
from megatron.model.embedding import Embedding, OutputLayer
from megatron.model.flops import is_of_heads
from megatron.model.init import initialise
from megatron.model.layer import TransformerLayer
from megatron.model.norm import NORMALIZATIONS
from megatron.model.rotary import Rotary, rotary_table
from megatron.parallel.groups import ALONE, Group
from megatron.tensor_parallel.collectives import TensorParallel, keep_uncompiled
from megatron.tensor_parallel.cross_entropy import token_losses
from megatron.tensor_parallel.layers import shards_of
from megatron.tensor_parallel.rng import EMBEDDING_STREAM, DropoutStreams, LayerStream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron.config import ModelConfig, RecomputeConfig
    from megatron.data.data_loader import DeviceMicrobatch

_WORD_TABLE = "embedding.word_embeddings.weight"


class GPT(ModelChunk):
    """A decoder-only transformer, or a pipeline stage of one.

    Args:
        dtype: dtype of the parameters, which are allocated on `device` and initialized once.
        layers: global numbers of the layers of this stage (None: all). Names and initial values are
            independent of the stage.
        has_embedding: whether the token table is on this stage.
        has_head: whether the final norm and the output layer are on this stage.
        tp: the tensor-parallel group; its ranks make the same calls with the same tokens.
        sequence_parallel: shard hidden states between layers along the sequence: [b, s/tp, h], also
            those passed to `transform` and `loss_from_hidden`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str,
        recompute: RecomputeConfig | None = None,
        layers: range | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
        tp: Group = ALONE,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.tp = TensorParallel(tp, sequence_parallel)
        self.layer_numbers = range(config.num_layers) if layers is None else layers
        self.streams = DropoutStreams(seed, device=self.device, tp=self.tp)
        self.spans = recompute_spans(len(self.layer_numbers), recompute)
        self._by_operators = recompute if runs_by_operators(recompute) else None
        self._has_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0

        placed: dict[str, Any] = {"dtype": dtype, "device": self.device}
        vocabulary: dict[str, Any] = {"vocab_size": vocab_size, "tp": self.tp, **placed}
        self.embedding = Embedding(config, **vocabulary) if has_embedding else None
        again = recomputes_attention(recompute)
        # Other layers are seeded from outside.
        self._layers_seed = again or self.streams.heads_rank != self.streams.hidden_rank
        self.layers = nn.ModuleList(
            TransformerLayer(config, recomputes_attention=again, tp=self.tp, **placed)
            for _ in self.layer_numbers
        )
        self.final_norm: nn.Module | None = None
        self.output_layer: OutputLayer | None = None
        if has_head:
            norm = NORMALIZATIONS[config.normalization]
            self.final_norm = norm(config.hidden_size, epsilon=config.norm_epsilon, **placed)
            shared = None
            if config.tied and self.embedding is not None:
                shared = self.embedding.word_embeddings.weight
            self.output_layer = OutputLayer(config, tied_to=shared, **vocabulary)
        self._rotary = self._make_rotary()
        self._infos = self._describe_parameters()
        initialise(self._infos, config, seed=seed)

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Return the logits of the whole model, which must have embedding and head on this stage.

        Args:
            tokens: int64 [b, s].
            position_ids: [b, s]; None for 0..s-1.
            document_ids: [b, s] on the host; attention stays inside runs of equal ids. None for one
                document.

        Returns:
            The logits [b, s, columns] of this rank's share of the vocabulary. Padding columns have
            no meaning.
        """
        hidden = self.embed(tokens, position_ids)
        hidden = self.transform(hidden, position_ids, _documents(document_ids, hidden.device))
        return self.project(hidden)

    def loss(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        loss_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Return the sum over tokens of loss_mask * cross-entropy, an fp32 scalar.

        The caller divides by the tokens of the global batch. Labels are int64 [b, s], `loss_mask`
        is [b, s] or None for ones. The result is equal on every `tp` rank.
        """
        hidden = self.embed(tokens, position_ids)
        hidden = self.transform(hidden, position_ids, _documents(document_ids, hidden.device))
        return self.loss_from_hidden(hidden, labels, loss_mask)

    @property
    def begins(self) -> bool:
        """Whether the embedding is on this stage, so that `run` takes tokens."""
        return self.embedding is not None

    def run(
        self, iteration: int, batch: DeviceMicrobatch, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Run this stage on a microbatch.

        Args:
            iteration: the step; with the number of the microbatch it seeds dropout.
            batch: tokens and labels [b, s].
            hidden: input of the first layer, [b, s, h] or [b, s/tp, h] with sequence parallelism;
                None if `begins`.

        Returns:
            The output of the last layer, of the shape of `hidden`; on the stage with the output
            layer the sum of the token losses, fp32 [1].
        """
        self.streams.at(iteration, batch.index)
        if hidden is None:
            hidden = self.embed(batch.tokens, batch.position_ids)
        hidden = self.transform(hidden, batch.position_ids, batch.documents)
        if self.output_layer is None:
            return hidden
        return self.loss_from_hidden(hidden, batch.labels, batch.loss_mask).view(1)

    def embed(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Embed tokens [b, s] for the first layer, as [b, s, h] or this rank's [b, s/tp, h]."""
        assert self.embedding is not None, "this stage holds no embedding"
        if self._draws_dropout:
            self.streams.enter(EMBEDDING_STREAM, sharded_rank=self.streams.hidden_rank)
        return self.embedding(tokens, position_ids)

    def transform(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        documents: Documents | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> torch.Tensor:
        """Run the layers of this stage: [b, s, h] -> [b, s, h], or [b, s/tp, h] likewise.

        `position_ids` and `documents` cover whole sequences on every rank. `caches`, one per
        layer, are for generation on one tensor-parallel rank; they exclude recomputation, and do
        not seed dropout.
        """
        rotary = self._rotary_at(position_ids, self.tp.whole_length(hidden.shape[1]))
        if caches is not None:
            assert self.tp.size == 1, "caches hold every head"
            for layer, cache in zip(self.layers, caches, strict=True):
                hidden = layer(hidden, rotary, documents, cache)
            return hidden
        if self._by_operators is not None:
            blocks: list[Block] = []
            for index, layer in enumerate(self.layers):
                assert isinstance(layer, TransformerLayer)
                blocks.append(layer.operators(rotary, documents, self._stream(index)))
            (hidden,) = run_blocks(
                blocks, hidden, recompute=self._by_operators, preserve_rng=self._draws_dropout
            )
            return hidden
        for span in self.spans:
            run = self._span_runner(span)
            if span.recomputed and torch.is_grad_enabled():
                hidden = recomputed(run, hidden, rotary, documents)
            else:
                hidden = run(hidden, rotary, documents)
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project the last layer's output to this rank's logits [b, s, columns], with padding."""
        return self.tp.by_position(self._project(hidden))

    def loss_from_hidden(
        self, hidden: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `loss` from the output of the last layer [b, s, h].

        Labels and mask cover whole sequences on every rank.
        """
        logits = self._project(hidden).flatten(0, 1)
        labels = self.tp.by_rank(labels).flatten()
        losses = token_losses(logits, labels, vocab_size=self.vocab_size, group=self.tp.group)
        if loss_mask is not None:
            losses = losses * self.tp.by_rank(loss_mask).flatten()
        return losses.sum()

    def logical_values(self) -> dict[str, torch.Tensor]:
        """Return detached views of this rank's parameters without padding, by logical name."""
        return {info.name: info.param.detach()[: info.local_shape[0]] for info in self._infos}

    def compile_layers(self, **options: Any) -> None:
        """Compile each layer in place with `torch.compile(**options)`.

        Functions marked `uncompiled`, such as the seeding of dropout, stay as they are and divide a
        layer into several graphs where they are called.
        """
        keep_uncompiled()
        for layer in self.layers:
            layer.compile(**options)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise RuntimeError(
            "a GPT is built on its device and in its dtype; moving it would part tied weights"
        )

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits in the row order of the product: by rank with sequence parallelism."""
        assert self.final_norm is not None and self.output_layer is not None, "no head here"
        norm, output_layer = self.final_norm, self.output_layer
        recompute = self._by_operators
        if recompute is None or recompute.recompute_granularity != "no-norm":
            return output_layer(norm(hidden))
        head = (
            Operator(lambda hidden: (norm(hidden),), "norm"),
            Operator(lambda normed: (output_layer(normed),), "product"),
        )
        (logits,) = run_blocks([head], hidden, recompute=recompute)
        return logits

    @property
    def _draws_dropout(self) -> bool:
        return self.training and self._has_dropout

    def _span_runner(self, span: Span):
        """Return a function that runs a span's layers."""
        streams = [self._stream(index) for index in range(span.start, span.stop)]

        def run(
            hidden: torch.Tensor, rotary: Rotary | None, documents: Documents | None
        ) -> torch.Tensor:
            for index, stream in enumerate(streams, span.start):
                if stream is not None:
                    stream.heads()
                inner = stream if self._layers_seed else None
                if index == len(self.layers) - 1 and self.before_last_layer is not None:
                    self.before_last_layer()
                hidden = self.layers[index](hidden, rotary, documents, None, inner)
                if index == 0:
                    self._announce_in_backward(hidden)
            return hidden

        return run

    def _announce_in_backward(self, hidden: torch.Tensor) -> None:
        """Let backward call `before_last_layer` where the first layer's output has a gradient."""
        called = self.before_last_layer
        if called is not None and hidden.requires_grad:
            hidden.register_hook(lambda gradient: called())

    def _stream(self, index: int) -> LayerStream | None:
        """Return the dropout stream of a layer of this stage; None if no dropout is drawn."""
        if not self._draws_dropout:
            return None
        # Recomputation runs after the streams have moved on, so the current position is kept.
        return LayerStream(self.streams, self.layer_numbers[index], self.streams.position)

    def _make_rotary(self) -> Rotary | None:
        config = self.config
        if config.position_embedding_type != "rope":
            return None
        return rotary_table(
            config.positions,
            head_dim=config.head_dim,
            percent=config.rotary_percent,
            base=config.rotary_base,
            scaling=config.rope_scaling_factor if config.use_rope_scaling else None,
            device=self.device,
        )

    def _rotary_at(self, position_ids: torch.Tensor | None, length: int) -> Rotary | None:
        if self._rotary is None:
            return None
        if position_ids is None:
            return Rotary(self._rotary.cos[:length], self._rotary.sin[:length])
        return Rotary(self._rotary.cos[position_ids], self._rotary.sin[position_ids])

    def _describe_parameters(self) -> list[ParamInfo]:
        """Describe the parameters of this stage.

        A tied table comes first if its embedding is here, else last, with one leaf for each use.
        """
        infos = []
        shards = shards_of(self)
        for name, parameter in self.named_parameters():
            leaves, tied, shard = (parameter,), False, shards.get(name)
            if name.startswith("layers."):
                _, local, rest = name.split(".", 2)
                name = f"layers.{self.layer_numbers[int(local)]}.{rest}"
            if self.config.tied and name == "output_layer.weight":
                if self.embedding is not None:
                    continue
                name, tied = _WORD_TABLE, True
            elif self.config.tied and name == _WORD_TABLE:
                tied = True
                if self.output_layer is not None:
                    leaves = (parameter, self.output_layer.weight)
            shape = tuple(parameter.shape) if shard is None else shard.shape
            if name in (_WORD_TABLE, "output_layer.weight"):
                shape = (self.vocab_size, *shape[1:])
            infos.append(
                ParamInfo(
                    name=name,
                    leaves=leaves,
                    logical_shape=shape,
                    tp_shard=shard,
                    # Ranks see parts of the sequence or of the heads, so gradients of whole
                    # parameters are partial.
                    partial=shard is None
                    and (self.tp.cuts_sequence or (self.tp.size > 1 and is_of_heads(name))),
                    tied=tied,
                    weight_decay=parameter.ndim >= 2,
                )
            )
        return infos


def _documents(document_ids: NDArray[np.int64] | None, device: torch.device) -> Documents | None:
    return None if document_ids is None else Documents.of(document_ids, device)
