"""Tensors that checkpointing strategies keep and recompute, by operation. Imports no torch.

The strategies are those of Sohoni et al. 2019, section 3.4, on an `operation_graph.Graph`:

    none            keep all that backward needs
    every-m         keep what passes between runs of m nodes; a node needs its input in backward
    no-norm         discard what normalizations, their ReLUs and pooling make, recompute it (NO-BN)
    residual-m      keep the output of every m-th residual block (RESIDUAL-m)
    residual-star-m as residual-m; keep the other blocks' outputs and the first convolution of the
                    block in backward while a segment is recomputed, and always discard what
                    normalizations and ReLUs make (RESIDUAL-m*)

Memory is counted as appendix B of the report does: at each operation of backward, all that is
stored at that time and one gradient of a hidden state. Temporaries of single operations and, while
a tensor is recomputed, those on the way to it do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.low_memory.operation_graph import (
    INPUT,
    PRODUCTS,
    CountedOperation,
    Graph,
    bits_of,
)

StrategyName = Literal["none", "every", "no-norm", "residual", "residual-star"]
CHEAP = ("norm", "relu", "pool")
"""Kinds whose outputs no-norm and residual-star discard."""


@dataclass(frozen=True)
class Strategy:
    """A checkpointing strategy; `m` is the length of its runs of nodes or residual blocks."""

    name: StrategyName
    m: int = 1

    def __str__(self) -> str:
        return f"{self.name}-{self.m}" if self._cuts else self.name

    @property
    def _cuts(self) -> bool:
        return self.name in ("every", "residual", "residual-star")

    @property
    def caches_statistics(self) -> bool:
        """Whether normalizations are recomputed from a cached mean and deviation."""
        return self.name in ("no-norm", "residual-star")

    def segments(self, graph: Graph) -> list[int]:
        """Return the number of the segment of each operation, in forward order."""
        found: list[int] = []
        nodes = 0
        for op in graph.operations:
            if self.name == "every":
                found.append(nodes // self.m)
                nodes += bool(op.needs)
            else:  # the stem belongs to the first segment
                found.append((max(op.block, 1) - 1) // self.m if self._cuts else 0)
        return found

    def kept(self, graph: Graph) -> frozenset[str]:
        """Return the tensors that the forward pass keeps."""
        if self.name == "none":
            return graph.needed
        if self.name == "no-norm":
            return frozenset(
                name
                for name in graph.needed
                if name == INPUT or graph.producer[name].kind not in CHEAP
            )
        segment = dict(zip((op.name for op in graph.operations), self.segments(graph), strict=True))
        crosses = {
            name
            for op in graph.operations
            for name in op.inputs
            if name == INPUT or segment[name] < segment[op.name]
        }
        return frozenset(crosses)

    def retains(self, graph: Graph) -> Callable[[str, CountedOperation], bool]:
        """Return the test whether a tensor, recomputed for an operation's backward, is kept on."""
        if self.name == "no-norm":
            return lambda name, op: False
        if self.name == "residual-star":
            return lambda name, op: _star_keeps(graph, name, op)
        return lambda name, op: name in graph.needed


def _star_keeps(graph: Graph, name: str, op: CountedOperation) -> bool:
    """Return whether residual-star keeps a tensor: outputs of blocks, conv1 of this block."""
    made = graph.producer[name]
    is_first = made.kind in PRODUCTS and name in graph.needed and made.block == op.block
    return not graph.bits(name) and (made.ends_block or is_first)


@dataclass(frozen=True)
class TimelinePoint:
    """Bytes at one operation of a pass: activations that are stored, and the gradient on its way.

    In forward the bytes are those after the operation, in backward those at the operation.
    """

    operation: str
    is_backward: bool
    block: int
    stored: int
    gradient: int

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.stored + self.gradient


@dataclass(frozen=True, kw_only=True)
class ActivationCourse:
    """Activations of one microbatch in the course of forward and backward.

    `recomputed_flops` are those of products, `recomputed_entries` the outputs of other operations,
    both of the whole microbatch.
    """

    moments: tuple[TimelinePoint, ...]
    training_flops: int
    recomputed_flops: int
    recomputed_entries: int

    @property
    def peak(self) -> TimelinePoint:
        """The point with the most bytes, of equal ones the first."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def flops_ratio(self) -> float:
        """FLOPs of forward, backward and recomputation divided by those of the first two."""
        return 1 + self.recomputed_flops / self.training_flops


def activation_course(
    graph: Graph, strategy: Strategy, *, batch: int, entry_bytes: int
) -> ActivationCourse:
    """Count the activations and the recomputation of a strategy.

    Args:
        graph: The network.
        strategy: What is kept and recomputed.
        batch: Samples of a microbatch.
        entry_bytes: Bytes of an entry of an activation; signs of a ReLU take a bit.
    """
    count = _Count(graph, strategy)
    moments = tuple(
        TimelinePoint(op.name, back, op.block, _bytes(entries, bits, batch, entry_bytes), each)
        for op, back, entries, bits, gradient in count.run()
        for each in [gradient * batch * entry_bytes]
    )
    return ActivationCourse(
        moments=moments,
        training_flops=graph.training_flops * batch,
        recomputed_flops=count.flops * batch,
        recomputed_entries=count.entries * batch,
    )


def stored_entries(graph: Graph, names: Collection[str]) -> tuple[int, int]:
    """Return the entries and the bits of some tensors of one sample."""
    bits = sum(graph.size(name) for name in names if graph.bits(name))
    return sum(graph.size(name) for name in names) - bits, bits


def _bytes(entries: int, bits: int, batch: int, entry_bytes: int) -> int:
    return entries * batch * entry_bytes + -(-bits * batch // 8)


class _Count:
    """Plays forward and backward of one sample, with what is stored as a set of names."""

    def __init__(self, graph: Graph, strategy: Strategy) -> None:
        self._graph, self._retains = graph, strategy.retains(graph)
        self._kept = strategy.kept(graph)
        self._stored = {INPUT} & self._kept
        self.flops = self.entries = 0

    def run(self) -> Iterator[tuple[CountedOperation, bool, int, int, int]]:
        """Yield operation, pass, stored entries, stored bits and entries of the gradient."""
        operations = self._graph.operations
        for op in operations:
            self._stored |= {op.name, bits_of(op.name)} & self._kept
            yield (op, False, *stored_entries(self._graph, self._stored), 0)
        for position, op in reversed(list(enumerate(operations))):
            passing = self._obtain(op, position)
            gradients = [op.size, *(self._graph.size(n) for n in op.inputs if n != INPUT)]
            yield (op, True, *stored_entries(self._graph, self._stored), max(gradients))
            self._stored -= passing
            self._stored -= {
                name for name in self._stored if self._graph.last_use.get(name) == position
            }

    def _obtain(self, op: CountedOperation, position: int) -> set[str]:
        """Recompute what the backward of `op` needs; return what is not kept behind it."""
        made: set[str] = set()
        for name in op.needs:
            self._make(name, made)
        ahead = {name for name in made if self._graph.last_use[name] <= position}
        retained = {name for name in ahead if self._retains(name, op)}
        passing = (made & set(op.needs)) - retained
        # The signs of a ReLU come with its output and serve its own backward, which is next.
        signs = {bits_of(name) for name in passing} & made
        self._stored |= retained | passing | signs
        return passing

    def _make(self, name: str, made: set[str]) -> None:
        if name in self._stored or name in made:
            return
        op = self._graph.producer[name]
        for other in op.inputs:
            self._make(other, made)
        made |= {op.name, *op.needs} if op.kind == "relu" else {op.name}
        self.flops += op.flops
        self.entries += 0 if op.kind in PRODUCTS else op.size
