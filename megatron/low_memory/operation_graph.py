"""Networks as lists of operations: sizes, what backward needs, FLOPs. Imports no torch.

The rules of what an operation keeps for backward are those of Sohoni et al. 2019 (section 2.2.2 and
appendix B): a convolution, a linear layer, a normalization and the loss keep their input, a ReLU
keeps one bit an entry, and additions, subsampling, padding and average pooling keep nothing. A
tensor that two operations need counts once. The input of the network counts, but for token ids.
By the same rules a GELU keeps its input, a softmax its output, a product of two activations both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron.model.image_shapes import Layer, blocks_of_group, wide_resnet_layers

INPUT = "image"
"""Name of the network's input."""
HEAD = "head"
"""The layer of what follows the last numbered layer: final norm, output layer, loss."""
Kind = Literal[
    "convolution", "linear", "norm", "relu", "add", "reshape", "pool", "loss",
    "embedding", "gelu", "softmax", "matmul",
]  # fmt: skip
KEEPS_INPUT: tuple[Kind, ...] = ("convolution", "linear", "norm", "gelu", "loss")
"""Kinds whose backward needs the input."""
PRODUCTS: tuple[Kind, ...] = ("convolution", "linear", "matmul")
"""Kinds whose floating-point operations count; the others are cheap beside these."""


@dataclass(frozen=True, kw_only=True)
class CountedOperation:
    """An operation of a network on one sample; its output has the operation's name.

    Attributes:
        name: Name of the operation and of its output.
        kind: What the operation does.
        inputs: Names of the tensors that it reads.
        size: Entries of the output.
        block: Number of the residual block; 0 is the stem, the highest one the head.
        flops: Floating-point operations of forward, two for a multiplication with an addition.
        ends_block: Whether the output is the output of a residual block or of the stem.
    """

    name: str
    kind: Kind
    inputs: tuple[str, ...]
    size: int
    block: int
    flops: int = 0
    ends_block: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tensors that backward needs, one for each storage."""
        if self.kind == "relu":
            return (bits_of(self.name),)
        if self.kind == "softmax":
            return (self.name,)
        if self.kind == "matmul":
            return self.inputs
        return self.inputs[:1] if self.kind in KEEPS_INPUT else ()


def bits_of(relu: str) -> str:
    """Return the name of the signs that a ReLU keeps."""
    return f"{relu} bits"


@dataclass(frozen=True)
class Graph:
    """A network's operations in forward order, for one sample of `input_size` entries."""

    operations: Sequence[CountedOperation]
    input_size: int

    @cached_property
    def producer(self) -> Mapping[str, CountedOperation]:
        """The operation that computes each tensor, signs of a ReLU included."""
        found = {op.name: op for op in self.operations}
        return found | {bits_of(op.name): op for op in self.operations if op.kind == "relu"}

    @cached_property
    def last_use(self) -> Mapping[str, int]:
        """The position of the first operation that reads each tensor or needs it in backward.

        Backward passes that operation last: the tensor can be freed behind it.
        """
        first: dict[str, int] = {}
        for position, op in enumerate(self.operations):
            for name in (*op.inputs, *op.needs):
                first.setdefault(name, position)
        return first

    @cached_property
    def needed(self) -> frozenset[str]:
        """Names of all tensors that some backward needs."""
        return frozenset(name for op in self.operations for name in op.needs)

    def bits(self, name: str) -> bool:
        """Return whether a tensor is the signs of a ReLU, one bit an entry."""
        return name != INPUT and name not in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(op.name for op in self.operations)

    def size(self, name: str) -> int:
        """Return the entries of a tensor of one sample."""
        return self.input_size if name == INPUT else self.producer[name].size

    @property
    def forward_flops(self) -> int:
        """FLOPs of the products of one forward pass of a sample."""
        return sum(op.flops for op in self.operations)

    @property
    def training_flops(self) -> int:
        """FLOPs of the products of forward and backward, which makes no gradient of the input."""
        to_input = sum(op.flops for op in self.operations if INPUT in op.inputs)
        return 3 * self.forward_flops - to_input


def wide_resnet_graph(
    *,
    depth: int = 28,
    width: float = 2,
    classes: int = 10,
    height: int = 32,
    image_width: int = 32,
) -> Graph:
    """Return the operations of a wide residual network with identity shortcuts.

    Sizes and FLOPs come from `wide_resnet_layers`. Each residual block is a block of the graph; the
    first convolution is block 0.

    Args:
        depth: 6 n + 4 layers for n blocks in each of three groups.
        width: The factor of the groups' channels 16, 32 and 64.
        classes: Number of classes.
        height: Height of the images in pixels.
        image_width: Width of the images in pixels.

    Raises:
        ValueError: The depth is not 6 n + 4.
    """
    layers = wide_resnet_layers(
        depth=depth, width=width, classes=classes, height=height, image_width=image_width
    )
    operations = list(_wide_resnet(layers, 3 * blocks_of_group(depth)))
    return Graph(operations, 3 * height * image_width)


def _wide_resnet(layers: Sequence[Layer], blocks: int) -> Iterator[CountedOperation]:
    def product(layer: Layer, inputs: str, block: int) -> CountedOperation:
        return CountedOperation(
            name=layer.name,
            kind="linear" if layer.kind == "linear" else "convolution",
            inputs=(inputs,),
            size=layer.outputs * layer.positions,
            block=block,
            flops=layer.forward_flops,
            ends_block=block == 0,
        )

    def normalized(norm: Layer, hidden: str, size: int, block: int) -> Iterator[CountedOperation]:
        yield CountedOperation(
            name=norm.name, kind="norm", inputs=(hidden,), size=size, block=block
        )
        relu = norm.name.replace("bn", "relu")
        yield CountedOperation(name=relu, kind="relu", inputs=(norm.name,), size=size, block=block)

    stem, *rest, norm, head = layers
    yield product(stem, INPUT, 0)
    hidden, size = stem.name, stem.outputs * stem.positions
    for block in range(1, blocks + 1):
        bn1, conv1, bn2, conv2 = rest[4 * (block - 1) : 4 * block]
        yield from normalized(bn1, hidden, size, block)
        yield product(conv1, bn1.name.replace("bn", "relu"), block)
        inner = conv1.outputs * conv1.positions
        yield from normalized(bn2, conv1.name, inner, block)
        yield product(conv2, bn2.name.replace("bn", "relu"), block)
        owner = conv2.name.removesuffix(".conv2")
        shortcut = hidden
        if inner != size:
            shortcut = f"{owner}.shortcut"
            yield CountedOperation(
                name=shortcut, kind="reshape", inputs=(hidden,), size=inner, block=block
            )
        hidden, size = f"{owner}.sum", inner
        yield CountedOperation(
            name=hidden,
            kind="add",
            inputs=(conv2.name, shortcut),
            size=size,
            block=block,
            ends_block=True,
        )
    last = blocks + 1
    yield from normalized(norm, hidden, size, last)
    yield CountedOperation(
        name="mean", kind="pool", inputs=("relu",), size=norm.outputs, block=last
    )
    yield product(head, "mean", last)
    yield CountedOperation(name="loss", kind="loss", inputs=(head.name,), size=1, block=last)


def gpt_graph(
    *, layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, length: int
) -> Graph:
    """Return the operations of a GPT with LayerNorm and GELU on one sequence.

    Attention is a product, a softmax and a product, as before fused kernels: the weights of each
    head are stored. Dropout is left out. Each layer is a block; the embedding is block 0.

    Args:
        layers: Number of transformer layers.
        hidden: Width of the network.
        heads: Attention heads of a layer, each hidden / heads wide.
        ffn: Width of the MLPs.
        vocabulary: Entries of the padded vocabulary.
        length: Tokens of a sequence.
    """
    shape = {"hidden": hidden, "heads": heads, "ffn": ffn, "length": length}
    return Graph(list(_gpt(layers, vocabulary, **shape)), 0)


def _gpt(
    layers: int, vocabulary: int, *, hidden: int, heads: int, ffn: int, length: int
) -> Iterator[CountedOperation]:
    wide, weights = length * hidden, heads * length * length
    block = 0

    def make(name: str, kind: Kind, *inputs: str, size: int, flops: int = 0) -> CountedOperation:
        return CountedOperation(
            name=name, kind=kind, inputs=inputs, size=size, block=block, flops=flops,
            ends_block=name == "embedding" or name.endswith("mlp_sum"),
        )  # fmt: skip

    def linear(name: str, inputs: str, columns: int, outputs: int) -> CountedOperation:
        flops = 2 * length * columns * outputs
        return make(name, "linear", inputs, size=length * outputs, flops=flops)

    yield make("embedding", "embedding", INPUT, size=wide)
    stream = "embedding"
    for block in range(1, layers + 1):  # noqa: B007 (`make` reads it)
        at = f"layers.{block - 1}"
        yield make(f"{at}.input_norm", "norm", stream, size=wide)
        yield linear(f"{at}.query_key_value", f"{at}.input_norm", hidden, 3 * hidden)
        product = 2 * weights * (hidden // heads)
        mixed = f"{at}.query_key_value"
        yield make(f"{at}.scores", "matmul", mixed, size=weights, flops=product)
        yield make(f"{at}.weights", "softmax", f"{at}.scores", size=weights)
        yield make(f"{at}.context", "matmul", f"{at}.weights", mixed, size=wide, flops=product)
        yield linear(f"{at}.dense", f"{at}.context", hidden, hidden)
        yield make(f"{at}.attention_sum", "add", f"{at}.dense", stream, size=wide)
        yield make(f"{at}.post_norm", "norm", f"{at}.attention_sum", size=wide)
        yield linear(f"{at}.up", f"{at}.post_norm", hidden, ffn)
        yield make(f"{at}.gelu", "gelu", f"{at}.up", size=length * ffn)
        yield linear(f"{at}.down", f"{at}.gelu", ffn, hidden)
        stream = f"{at}.mlp_sum"
        yield make(stream, "add", f"{at}.down", f"{at}.attention_sum", size=wide)
    block = layers + 1
    yield make("final_norm", "norm", stream, size=wide)
    yield linear("logits", "final_norm", hidden, vocabulary)
    yield make("loss", "loss", "logits", size=length)
