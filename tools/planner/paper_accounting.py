"""Training memory as Sohoni et al. 2019 count it: model, optimizer and activations. No torch.

The conventions (sections 2.1, 2.2 and 3.1 of the report) give the memory column of its table 3
within 0.06 MB, and that of table 4 with one fitted number for activations. MB are 10^6 bytes:

- Model: all parameters. Optimizer: a gradient and the momentum buffers, 1 with SGD and 2 with Adam.
- A sparse tensor of shape c_o x ... is a matrix of c_o rows in compressed-row storage: z values and
  z column numbers of ceil(log2(columns)) bits. The three or four copies share one index, which is
  counted with the model. Row pointers are not counted.
- 16 bit means 2 bytes an entry for everything but the parameters of batch normalization, their
  gradients and their momentum, which stay at 4 bytes.
- Activations: see `strategies`. Where normalizations are recomputed from cached means and inverse
  deviations, these vectors count too (appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.config import Config, GPTConfig
from megatron.errors import ConfigError
from megatron.low_memory.operation_graph import Graph, wide_resnet_graph
from megatron.low_memory.strategies import ActivationCourse, Strategy, activation_course
from megatron.model.dc_transformer_shapes import logical_shapes
from megatron.model.image_shapes import parameter_shapes, wide_resnet_layers
from megatron.tasks.translation_config import DCTransformerConfig
from megatron.tasks.vision_config import VisionConfig

Shapes = Mapping[str, Sequence[int]]
Bits = Literal[16, 32]
Optimizer = Literal["sgd", "adam"]
MOMENTA: Mapping[Optimizer, int] = {"sgd": 1, "adam": 2}
MB = 1e6
KINDS = ("model", "optimizer", "activations")
"""The kinds of memory of section 2.1."""


@dataclass(frozen=True, kw_only=True)
class PaperBytes:
    """Bytes by the report's three kinds.

    `statistics` are the cached means and inverse deviations from which normalizations are
    recomputed. They belong to the total, and not to the activations that the report's ratios
    divide.
    """

    model: int
    optimizer: int
    activations: int
    statistics: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.model + self.optimizer + self.activations + self.statistics

    @property
    def shares(self) -> dict[str, float]:
        """Each kind's share of the total, as in figure 1, statistics left out."""
        return {kind: getattr(self, kind) / self.total for kind in KINDS}


@dataclass(frozen=True, kw_only=True)
class CountedNetwork:
    """Parameters of a network and how the report stores them.

    Attributes:
        shapes: Shapes of the parameters by logical name, output dimension first.
        sparse: Names of the tensors that are pruned where a network is sparse.
        full_precision: Names of the parameters that 16-bit training keeps in fp32.
        optimizer: The optimizer, which decides the number of momentum buffers.
    """

    shapes: Shapes
    sparse: Collection[str]
    full_precision: Collection[str]
    optimizer: Optimizer

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def prunable(self) -> int:
        """Number of entries of the sparse tensors."""
        return sum(math.prod(self.shapes[name]) for name in self.sparse)

    @property
    def statistics(self) -> int:
        """Bytes of an fp32 mean and inverse deviation of each channel of a batch normalization.

        Batch normalizations, the parameters of full precision, have as many weights and biases.
        """
        return 4 * sum(math.prod(self.shapes[name]) for name in self.full_precision)

    def states(self, *, bits: Bits, nonzero: float = 1.0) -> tuple[int, int]:
        """Return the bytes of model and optimizer.

        Args:
            bits: Width of values.
            nonzero: Share of the sparse tensors' entries that are stored; 1 stores no index.
        """
        values = index_bits = 0
        for name, shape in self.shapes.items():
            entries = math.prod(shape)
            if name in self.sparse and nonzero < 1:
                entries = round(nonzero * entries)
                index_bits += entries * column_bits(shape)
            values += entries * (4 if name in self.full_precision else bits // 8)
        return values + -(-index_bits // 8), values * (1 + MOMENTA[self.optimizer])


def column_bits(shape: Sequence[int]) -> int:
    """Return ceil(log2(columns)) of a tensor as a matrix with a row for each output (3.1)."""
    return (math.prod(shape[1:]) - 1).bit_length()


def wide_resnet_network(
    *, depth: int = 28, width: float = 2, classes: int = 10, optimizer: Optimizer = "sgd"
) -> CountedNetwork:
    """Return a wide residual network.

    Sparse are the convolutions of the residual blocks: neither the first convolution nor the
    classifier nor the normalizations (footnote 2 of the report).
    """
    layers = wide_resnet_layers(depth=depth, width=width, classes=classes)
    shapes = parameter_shapes(layers)
    norms = [layer.name for layer in layers if layer.kind == "norm"]
    return CountedNetwork(
        shapes=shapes,
        sparse=[name for name in shapes if ".conv" in name],
        full_precision=[f"{norm}.{leaf}" for norm in norms for leaf in ("weight", "bias")],
        optimizer=optimizer,
    )


DICTIONARIES = (8848, 6632)
"""Entries of the German and the English dictionary of IWSLT'14 after 10,000 joint merges."""


def dynamic_conv_network(
    model: DCTransformerConfig | None = None,
    *,
    dictionaries: tuple[int, int] = DICTIONARIES,
    optimizer: Optimizer = "adam",
) -> CountedNetwork:
    """Return a DynamicConv Transformer (Wu et al. 2019).

    Sparse are the weights of the fully connected layers and both embeddings, and dense are the
    projections that make a kernel for each position, biases and norms (section 4.3).

    Args:
        model: Sizes of the model; the report's, which are the defaults of a run, if None.
        dictionaries: Entries of the source and of the target dictionary.
        optimizer: The optimizer.
    """
    source, target = dictionaries
    sizes = DCTransformerConfig() if model is None else model
    shapes = logical_shapes(sizes, source_size=source, target_size=target)
    sparse = [name for name, s in shapes.items() if len(s) == 2 and "weight_linear" not in name]
    return CountedNetwork(shapes=shapes, sparse=sparse, full_precision=(), optimizer=optimizer)


def gpt_network(shapes: Shapes, *, optimizer: Optimizer = "adam") -> CountedNetwork:
    """Return a GPT of these parameters; sparse are all matrices."""
    sparse = [name for name, shape in shapes.items() if len(shape) == 2]
    return CountedNetwork(shapes=shapes, sparse=sparse, full_precision=(), optimizer=optimizer)


def check_covered(config: Config, world: int) -> None:
    """Check that the report's rules cover a configuration.

    They cover one rank with dense gradients, wide residual networks, DC-Transformers (model and
    optimizer) and GPTs as `gpt_graph` describes them. Strategies and sparsity are arguments of the
    accounting and not settings of a run.

    Raises:
        ConfigError: A setting is not covered.
    """
    parallel, optimizer = config.parallel, config.optimizer
    # Each setting with its value and the value that is covered.
    settings: list[tuple[str, object, object]] = [
        ("tensor_model_parallel_size", parallel.tensor_model_parallel_size, 1),
        ("pipeline_model_parallel_size", parallel.pipeline_model_parallel_size, 1),
        ("world_size", world, 1),
        ("sequence_parallel", parallel.sequence_parallel, False),
        ("use_distributed_optimizer", parallel.use_distributed_optimizer, False),
        ("optimizer_cpu_offload", config.offload.optimizer_cpu_offload, False),
        ("main_params_dtype", optimizer.main_params_dtype, "fp32"),
        ("exp_avg_dtype", optimizer.exp_avg_dtype, "fp32"),
        ("exp_avg_sq_dtype", optimizer.exp_avg_sq_dtype, "fp32"),
        ("recompute_granularity", config.recompute.recompute_granularity, None),
        ("grad_path", config.gradient.grad_path, "dense"),
    ]
    if isinstance(config, GPTConfig):
        model = config.model
        settings += [
            ("swiglu", model.swiglu, False),
            ("normalization", model.normalization, "LayerNorm"),
            ("qk_layernorm", model.qk_layernorm, False),
            ("position_embedding_type", model.position_embedding_type, "learned_absolute"),
            ("num_query_groups", model.query_groups, model.num_attention_heads),
            ("kv_channels", model.head_dim, model.hidden_size // model.num_attention_heads),
            ("attention_dropout", model.attention_dropout, 0.0),
            ("hidden_dropout", model.hidden_dropout, 0.0),
        ]
    if isinstance(config, VisionConfig):
        kind = config.model.vision_backbone_type
        settings.append(("vision_backbone_type", kind, "wide-resnet"))
    for name, value, covered in settings:
        if value != covered:
            raise ConfigError(
                f"{name} {_told(value)}: the report's accounting covers {_told(covered)} alone; "
                "change it, or leave out --accounting paper"
            )


def _told(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A setting of table 3 or 4, with the total and the reduction that the report prints."""

    nonzero: float
    bits: Bits
    microbatch: int
    strategy: Strategy
    printed_mb: float
    printed_reduction: float | None = None


NONE, STAR_2 = Strategy("none"), Strategy("residual-star", 2)
_WIDE_RESNET: Sequence[tuple[float, Bits, int, Strategy, float, float | None]] = (
    # nonzero, bits, microbatch, strategy, MB, reduction
    (1.0, 32, 100, NONE, 404.8, None),
    (1.0, 16, 100, STAR_2, 42.6, 9.5),
    (1.0, 16, 10, STAR_2, 12.2, 33.2),
    (0.3, 16, 10, STAR_2, 6.7, 60.7),
    (0.2, 16, 10, STAR_2, 5.6, 72.2),
    (0.2, 16, 4, STAR_2, 3.6, 113.0),
    (0.1, 16, 4, STAR_2, 2.5, 160.8),
)
TABLE_3 = tuple(
    PaperRow(
        nonzero=nonzero,
        bits=bits,
        microbatch=microbatch,
        strategy=strategy,
        printed_mb=mb,
        printed_reduction=reduction,
    )
    for nonzero, bits, microbatch, strategy, mb, reduction in _WIDE_RESNET
)
"""WRN-28-2 on CIFAR-10 (table 3 of the report); the microbatch is in images."""
_DYNAMIC_CONV: Sequence[tuple[float, Bits, float, float]] = (
    (1.0, 32, 662, 4.4),
    (1.0, 16, 331, 8.7),
    (0.5, 32, 380, 7.6),
    (0.5, 16, 201, 14.4),
    (0.4, 32, 315, 9.2),
    (0.4, 16, 166, 17.4),
    (0.3, 32, 249, 11.6),
    (0.3, 16, 131, 22.1),
)
TABLE_4 = tuple(
    PaperRow(
        nonzero=nonzero,
        bits=bits,
        microbatch=250,
        strategy=Strategy("residual", 1),
        printed_mb=mb,
        printed_reduction=reduction,
    )
    for nonzero, bits, mb, reduction in _DYNAMIC_CONV
)
"""DC-Transformer on IWSLT'14 (table 4 of the report); the microbatch is in tokens."""
TABLE_4_BASELINE_MB = 2896
"""MB of 4,000 tokens in fp32 without checkpointing (caption of table 4)."""
TABLE_4_ACTIVATIONS_MB = 43.5
"""MB of activations in fp32, half of it in 16 bit, that give every total of table 4.

The report prints no activations of the DC-Transformer. Its eight totals, rounded to whole MB, and
our counts of model and optimizer leave between 43.45 and 43.54 MB.
"""


@dataclass(frozen=True)
class PaperAccount:
    """A network's memory in one setting, with its activations in the course of a step."""

    bytes: PaperBytes
    activations: ActivationCourse


def account(
    network: CountedNetwork,
    graph: Graph,
    *,
    bits: Bits = 32,
    nonzero: float = 1.0,
    microbatch: int,
    strategy: Strategy,
) -> PaperAccount:
    """Count the training memory of a network.

    Args:
        network: The parameters.
        graph: The operations on one sample.
        bits: Width of values.
        nonzero: Share of the sparse tensors' entries that exist.
        microbatch: Samples of a microbatch.
        strategy: The checkpointing strategy.
    """
    model, optimizer = network.states(bits=bits, nonzero=nonzero)
    course = activation_course(graph, strategy, batch=microbatch, entry_bytes=bits // 8)
    counted = PaperBytes(
        model=model,
        optimizer=optimizer,
        activations=course.peak.total,
        statistics=network.statistics if strategy.caches_statistics else 0,
    )
    return PaperAccount(counted, course)


def wide_resnet_account(
    *,
    bits: Bits = 32,
    nonzero: float = 1.0,
    microbatch: int = 100,
    strategy: Strategy = NONE,
    depth: int = 28,
    width: float = 2,
) -> PaperAccount:
    """Count the training memory of a wide residual network on CIFAR-10 (table 3).

    Args:
        bits: Width of values.
        nonzero: Share of the entries of the blocks' convolutions that exist.
        microbatch: Images of a microbatch.
        strategy: The checkpointing strategy.
        depth: Layers of the network.
        width: The factor of its channels.
    """
    return account(
        wide_resnet_network(depth=depth, width=width),
        wide_resnet_graph(depth=depth, width=width),
        bits=bits,
        nonzero=nonzero,
        microbatch=microbatch,
        strategy=strategy,
    )


def account_of(row: PaperRow) -> PaperAccount:
    """Count the setting of a row of `TABLE_3`."""
    return wide_resnet_account(
        bits=row.bits, nonzero=row.nonzero, microbatch=row.microbatch, strategy=row.strategy
    )


def translation_total(row: PaperRow) -> float:
    """Return the MB of a row of `TABLE_4`: model and optimizer counted, activations fitted."""
    states = dynamic_conv_network().states(bits=row.bits, nonzero=row.nonzero)
    return sum(states) / MB + fitted_activations(row)


def fitted_activations(row: PaperRow) -> float:
    """Return the MB of activations of a row of `TABLE_4`, which are fitted and not counted."""
    return TABLE_4_ACTIVATIONS_MB * row.bits / 32


def implied_activations(row: PaperRow) -> float:
    """Return the MB of activations that a row of `TABLE_4` implies: its total less our states."""
    states = dynamic_conv_network().states(bits=row.bits, nonzero=row.nonzero)
    return row.printed_mb - sum(states) / MB
