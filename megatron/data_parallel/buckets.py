"""Which parameters share a flat bucket, and the layout that stores all of their entries.

Bucketing is one pure function for every gradient path, of names, sizes and classes alone: ranks
that plan alike send alike, and `fingerprint` lets them compare.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.data_parallel.interface import ALIGNMENT, BucketLayout, ParamInfo, Slice

PIECE = 256 * 1024
"""Entries cast at a time on a CPU, so that they stay in its cache."""


class BucketClass(NamedTuple):
    """What all parameters of a bucket have in common. 1-D parameters keep to themselves, so that
    sparse paths can leave them dense whatever the grid (contract 5)."""

    matrix: bool
    tp_sharded: bool
    partial: bool
    tied: bool
    weight_decay: bool
    dtype: torch.dtype


class Entry(NamedTuple):
    """A parameter as the planner sees it: `numel` of its `entries` are stored; of a class."""

    name: str
    numel: int
    entries: int
    kind: BucketClass


@dataclass(frozen=True)
class BucketPlan:
    """Slices of one bucket to be; `numel` includes the gaps that align each slice."""

    kind: BucketClass
    slices: dict[str, Slice]
    numel: int


def entries_of(infos: Sequence[ParamInfo], layout: BucketLayout) -> list[Entry]:
    """What to plan for, in the order in which backward makes the gradients: last layer first."""
    return [
        Entry(
            info.name,
            layout.numel(info.name, info.param),
            info.param.numel(),
            BucketClass(
                matrix=info.param.dim() > 1,
                tp_sharded=info.cut is not None,
                partial=info.partial,
                tied=info.tied,
                weight_decay=info.weight_decay,
                dtype=info.param.dtype,
            ),
        )
        for info in reversed(infos)
    ]


def plan_buckets(entries: Iterable[Entry], *, cap: int) -> list[BucketPlan]:
    """Cut parameters, given in order of arrival, into buckets of at most `cap` entries, stored or
    not: a pruned network sends the same parameters together as a dense one, and overlaps as much.

    A parameter larger than the cap has a bucket of its own; so has a tied embedding. Buckets come
    in the order in which their last gradient arrives, but those that are summed over other groups
    first, which waits for the end of backward, come last, and tied ones very last (contract 8).
    """
    open_buckets: dict[BucketClass, list[Entry]] = {}
    closed: list[tuple[int, list[Entry]]] = []
    last_arrival: dict[BucketClass, int] = {}
    for position, entry in enumerate(entries):
        bucket = open_buckets.setdefault(entry.kind, [])
        if bucket and (entry.kind.tied or _length(bucket) + _aligned(entry.entries) > cap):
            closed.append((last_arrival[entry.kind], bucket))
            bucket = open_buckets[entry.kind] = []
        bucket.append(entry)
        last_arrival[entry.kind] = position
    closed += [(last_arrival[kind], bucket) for kind, bucket in open_buckets.items()]
    closed.sort(key=lambda item: (item[1][0].kind.tied, item[1][0].kind.partial, item[0]))
    return [_lay_out(bucket) for _, bucket in closed]


def fingerprint(plans: Sequence[BucketPlan], layout: BucketLayout) -> str:
    """Hex digest of bucketing and layout, compared over each data-parallel group at start."""
    text = [
        [str(plan.kind), {name: [s.start, s.numel] for name, s in plan.slices.items()}]
        for plan in plans
    ]
    return hashlib.sha256(json.dumps([text, layout.fingerprint()]).encode()).hexdigest()


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _length(bucket: list[Entry]) -> int:
    return sum(_aligned(entry.entries) for entry in bucket)


def _lay_out(bucket: list[Entry]) -> BucketPlan:
    slices: dict[str, Slice] = {}
    start = 0
    for entry in bucket:
        slices[entry.name] = Slice(start, entry.numel)
        start += _aligned(entry.numel)
    return BucketPlan(kind=bucket[0].kind, slices=slices, numel=start)


class DenseLayout:
    """Every coordinate exists: a parameter's slice is the parameter, flattened."""

    def numel(self, name: str, param: torch.Tensor) -> int:
        return param.numel()

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(dense.reshape(-1))

    def gather_add(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        flat = dense.reshape(-1)
        if flat.element_size() >= out.element_size() or flat.device.type != "cpu":
            out.add_(flat)
            return
        # torch would widen all of it first, in memory of its own.
        for sums, piece in zip(out.split(PIECE), flat.split(PIECE), strict=True):
            sums.add_(piece.to(out.dtype))

    def scatter(self, name: str, flat: torch.Tensor, param: torch.Tensor) -> None:
        if param.data_ptr() != flat.data_ptr():
            param.view(-1).copy_(flat)

    def bind(self, name: str, flat: torch.Tensor, leaves: Sequence[torch.nn.Parameter]) -> None:
        param = leaves[0].detach()
        flat.copy_(param.reshape(-1))
        if param.dtype == flat.dtype:
            for leaf in leaves:
                leaf.data = flat.view(param.shape)

    def mask(self, name: str) -> torch.Tensor | None:
        return None

    def fingerprint(self) -> str:
        return hashlib.sha256(b"dense").hexdigest()
