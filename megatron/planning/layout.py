"""What each rank of a grid holds: the parameters of `model.GPT`, by logical name, without a model.

A test holds these against the `ParamInfo`s and the buckets of real ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.config import Config, ModelConfig
from megatron.data_parallel.bucket_plan import ParamShape, RankShapes, plan_buckets
from megatron.data_parallel.interface import GradientPath
from megatron.model.flops import is_of_heads
from megatron.parallel.cut import Cut, padded_rows
from megatron.parallel.dims import ParallelDims

WORD_TABLE = "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A configuration on a number of ranks. `vocabulary`: entries, before padding; `cap`: entries
    of a gradient bucket; `device`: "cpu" or "cuda"; `cuda_aware_mpi`: whether MPI reads and writes
    a GPU's memory itself."""

    config: Config
    dims: ParallelDims
    path: GradientPath
    vocabulary: int
    cap: int
    device: str
    cuda_aware_mpi: bool = False

    @cached_property
    def split(self) -> list[list[range]]:
        """For each stage its runs of layers."""
        return self.config.parallel.layer_split(self.config.model.num_layers)

    def holds_embedding(self, stage: int, chunk: int = 0) -> bool:
        """Whether a stage's chunk begins the model."""
        return stage == 0 and chunk == 0

    def holds_head(self, stage: int, chunk: int | None = None) -> bool:
        """Whether a stage (None), or one of its chunks, ends the model."""
        last = len(self.split[stage]) - 1
        return stage == self.dims.pp - 1 and chunk in (None, last)

    def rank(
        self, stage: int = 0, tp_rank: int = 0, *, stored: Mapping[str, int] | None = None
    ) -> RankShapes:
        """What the ranks at this place of the grid hold. `stored`: entries here of each parameter
        that is stored in part (None: as many as the path will store, spread evenly)."""
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
        """In the order of `named_parameters`."""
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
        model, cut = self.config.model, _Cutter(self, tp_rank)
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
    config: Config, path: GradientPath, *, vocabulary: int
) -> dict[str, tuple[int, ...]]:
    """The whole model's parameters by logical name, however they are cut and padded."""
    dims = ParallelDims(tp=1, dp=1, pp=config.parallel.pipeline_model_parallel_size)
    # Shapes do not depend on the buckets or the device.
    grid = Grid(config=config, dims=dims, path=path, vocabulary=vocabulary, cap=1, device="cpu")
    return {name: shape for stage in range(dims.pp) for name, shape in grid.shapes(stage).items()}


@dataclass(frozen=True)
class _Cutter:
    """Makes parameters of what a tensor-parallel rank holds of a tensor."""

    grid: Grid
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
        cut = Cut.evenly(shape, axis=axis, rank=self.rank, ranks=ranks, blocks=blocks)
        return ParamShape(name=name, logical_shape=shape, rows=cut.local_shape[0], cut=cut)

    def table(self, name: str, *, tied: bool) -> ParamShape:
        model, ranks = self.grid.config.model, self.grid.dims.tp
        length = self.grid.vocabulary
        shape = (length, model.hidden_size)
        cut = Cut.evenly(shape, axis=0, rank=self.rank, ranks=ranks) if ranks > 1 else None
        rows = padded_rows(
            length, rank=self.rank, ranks=ranks, multiple=model.make_vocab_size_divisible_by
        )
        return ParamShape(name=name, logical_shape=shape, rows=rows, cut=cut, tied=tied)


def _layer(model: ModelConfig, cut: _Cutter, name: str) -> Iterator[ParamShape]:
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


def _norm(model: ModelConfig, cut: _Cutter, name: str, size: int) -> Iterator[ParamShape]:
    yield cut.whole(f"{name}.weight", (size,))
    if model.normalization == "LayerNorm":
        yield cut.whole(f"{name}.bias", (size,))


def _columns(
    model: ModelConfig, cut: _Cutter, name: str, shape: tuple[int, int], *, blocks: int = 1
) -> Iterator[ParamShape]:
    yield cut.part(f"{name}.weight", shape, blocks=blocks)
    if model.bias:
        yield cut.part(f"{name}.bias", shape[:1], blocks=blocks)


def _rows(
    model: ModelConfig, cut: _Cutter, name: str, shape: tuple[int, int]
) -> Iterator[ParamShape]:
    yield cut.part(f"{name}.weight", shape, axis=1)
    if model.bias:
        yield cut.whole(f"{name}.bias", shape[:1])
