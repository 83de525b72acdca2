"""The messages of each method in a step, for the alpha-beta model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.data_parallel.bucket import ALIGNMENT
from radius.baselines.demo import ChunkGrid, DeMoConfig
from tools.bench.common.alpha_beta import AlphaBetaLink, AlphaBetaMessage, greedy_buckets
from tools.bench.common.methods import COMPUTE, Method

FP32, POSITION, SHORT_POSITION = 4, 4, 2
VOTE = 32
"""Bytes of the vote."""
MIB = 1 << 20
DDP_FIRST_BUCKET = MIB
HOOK_GAIN = 2
"""torch's PowerSGD hook sends a matrix whole unless factors are smaller by this ratio."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes by name in the order of the forward pass, and the names of each of our buckets.

    `stored` has the number of stored entries by parameter; a parameter that it lacks is stored
    whole. `entry_bytes` is the number of bytes of an entry that is sent.
    """

    shapes: Mapping[str, Sequence[int]]
    buckets: Sequence[Sequence[str]] = ()
    stored: Mapping[str, int] = field(default_factory=dict[str, int])
    entry_bytes: float = FP32

    def entries(self, name: str) -> int:
        """Return the entries of a parameter, stored or not."""
        return math.prod(self.shapes[name])

    def numel(self, name: str) -> int:
        """Return the stored entries of a parameter."""
        return self.stored.get(name, self.entries(name))

    @property
    def stored_share(self) -> float:
        """The share f of the SAMO paper: stored entries divided by all entries."""
        return sum(map(self.numel, self.shapes)) / sum(map(self.entries, self.shapes))

    @property
    def matrices(self) -> list[str]:
        """Names of the parameters in which sparse paths select entries."""
        return [name for name in self.shapes if self.is_matrix(name)]

    def is_matrix(self, name: str) -> bool:
        """Return whether sparse paths compress this parameter."""
        return len(self.shapes[name]) > 1

    def bytes_of(self, names: Sequence[str]) -> float:
        """Return the bytes of the stored entries of these parameters."""
        return self.entry_bytes * sum(map(self.numel, names))


def messages(
    method: Method, sizes: Sizes, link: AlphaBetaLink, *, interval: int
) -> list[AlphaBetaMessage]:
    """Return the collectives of a step of `method`, in the order in which they are sent.

    A Radius step is one between two resamples of `interval` steps.
    """
    if method.kind == COMPUTE:
        return []
    if method.kind == "ddp":
        return _ddp(method, sizes, link)
    sent = [_bucket(method, sizes, names, link, interval) for names in sizes.buckets]
    late: list[AlphaBetaMessage] = []
    if method.rank:
        matrices = [names for names in sizes.buckets if sizes.is_matrix(names[0])]
        columns = [_columns(method, sizes, names) for names in matrices]
        seconds = [link.all_reduce(FP32 * method.rank * each) for each in columns]
        if method.kind == "lowrank+sparse":
            seconds += [link.all_gather(_pairs(method, sizes, names)) for names in matrices]
        late = [AlphaBetaMessage(seconds=each) for each in seconds]
    # The vote is sent after backward; PowerSGD's second factors, and entries after them, wait for
    # it.
    return [*sent, AlphaBetaMessage(seconds=link.all_reduce(VOTE)), *late]


def sent_share(method: Method, sizes: Sizes, *, interval: int) -> float:
    """Return the share of matrix entries that a sparse Radius step sends: d, or f d of SAMO's."""
    sent = sum(_selected(method, sizes.numel(name), interval) for name in sizes.matrices)
    return sent / sum(map(sizes.entries, sizes.matrices))


def counted_share(sizes: Sizes, ranks: int, bytes_sent: float) -> float:
    """Return the share of matrix entries from the bytes that a rank reports by the ring model.

    Vectors, which are always sent whole, and alignment gaps are excluded.
    """
    ring = 2 * (ranks - 1) / ranks
    vectors = [sizes.numel(name) for name in sizes.shapes if not sizes.is_matrix(name)]
    aligned = sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in vectors)
    sent = bytes_sent / ring / sizes.entry_bytes - aligned
    return sent / sum(map(sizes.entries, sizes.matrices))


def _bucket(
    method: Method, sizes: Sizes, names: Sequence[str], link: AlphaBetaLink, interval: int
) -> AlphaBetaMessage:
    if method.kind in ("dense", "samo") or not sizes.is_matrix(names[0]):
        seconds = link.all_reduce(sizes.bytes_of(names))
    elif method.resamples:
        kept = sum(_selected(method, sizes.numel(name), interval) for name in names)
        seconds = link.all_reduce(sizes.entry_bytes * kept)
    elif method.kind == "topk":
        seconds = link.all_gather(_pairs(method, sizes, names))
    elif method.kind == "roundrobin":
        seconds = link.all_reduce(sizes.bytes_of(names) / method.parts)
    elif method.kind == "demo":
        options = DeMoConfig(demo_k=method.coefficients)
        sent = sum(ChunkGrid.of(sizes.shapes[name], options).sent for name in names)
        seconds = link.all_gather((FP32 + SHORT_POSITION) * sent)
    else:
        rows = sum(sizes.shapes[n][0] for n in names if _is_smaller(method, sizes.shapes[n]))
        whole = [n for n in names if not _is_smaller(method, sizes.shapes[n])]
        seconds = link.all_reduce(FP32 * method.rank * rows + sizes.bytes_of(whole))
    return AlphaBetaMessage(seconds=seconds, names=tuple(names))


def _selected(method: Method, numel: int, interval: int) -> float:
    """Return the number of entries of a matrix that a sparse Radius step sends.

    It is ceil(d n); the rolling schedule also sends a T-th of the other entries.
    """
    kept = math.ceil(method.density * numel)
    return kept + (numel - kept) / interval if "rolling" in method.flags else kept


def _pairs(method: Method, sizes: Sizes, names: Sequence[str]) -> float:
    """Return the bytes of the positions and values that a rank sends of its largest entries."""
    compressed = [n for n in names if not method.rank or _is_smaller(method, sizes.shapes[n])]
    kept = sum(math.ceil(method.density * sizes.numel(name)) for name in compressed)
    return (FP32 + POSITION) * kept


def _is_smaller(method: Method, shape: Sequence[int], gain: int = 1) -> bool:
    rows, columns = shape[0], math.prod(shape[1:])
    return len(shape) > 1 and method.rank * (rows + columns) * gain < rows * columns


def _columns(method: Method, sizes: Sizes, names: Sequence[str]) -> int:
    """Return the columns of all compressed matrices among `names`."""
    shapes = [sizes.shapes[name] for name in names]
    return sum(math.prod(shape[1:]) for shape in shapes if _is_smaller(method, shape))


def _ddp(method: Method, sizes: Sizes, link: AlphaBetaLink) -> list[AlphaBetaMessage]:
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
        return [AlphaBetaMessage(seconds=link.all_reduce(payload)) for payload in payloads]
    bytes_each = [(name, sizes.bytes_of([name])) for name in names]
    caps = [method.bucket_mb * MIB] if method.bucket_mb else [DDP_FIRST_BUCKET, 25 * MIB]
    share = 0.5 if method.hook == "fp16" else 1.0
    return [
        AlphaBetaMessage(seconds=link.all_reduce(share * sizes.bytes_of(bucket)), names=bucket)
        for bucket in greedy_buckets(bytes_each, caps=caps)
    ]
