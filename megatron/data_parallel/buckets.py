"""A rank's parameters as `bucket_plan` cuts them into buckets, what lets ranks compare the result,
and the layout that stores all of their entries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.bucket_plan import BucketClass, BucketPlan, Entry
from megatron.data_parallel.interface import BucketLayout

PIECE = 256 * 1024
"""Entries cast at a time on a CPU, so that they stay in its cache."""


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


def fingerprint(plans: Sequence[BucketPlan], layout: BucketLayout) -> str:
    """Hex digest of bucketing and layout, compared over each data-parallel group at start."""
    text = [
        [str(plan.kind), {name: [s.start, s.numel] for name, s in plan.slices.items()}]
        for plan in plans
    ]
    return hashlib.sha256(json.dumps([text, layout.fingerprint()]).encode()).hexdigest()


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
