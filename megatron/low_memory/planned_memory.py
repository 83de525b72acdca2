"""The planned column of the memory ledger: bytes from formulas and counted shapes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.config import Config, GPTConfig
from megatron.data_parallel.bucket_plan import (
    BYTES,
    ParamShape,
    RankShapes,
    bucket_elements,
    plan_buckets,
    slice_alignment,
)
from megatron.data_parallel.gradient_path import GradientPath
from megatron.errors import ConfigError
from megatron.low_memory.checkpoint_interval import recompute_spans, runs_by_operators
from megatron.low_memory.operation_graph import HEAD, INPUT, PRODUCTS, Graph, wide_resnet_graph
from megatron.low_memory.strategies import Strategy, activation_course
from megatron.memory_estimate import Activations, RankGrid, StateBytes, main_views, state_bytes
from megatron.model.dc_transformer_shapes import BLOCK
from megatron.model.dc_transformer_shapes import logical_shapes as dc_shapes
from megatron.model.image_shapes import Layer, parameter_shapes
from megatron.parallel.dims import ParallelDims
from megatron.tasks.translation_config import TranslationConfig
from megatron.tasks.vision_config import VisionConfig


@dataclass(frozen=True, kw_only=True)
class MemoryColumn:
    """One way to count a rank's memory, in bytes.

    Attributes:
        model: Parameters and buffers.
        optimizer: Gradients, moments and fp32 copies that are not the parameters themselves, with
            the state of the gradient path.
        stored: Activations that one microbatch stores in all chunks of the rank.
        layers: `stored` by layer, in forward order.
        forward: Activations of all microbatches in flight, at the peak.
        backward: Gradients of activations, temporaries and recomputed activations at the peak.
        other: Scratch memory, tables, the batch, messages between stages.
        total: The peak.
    """

    model: int
    optimizer: int
    stored: int
    layers: Mapping[str, int] = field(default_factory=dict[str, int])
    forward: int | None = None
    backward: int | None = None
    other: int | None = None
    total: int

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes at the peak by the report's kinds, `other` left out; without a peak, `stored`."""
        forward = self.stored if self.forward is None else self.forward
        activations = forward + (0 if self.backward is None else self.backward)
        return {"model": self.model, "optimizer": self.optimizer, "activations": activations}


def planned_column(
    config: Config,
    dims: ParallelDims,
    path: GradientPath,
    *,
    rank: int = 0,
    vocabularies: Sequence[int],
) -> MemoryColumn:
    """Plan a rank of a task's model.

    Args:
        config: Resolved for the ranks of `dims`.
        dims: The grid.
        path: The gradient path.
        rank: The rank whose memory is counted.
        vocabularies: Entries of a GPT's vocabulary, or of the two dictionaries of a translation.

    Raises:
        ConfigError: The task, its network or its recomputation has no planned memory.
    """
    if isinstance(config, GPTConfig):
        (vocabulary,) = vocabularies
        return planned_gpt(config, dims, path, rank=rank, vocabulary=vocabulary)
    if isinstance(config, VisionConfig):
        return planned_wide_resnet(config, dims, path)
    if isinstance(config, TranslationConfig):
        source, target = vocabularies
        return planned_translation(config, dims, path, dictionaries=(source, target))
    raise ConfigError(f"task: {config.task} has no planned memory")


def planned_activations(
    config: Config,
    dims: ParallelDims,
    path: GradientPath,
    *,
    rank: int = 0,
    vocabularies: Sequence[int],
) -> int:
    """Return the part of a planned peak that microbatch and recomputation decide, in bytes.

    The other part, from states and their scratch memory, depends on neither. Arguments and errors
    are those of `planned_column`.
    """
    if isinstance(config, GPTConfig):
        grid = _gpt_grid(config, dims, path, vocabularies[0])
        return sum(_gpt_activations(grid, dims.coordinates(rank).pp))
    column = planned_column(config, dims, path, rank=rank, vocabularies=vocabularies)
    assert column.forward is not None and column.backward is not None
    return column.forward + column.backward


def planned_gpt(
    config: GPTConfig, dims: ParallelDims, path: GradientPath, *, rank: int, vocabulary: int
) -> MemoryColumn:
    """Plan a rank of a GPT by the formulas of `memory_estimate`.

    Args:
        config: Resolved for the ranks of `dims`.
        dims: The grid.
        path: The gradient path.
        rank: A rank of the grid.
        vocabulary: Entries of the vocabulary, before padding.
    """
    grid = _gpt_grid(config, dims, path, vocabulary)
    at = dims.coordinates(rank)
    shapes = grid.rank(at.pp, at.tp)
    width = BYTES[config.precision.param_dtype]
    model, optimizer, other = _states(
        state_bytes(grid, shapes), shapes, dict.fromkeys(shapes.params, width), config
    )
    layers = _gpt_layers(grid, Activations(grid), at.pp)
    forward, backward, messages = _gpt_activations(grid, at.pp)
    return MemoryColumn(
        model=model,
        optimizer=optimizer,
        stored=sum(layers.values()),
        layers=layers,
        forward=forward,
        backward=backward,
        other=other + messages,
        total=model + optimizer + forward + backward + other + messages,
    )


def _gpt_grid(
    config: GPTConfig, dims: ParallelDims, path: GradientPath, vocabulary: int
) -> RankGrid:
    return RankGrid(
        config=config,
        dims=dims,
        path=path,
        vocabulary=vocabulary,
        cap=bucket_elements(config, dims.dp),
        device=config.run.device or "cpu",
    )


def _gpt_activations(grid: RankGrid, stage: int) -> tuple[int, int, int]:
    """Return the bytes of forward, of backward and of messages at the peak of a stage."""
    sizes = Activations(grid)
    peak = sizes.of_stage(stage)
    forward, backward = peak.saved, peak.again + peak.gradients
    if grid.holds_head(stage):
        # The loss makes an fp32 gradient of the logits while all is stored, and the output layer
        # one of its weights; the layers, whose gradients and recomputed activations come later,
        # find the head's activations freed.
        logits = sizes.logits * 4 // BYTES[grid.config.precision.param_dtype]
        head = max(logits, sizes.head_gradient + sizes.hidden)
        if head >= backward - sizes.head:
            backward = head
        else:
            forward -= sizes.head
    return forward, backward, peak.messages


def _gpt_layers(grid: RankGrid, sizes: Activations, stage: int) -> dict[str, int]:
    """Return the bytes that each layer of a stage stores for one microbatch."""
    found: dict[str, int] = {}
    for chunk, layers in enumerate(grid.split[stage]):
        if grid.holds_embedding(stage, chunk):
            found["embedding"] = sizes.embedding
        for layer, size in zip(layers, sizes.by_layer(len(layers)), strict=True):
            found[f"layers.{layer}"] = size
        if grid.holds_head(stage, chunk):
            found[HEAD] = sizes.head
    return {layer: size for layer, size in found.items() if size}


def planned_wide_resnet(
    config: VisionConfig, dims: ParallelDims, path: GradientPath
) -> MemoryColumn:
    """Plan a rank of a wide residual network by counted shapes, as torch stores it on a CPU.

    torch's ReLU stores its output, which is the next convolution's input, and not one bit an
    entry; its batch normalization stores the mean and the inverse deviation of each simulated
    microbatch.

    Raises:
        ConfigError: The network is another one, or it is recomputed in runs of operators.
    """
    model = config.model
    granularity = config.recompute.recompute_granularity
    if granularity == "every":
        raise ConfigError(f"recompute_granularity: {granularity} has no planned activations here")
    if model.vision_backbone_type != "wide-resnet":
        raise ConfigError(
            f"vision_backbone_type: {model.vision_backbone_type} has no planned activations; "
            "wide-resnet has"
        )
    layers = model.layers()
    widths = _widths(layers, BYTES[config.precision.param_dtype])
    shapes = _rank_shapes(parameter_shapes(layers), config, dims, path, widths)
    parameters, optimizer, other = _states(
        state_bytes(_Settings(config, path), shapes), shapes, widths, config
    )
    channels = sum(layer.outputs for layer in layers if layer.kind == "norm")
    # The running mean and variance, and a shadow of both.
    buffers = 4 * 4 * channels
    graph = wide_resnet_graph(
        depth=model.depth,
        width=model.width,
        classes=model.num_classes,
        height=model.img_h,
        image_width=model.img_w,
    )
    batch = config.training.micro_batch_size
    width = BYTES[config.precision.param_dtype]
    stored = _wide_resnet_layers(graph, layers, config, batch=batch, width=width)
    forward = sum(stored.values())
    # The gradient of the last hidden state, made while all is stored.
    backward = 2 * graph.size("relu") * batch * width
    if granularity in ("no-norm", "residual", "residual-star"):
        strategy = Strategy(granularity, config.recompute.recompute_num_layers or 1)
        course = activation_course(graph, strategy, batch=batch, entry_bytes=width)
        # The report counts one gradient. torch also holds the shortcut's, and the gradient that an
        # operation makes beside the one that it reads.
        most = max(moment.stored + 3 * moment.gradient for moment in course.moments)
        backward = max(backward, most - forward)
    return MemoryColumn(
        model=parameters + buffers,
        optimizer=optimizer,
        stored=forward,
        layers=stored,
        forward=forward,
        backward=backward,
        other=other,
        total=parameters + buffers + optimizer + forward + backward + other,
    )


def _wide_resnet_layers(
    graph: Graph, layers: Sequence[Layer], config: VisionConfig, *, batch: int, width: int
) -> dict[str, int]:
    """Return the bytes that each block stores, as torch's operators do."""
    owners = {op.name: _owner(op.name) for op in graph.operations}
    found: dict[str, int] = dict.fromkeys(owners.values(), 0)
    kept = _kept_tensors(graph, config)
    keeps_products = config.recompute.recompute_granularity == "ops"
    seen: set[str] = set()
    for op in graph.operations:
        # A ReLU stores its output in place of the signs.
        names = (op.name,) if op.kind == "relu" else op.needs
        if keeps_products and op.kind in PRODUCTS:
            names = (*names, op.name)
        for name in names:
            # The loss is computed behind the last block.
            if name in seen or (name not in kept and op.kind != "loss"):
                continue
            if op.kind != "loss":
                seen.add(name)
            # Cross-entropy stores the logarithms of the probabilities in fp32.
            entry = 4 if op.kind == "loss" else width
            found[owners[op.name]] += graph.size(name) * batch * entry
    if config.recompute.recompute_granularity is None:
        groups = batch // (config.model.simulated_micro_batch_size or batch)
        for layer in layers:
            if layer.kind == "norm":
                found[_owner(layer.name)] += groups * 2 * 4 * layer.outputs
    found[HEAD] += 4  # the number of images that the loss divides by
    return {name: size for name, size in found.items() if size}


def _kept_tensors(graph: Graph, config: VisionConfig) -> frozenset[str]:
    """Return the tensors that the forward pass stores."""
    granularity = config.recompute.recompute_granularity
    if granularity is None:
        return frozenset(graph.producer) | {INPUT}
    if granularity == "ops":
        made = (op.name for op in graph.operations if op.kind in PRODUCTS or op.ends_block)
        return frozenset(made) | {INPUT}
    assert granularity in ("no-norm", "residual", "residual-star"), granularity
    strategy = Strategy(granularity, config.recompute.recompute_num_layers or 1)
    return strategy.kept(graph)


def _owner(operation: str) -> str:
    """Return the layer of an operation: a block, the first convolution, or the head."""
    if operation == "conv0":
        return operation
    return operation.rpartition(".")[0] or HEAD


SENTENCE = 25
"""Tokens of each sentence of a translation profile: about the mean of IWSLT'14."""


def translation_batch(config: TranslationConfig) -> tuple[int, int]:
    """Return the pairs of a profile's microbatch and the tokens of each sentence, all equal."""
    tokens = config.data.microbatch_tokens or config.data.max_tokens
    length = min(SENTENCE, tokens)
    return max(tokens // length, 1), length


def planned_translation(
    config: TranslationConfig,
    dims: ParallelDims,
    path: GradientPath,
    *,
    dictionaries: tuple[int, int],
) -> MemoryColumn:
    """Plan a rank of a DC-Transformer by counted shapes, as torch stores it on a CPU.

    Args:
        config: Resolved for the ranks of `dims`.
        dims: The grid.
        path: The gradient path.
        dictionaries: Entries of the source and of the target dictionary.

    Raises:
        ConfigError: Layers are recomputed operator by operator.
    """
    if runs_by_operators(config.recompute):
        raise ConfigError(
            f"recompute_granularity: {config.recompute.recompute_granularity} has no planned "
            "activations here; full has"
        )
    source, target = dictionaries
    width = BYTES[config.precision.param_dtype]
    named = dc_shapes(config.model, source_size=source, target_size=target)
    widths = dict.fromkeys(named, width)
    shapes = _rank_shapes(named, config, dims, path, widths)
    model, optimizer, other = _states(
        state_bytes(_Settings(config, path), shapes), shapes, widths, config
    )
    layers, again = _translation_layers(config, target, width)
    stored = sum(layers.values())
    pairs, length = translation_batch(config)
    wide = width * pairs * length * config.model.embed_dim
    # Recomputed layers keep the encoder's output alive without saving it.
    recomputes = config.recompute.recompute_granularity is not None
    forward = stored + (wide if recomputes else 0)
    # The gradient of the logits overwrites them; the projection's is made while all is stored.
    backward = width * target * config.model.embed_dim + wide
    # The last layers of the decoder, which are recomputed first, find the head's activations freed.
    if again + wide > backward + layers[HEAD]:
        forward, backward = forward - layers[HEAD], again + wide
    return MemoryColumn(
        model=model,
        optimizer=optimizer,
        stored=stored,
        layers=layers,
        forward=forward,
        backward=backward,
        other=other,
        total=model + optimizer + forward + backward + other,
    )


def _translation_layers(
    config: TranslationConfig, target: int, width: int
) -> tuple[dict[str, int], int]:
    """Return the bytes that each layer stores for the microbatch of a profile.

    The second value is the bytes that the last recomputed layers of the decoder store again.
    """
    model = config.model
    pairs, length = translation_batch(config)
    assert length <= BLOCK, "longer sentences are convolved in blocks"
    rows, heads = pairs * length, model.attention_heads
    wide = width * rows * model.embed_dim
    dropped = wide if model.dropout else 0
    norm = wide + 2 * width * rows

    def layer(kernel: int) -> int:
        """Return what encoder and decoder layers share, their own input included."""
        # The kernels in fp32 before and after DropConnect, the values by head, the band matrix.
        kernels = 4 * rows * heads * kernel * (2 if model.weight_dropout else 1)
        band = width * rows * heads * (length + kernel)
        convolution = 2 * wide + kernels + band
        feed_forward = wide + width * rows * model.ffn_size + dropped + norm
        return wide + convolution + wide + dropped + norm + feed_forward

    if model.attention_dropout:
        # Without a fused kernel queries, keys, values, weights, noise and their product are there
        # whole, all in fp32, beside the context.
        attention = 4 * (3 * rows * model.embed_dim + 3 * pairs * heads * length**2) + wide
    else:
        # Beside the statistics of each row of weights, the mask as numbers.
        attention = 4 * wide + 4 * rows * heads + width * rows
    attention += wide + dropped + norm
    found: dict[str, int] = {}
    again = 0
    for side, kernels, more in (
        ("encoder", model.encoder_kernels, 0),
        ("decoder", model.decoder_kernels, attention),
    ):
        for span in recompute_spans(len(kernels), config.recompute):
            wholes = [layer(kernels[number]) + more for number in range(span.start, span.stop)]
            again = sum(wholes) - wide if span.recomputed else 0
            for number in range(span.start, span.stop):
                first = wide if number == span.start else 0
                whole = wholes[number - span.start]
                found[f"{side}.layers.{number}"] = first if span.recomputed else whole
                if number == 0 and not span.recomputed:
                    # Which tokens are padding; the encoder's output, which all layers read.
                    found[f"{side}.layers.0"] += rows if side == "encoder" else wide
        found[f"{side}.layers.0"] += dropped  # the embedding's
    found[HEAD] = wide + width * rows * target + 2 * 4 * rows + rows
    return {name: size for name, size in found.items() if size}, again


def _widths(layers: Sequence[Layer], width: int) -> dict[str, int]:
    """Return the bytes of an entry of each parameter; normalizations are in fp32."""
    return {name: 4 if layer.kind == "norm" else width for layer in layers for name in layer.shapes}


@dataclass(frozen=True)
class _Settings:
    config: Config
    path: GradientPath


def _rank_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    config: Config,
    dims: ParallelDims,
    path: GradientPath,
    widths: Mapping[str, int],
) -> RankShapes:
    params = {
        name: ParamShape(name=name, logical_shape=shape, rows=shape[0])
        for name, shape in shapes.items()
    }
    stored = path.stored(config, params.values())
    entries = [p.entry(stored.get(p.name, p.numel), widths[p.name]) for p in params.values()]
    return RankShapes(
        params=params,
        buckets=plan_buckets(
            reversed(entries),
            cap=bucket_elements(config, dims.dp),
            alignment=slice_alignment(config),
        ),
        ranks=dims.dp,
        device=config.run.device or "cpu",
        stored=stored,
    )


def _states(
    states: StateBytes, shapes: RankShapes, widths: Mapping[str, int], config: Config
) -> tuple[int, int, int]:
    """Return the bytes of model, optimizer and scratch; a shared storage belongs to the model."""
    model = sum(widths[name] * param.numel for name, param in shapes.params.items())
    sharded = config.parallel.num_shards(shapes.ranks) > 1
    views = main_views(config, shapes)
    # Parameters that stay in fp32 in a 16-bit model are views, too.
    views |= {
        name
        for name in shapes.params
        if widths[name] == 4 and name not in shapes.stored and not sharded
    }
    shared = sum(widths[name] * shapes.params[name].numel for name in views)
    kept = dict(states.kept)
    scratch = kept.pop("scratch", 0) + kept.pop("offload buckets", 0)
    kept.pop("parameters")
    optimizer = sum(kept.values()) - shared
    return model, optimizer, scratch + sum(states.passing.values())
