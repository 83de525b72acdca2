"""What the baselines have in common: error feedback on matrices, all-reduce for everything else.

    offered = residual + gradient         reduce, into a second buffer
    offered - what was sent of it         reduce or wait, in place there
    -> residual                           commit exchanges the buffers, abort does nothing

A dropped step therefore costs nothing to undo. The second buffer is the price: the gradient's own
is where the mean has to go.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from megatron.data_parallel.dense import AllReduceReducer
from megatron.data_parallel.interface import (
    BucketUpdate,
    GradBucket,
    ParamInfo,
    Reduced,
    ReducerStats,
    StepContext,
    Work,
)

if TYPE_CHECKING:
    from megatron.parallel.groups import Group


class CompressedWork(ABC):
    """A compressed reduction under way, from `FeedbackReducer.compress`."""

    @abstractmethod
    def wait(self) -> Reduced:
        """Put the mean into the bucket's gradient, and see that the offered buffers hold what was
        not sent."""

    @abstractmethod
    def drop(self) -> None:
        """Let the collective end; its result is not needed."""

    def commit(self) -> None:  # noqa: B027  # most methods have no state but the residual
        """Keep what the method itself learned in this step."""


class FeedbackReducer(ABC):
    """Compresses residual + gradient of matrices; what is not sent is in the next residual.

    Steps before `start_iter` and buckets of which `plan` compresses nothing, those of 1-D
    parameters among them, travel as on the dense path. The residual belongs to this rank; it is
    fp32, in unscaled units, and leaves out vocabulary padding.
    """

    name: str
    """Its value of `--grad-path`."""
    carries = False

    def __init__(self, infos: Sequence[ParamInfo], group: Group, *, start_iter: int) -> None:
        self.group = group
        self.start_iter = start_iter
        self.infos = {info.name: info for info in infos}
        self.offered: dict[str, torch.Tensor] = {}
        self.bytes_sent = self.entries_sent = self.entries_stored = 0
        self.wait_seconds = 0.0
        self._residual: dict[str, torch.Tensor] = {}
        self._dense = AllReduceReducer(group)
        self._names: dict[int, tuple[str, ...]] = {}
        self._work: dict[int, CompressedWork] = {}
        self.began = self._told = False
        self._notes: list[str] = []

    # ---- what a method adds --------------------------------------------------------------------

    @abstractmethod
    def plan(self, bucket: GradBucket) -> Sequence[str]:
        """Prepare for a bucket of matrices; returns the parameters that need a residual, none to
        have the whole bucket sent densely."""

    @abstractmethod
    def compress(self, bucket: GradBucket, step: StepContext) -> CompressedWork:
        """Start sending what stands for `offer` of each planned parameter; must not wait for a
        collective."""

    def offer(self, bucket: GradBucket, name: str, step: StepContext) -> torch.Tensor:
        """residual + gradient of the logical entries, fp32, unscaled; what is left of it when the
        step is committed is the next residual."""
        residual, offered = self._residual[name], self.offered[name]
        gradient = bucket.slices[name].of(bucket.grad)[: residual.numel()]
        return torch.add(residual, gradient, alpha=1.0 / step.loss_scale, out=offered)

    # ---- GradientReducer -----------------------------------------------------------------------

    def attach(self, buckets: Sequence[GradBucket]) -> None:
        """Allocate the residuals."""
        self._dense.attach(buckets)
        for bucket in buckets:
            matrices = all(self.infos[name].param.dim() > 1 for name in bucket.slices)
            self._names[bucket.index] = tuple(self.plan(bucket)) if matrices else ()
            for name in self._names[bucket.index]:
                numel, device = math.prod(local_shape(self.infos[name])), bucket.grad.device
                self._residual[name] = torch.zeros(numel, dtype=torch.float32, device=device)
                self.offered[name] = torch.zeros_like(self._residual[name])

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        stored = sum(where.numel for where in bucket.slices.values())
        self.entries_stored += stored
        if step.t < self.start_iter or not self._names[bucket.index]:
            self.entries_sent += stored
            return self._dense.reduce(bucket, step)
        if not self._told:
            self._told = True
            self._notes.append(f"{self.name}: gradients of matrices are compressed from here on")
        self._work[bucket.index] = work = self.compress(bucket, step)
        return work

    def wants_update(self, step: StepContext) -> bool:
        return False

    def commit(self, bucket: GradBucket, update: BucketUpdate | None) -> None:
        work = self._work.pop(bucket.index, None)
        if work is None:
            return
        work.commit()
        self.began = True
        for name in self._names[bucket.index]:
            self._residual[name], self.offered[name] = self.offered[name], self._residual[name]

    def abort(self, bucket: GradBucket) -> None:
        self._work.pop(bucket.index, None)

    def why_idle(self, first: int, last: int) -> str:
        if self.start_iter <= last or not any(self._names.values()):
            return ""
        return (
            f"{self.name}_start_iter {self.start_iter} is past the last update of this run, "
            f"{last}; start at {first}, or train for longer"
        )

    def stats(self, *, full: bool = False) -> ReducerStats:
        dense = self._dense.stats()
        stats = ReducerStats(
            bytes_sent=dense.bytes_sent + self.bytes_sent,
            density=self.entries_sent / self.entries_stored if self.entries_stored else 1.0,
            wait_seconds=dense.wait_seconds + self.wait_seconds,
            extra={"residual_norm": self._residual_norm()} if full else {},
            notes=tuple(self._notes),
        )
        self.bytes_sent = self.entries_sent = self.entries_stored = 0
        self.wait_seconds = 0.0
        self._notes.clear()
        return stats

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Before the first compressed step every residual is 0.
        return iter(self._residual.items() if self.began else ())

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        self.began = self._told = bool(own)
        for name, residual in own.items():
            self._residual[name].copy_(residual.view(-1))

    # ---- for the methods -----------------------------------------------------------------------

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as blocked."""
        began = time.perf_counter()
        yield
        self.wait_seconds += time.perf_counter() - began

    def _residual_norm(self) -> float:
        """L2, of this rank."""
        norms = [torch.linalg.vector_norm(r).double() for r in self._residual.values()]
        return float(torch.stack(norms).square().sum().sqrt()) if norms else 0.0


def local_shape(info: ParamInfo) -> tuple[int, ...]:
    """Shape of what this rank holds of a parameter, vocabulary padding left out: the logical
    shape, or its shard where the parameter is cut over the tensor-parallel group."""
    return tuple(map(min, info.param.shape, info.logical_shape))
