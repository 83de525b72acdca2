"""A law of the rate of products by their shapes: a product is slower the smaller its dimensions.

A product of [m, k] and [k, n] reaches the share m / (m + d) n / (n + d) k / (k + d) of the rate of
a large one, where `d`, the `half` size, is the size at which a dimension alone halves the rate. It
is one constant for all products; with 0 all products reach the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config.sections import ModelConfig


class Product(NamedTuple):
    """A product of [m, k] and [k, n] on one rank, done `count` times."""

    m: float
    n: float
    k: float
    count: float = 1

    @property
    def flops(self) -> float:
        """Operations of all `count` products."""
        return 2.0 * self.m * self.n * self.k * self.count


def layer_products(model: ModelConfig, *, sequences: int, tp: int) -> Iterator[Product]:
    """Yield the products of a layer's forward pass with `sequences` samples."""
    rows, hidden = sequences * model.seq_length, model.hidden_size
    inner = model.head_dim * model.num_attention_heads
    keys = model.head_dim * model.query_groups
    yield Product(rows, (inner + 2 * keys) / tp, hidden)
    yield from attention_products(model, sequences=sequences, tp=tp)
    yield Product(rows, hidden, inner / tp)
    yield Product(rows, (2 if model.swiglu else 1) * model.ffn_size / tp, hidden)
    yield Product(rows, hidden, model.ffn_size / tp)


def attention_products(model: ModelConfig, *, sequences: int, tp: int) -> Iterator[Product]:
    """Yield the products of scores and of the context, one for each head and sample."""
    heads = sequences * model.num_attention_heads / tp
    yield Product(model.seq_length, model.seq_length, model.head_dim, heads)
    yield Product(model.seq_length, model.head_dim, model.seq_length, heads)


@dataclass(frozen=True)
class ShapeLaw:
    """The law with its constant, the `half` size in entries."""

    half: float

    def slowness(self, products: Iterable[Product]) -> float:
        """Return the time of products over their time at the rate of large ones, 1 or more."""
        flops = seconds = 0.0
        for each in products:
            flops += each.flops
            seconds += each.flops * math.prod(1 + self.half / size for size in each[:3])
        return seconds / flops
