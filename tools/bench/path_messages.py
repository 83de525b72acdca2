"""What each method sends in a step, as messages of the alpha-beta model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.data_parallel.interface import ALIGNMENT
from tools.bench.alpha_beta import Link, Message, greedy_buckets
from tools.bench.methods import COMPUTE, Method

FP32, POSITION = 4, 4
VOTE = 32
"""Bytes that our ranks agree on a step with."""
MIB = 1 << 20
DDP_FIRST_BUCKET = MIB
HOOK_GAIN = 2
"""torch's PowerSGD hook sends whole what it would not make at least this much smaller."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes by name in the order of the forward pass, and the names of each bucket of ours."""

    shapes: Mapping[str, Sequence[int]]
    buckets: Sequence[Sequence[str]]

    def numel(self, name: str) -> int:
        """Entries of a parameter."""
        return math.prod(self.shapes[name])

    def is_matrix(self, name: str) -> bool:
        """Whether sparse paths compress it."""
        return len(self.shapes[name]) > 1

    def bytes_of(self, names: Sequence[str]) -> int:
        """fp32 bytes of these parameters."""
        return FP32 * sum(map(self.numel, names))


def messages(method: Method, sizes: Sizes, link: Link, *, interval: int) -> list[Message]:
    """Collectives of a step of `method`, in the order in which they are sent; a Radius step is one
    between two resamples of `interval` steps."""
    if method.kind == COMPUTE:
        return []
    if method.kind == "ddp":
        return _ddp(method, sizes, link)
    sent = [_bucket(method, sizes, names, link, interval) for names in sizes.buckets]
    late: list[Message] = []
    if method.kind == "powersgd":
        late = [
            Message(seconds=link.all_reduce(FP32 * method.rank * _columns(method, sizes, names)))
            for names in sizes.buckets
            if sizes.is_matrix(names[0])
        ]
    # The vote goes out when backward is over; PowerSGD's second factors wait for it.
    return [*sent, Message(seconds=link.all_reduce(VOTE)), *late]


def sent_share(method: Method, sizes: Sizes, *, interval: int) -> float:
    """Entries of matrices that a sparse Radius step sends over all of them."""
    numels = [sizes.numel(name) for name in sizes.shapes if sizes.is_matrix(name)]
    return sum(_selected(method, numel, interval) for numel in numels) / sum(numels)


def counted_share(sizes: Sizes, ranks: int, bytes_sent: float) -> float:
    """The same from the bytes that a rank says it sent by the ring model: what is left of them
    without the vectors, which are always sent whole, with the gaps that align them."""
    ring = 2 * (ranks - 1) / ranks
    vectors = [sizes.numel(name) for name in sizes.shapes if not sizes.is_matrix(name)]
    matrices = [name for name in sizes.shapes if sizes.is_matrix(name)]
    aligned = sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in vectors)
    return (bytes_sent / ring - FP32 * aligned) / sizes.bytes_of(matrices)


def _bucket(
    method: Method, sizes: Sizes, names: Sequence[str], link: Link, interval: int
) -> Message:
    if method.kind == "dense" or not sizes.is_matrix(names[0]):
        seconds = link.all_reduce(sizes.bytes_of(names))
    elif method.kind == "radius":
        kept = sum(_selected(method, sizes.numel(name), interval) for name in names)
        seconds = link.all_reduce(FP32 * kept)
    elif method.kind == "topk":
        kept = sum(math.ceil(method.density * sizes.numel(name)) for name in names)
        seconds = link.all_gather((FP32 + POSITION) * kept)
    else:
        rows = sum(sizes.shapes[n][0] for n in names if _is_smaller(method, sizes.shapes[n]))
        whole = [n for n in names if not _is_smaller(method, sizes.shapes[n])]
        seconds = link.all_reduce(FP32 * method.rank * rows + sizes.bytes_of(whole))
    return Message(seconds=seconds, names=tuple(names))


def _selected(method: Method, numel: int, interval: int) -> float:
    """Entries of a matrix that a Radius step sends: ceil(d n), with the rolling schedule also the
    T-th part that is sent densely."""
    kept = math.ceil(method.density * numel)
    return kept + (numel - kept) / interval if "rolling" in method.flags else kept


def _is_smaller(method: Method, shape: Sequence[int], gain: int = 1) -> bool:
    rows, columns = shape[0], math.prod(shape[1:])
    return len(shape) > 1 and method.rank * (rows + columns) * gain < rows * columns


def _columns(method: Method, sizes: Sizes, names: Sequence[str]) -> int:
    """Of all the compressed matrices among `names`."""
    shapes = [sizes.shapes[name] for name in names]
    return sum(math.prod(shape[1:]) for shape in shapes if _is_smaller(method, shape))


def _ddp(method: Method, sizes: Sizes, link: Link) -> list[Message]:
    names = list(sizes.shapes)[::-1]
    if method.hook == "powersgd":
        small = [n for n in names if _is_smaller(method, sizes.shapes[n], HOOK_GAIN)]
        whole = [n for n in names if n not in small]
        rows = sum(sizes.shapes[n][0] for n in small)
        payloads = (
            sizes.bytes_of(whole),
            FP32 * method.rank * rows,
            FP32 * method.rank * _columns(method, sizes, small),
        )
        return [Message(seconds=link.all_reduce(payload)) for payload in payloads]
    bytes_each = [(name, sizes.bytes_of([name])) for name in names]
    caps = [method.bucket_mb * MIB] if method.bucket_mb else [DDP_FIRST_BUCKET, 25 * MIB]
    share = 0.5 if method.hook == "fp16" else 1.0
    return [
        Message(seconds=link.all_reduce(share * sizes.bytes_of(bucket)), names=bucket)
        for bucket in greedy_buckets(bytes_each, caps=caps)
    ]
