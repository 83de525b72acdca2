"""Measured model state: bytes of a trainer's tensors, and gradients alive during backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.tensor_parallel import products
from megatron.training import Trainer
from samo.memory import POSITION_BYTES, state_bytes
from tools.bench.common.tensors import WholeGradients, bytes_of, storages

KINDS = ("parameters", "gradients", "master", "moments", "index", "scratch", "other")


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Bytes by kind (`KINDS`) for `entries` parameters.

    `stored` of them have states, and `indexed` of these are in tensors with an index. `scratch` is
    the optimizer's; `other` is any other tensor made since the count began.
    """

    bytes: Mapping[str, int]
    entries: int
    stored: int
    indexed: int

    @property
    def f(self) -> float:
        """Stored entries over all, as in the SAMO paper."""
        return self.stored / self.entries

    @property
    def each(self) -> float:
        """Bytes per parameter, of all kinds."""
        return sum(self.bytes.values()) / self.entries

    def expected(self, grad_bytes: int, param_bytes: int = 2, *, moments: int = 2) -> float:
        """Return the bytes per parameter that `samo.memory.state_bytes` predicts for a CPU."""
        kinds = state_bytes(
            self.entries,
            self.stored,
            index=POSITION_BYTES * self.indexed,
            param_bytes=param_bytes,
            grad_bytes=grad_bytes,
            moments=moments,
        )
        return sum(kinds.values()) / self.entries


def count(optimizer: BucketOptimizer, before: Mapping[int, int]) -> ModelState:
    """Count the bytes of the tensors of a trainer by kind.

    Storages that existed `before` (as `tensors.storages` returns them) do not count as `other`.
    """
    engine = optimizer.engine
    slices = [(info, where.numel) for info, _, where in engine.slices()]
    leaves = [leaf for info, _ in slices for leaf in info.leaves]
    tensors: dict[str, Iterable[torch.Tensor]] = {
        "parameters": leaves,
        "gradients": [bucket.grad for bucket in engine.buckets],
        "master": [state.master for state in optimizer.states],
        "moments": [moment for state in optimizer.states for moment in state.moments],
        "scratch": [optimizer._scratch],
    }
    named = {kind: bytes_of(those) for kind, those in tensors.items()}
    known = {at for of_kind in named.values() for at in of_kind}
    kinds = {kind: sum(of_kind.values()) for kind, of_kind in named.items()}
    kinds["index"] = getattr(engine.layout, "nbytes", 0)
    others = (size for at, size in storages().items() if at not in known and at not in before)
    kinds["other"] = sum(others) - kinds["index"]
    entries = sum(math.prod(info.logical_shape) for info, _ in slices)
    # Vocabulary padding is stored if the tensor is stored whole.
    stored = [(numel, math.prod(info.logical_shape)) for info, numel in slices]
    return ModelState(
        bytes={kind: kinds[kind] for kind in KINDS},
        entries=entries,
        stored=sum(min(numel, whole) for numel, whole in stored),
        indexed=sum(numel for numel, whole in stored if numel < whole),
    )


def watch_gradients(trainer: Trainer) -> WholeGradients:
    """Count the dense gradients of matrices in every later backward of the trainer.

    A CPU without 16-bit products widens a slice of a weight at a time (`_WIDENED_ELEMENTS`). In a
    small model the slice would be the whole weight and count as a gradient, so slices are made
    smaller here.
    """
    infos = trainer.engine.infos.values()
    watch = WholeGradients(tuple(info.param.shape) for info in infos if info.param.dim() > 1)
    backward = trainer.stage.backward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with watch, mock.patch.object(products, "_WIDENED_ELEMENTS", 256):
            return backward(*args, **kwargs)

    trainer.stage.backward = watched
    return watch
