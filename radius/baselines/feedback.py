"""The common part of the baselines: error feedback on matrices, all-reduce of the rest.

    offered = residual + gradient         reduce, into a second buffer
    offered - what was sent of it         reduce or wait, in place there
    -> residual                           commit exchanges the buffers, abort does nothing

So a dropped step needs no undo. It costs a second buffer, since the gradient's own buffer receives
the mean.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron.config import RefusedPair, known_length, refused_pair
from megatron.data_parallel.bucket import GradBucket, ParamInfo
from megatron.data_parallel.layout import BucketLayout
from megatron.data_parallel.reducer import (
    GradientReducer,
    PerEntryState,
    ReducedGrad,
    ReducerStats,
    StepContext,
    Work,
)
from megatron.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.data_parallel.exchange import Exchange
    from megatron.parallel.tensor_shard import ModelShard

BASELINE_PAIRS: tuple[RefusedPair, ...] = (
    refused_pair(
        "grad_wire",
        lambda c: c.gradient.grad_wire is not None,
        "the baselines encode gradients in their own way",
        "drop it, or give --grad-path dense, samo or radius",
    ),
    refused_pair(
        "fp16 with a loss scale that stays above 1 without accumulate_allreduce_grads_in_fp32",
        lambda c: (
            c.precision.grad_dtype == "float16"
            and max(c.precision.loss_scale or 0, c.precision.min_loss_scale) > 1
        ),
        "entries that waited for many steps, times the loss scale, may overflow in 16 bit at every "
        "later step",
        "give --accumulate-allreduce-grads-in-fp32, or let the loss scale fall to 1",
    ),
)
"""Refused pairs of every baseline."""


class CompressedWork(ABC):
    """A compressed reduction in progress, from `FeedbackReducer.compress`.

    `entries` is the number of entries that this rank sends.
    """

    entries: int

    @abstractmethod
    def wait(self) -> ReducedGrad:
        """Write the mean to the bucket's gradient; leave the unsent part in the offered buffers."""

    @abstractmethod
    def drop(self) -> None:
        """Let the collective end; its result is not needed."""

    def commit(self) -> None:  # noqa: B027  # most methods have no state but the residual
        """Save state that the method itself updates in this step."""


class FeedbackReducer(GradientReducer, ABC):
    """Reducer that compresses residual + gradient of matrices, and keeps the unsent part.

    Buckets are sent as on the dense path before `start_iter`, and always if they have a 1-D
    parameter or if `plan` returns no parameter for them. The residual belongs to this rank; it is
    fp32, in unscaled units, and excludes vocabulary padding. Each tensor-parallel rank compresses
    its part of a parameter as if the part were the whole, so the results depend on the grid.
    """

    name: str
    """The path's value of `--grad-path`."""
    prefix: str = ""
    """Prefix of the names of the path's settings, where it is not `name`."""

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        exchange: Exchange,
        *,
        start_iter: int,
        model_shard: ModelShard | None = None,
    ) -> None:
        from megatron.data_parallel.all_reduce import AllReduceReducer
        from megatron.parallel.tensor_shard import ModelShard

        super().__init__(exchange)
        self.model_shard = model_shard or ModelShard()
        self.start_iter = start_iter
        self.infos = {info.name: info for info in infos}
        self.offered: dict[str, torch.Tensor] = {}
        self.entries_sent = self.entries_stored = 0
        self._residual: dict[str, torch.Tensor] = {}
        self._dense = AllReduceReducer(exchange)
        self._names: dict[int, tuple[str, ...]] = {}
        self._work: dict[int, CompressedWork] = {}
        self.began = self._told = False
        self._notes: list[str] = []

    # ---- for subclasses ------------------------------------------------------------------------

    @property
    def sends_all_by(self) -> str:
        """The flags that make the path send everything, as the log names them; "" for others."""
        return ""

    @abstractmethod
    def plan(self, bucket: GradBucket) -> Sequence[str]:
        """Prepare for a bucket of matrices.

        Returns the parameters that need a residual; none to send the whole bucket densely.
        """

    @abstractmethod
    def compress(self, bucket: GradBucket, step: StepContext) -> CompressedWork:
        """Start to send a compressed form of `offer` of each planned parameter.

        Must not wait for a collective.
        """

    def offer(self, bucket: GradBucket, name: str, step: StepContext) -> torch.Tensor:
        """Return residual + gradient of the logical entries, fp32, unscaled.

        The remainder that is left in it when the step is committed is the next residual.
        """
        import torch

        residual, offered = self._residual[name], self.offered[name]
        gradient = bucket.slices[name].of(bucket.grad)[: residual.numel()]
        return torch.add(residual, gradient, alpha=1.0 / step.loss_scale, out=offered)

    # ---- GradientReducer -----------------------------------------------------------------------

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout | None = None) -> None:
        """Plan each bucket and allocate the residuals, which are 0."""
        import torch

        self._counted = [bucket.index for bucket in buckets if self.model_shard.owns(bucket)]
        for bucket in buckets:
            matrices = all(self.infos[name].param.dim() > 1 for name in bucket.slices)
            self._names[bucket.index] = tuple(self.plan(bucket)) if matrices else ()
            for name in self._names[bucket.index]:
                numel, device = self.infos[name].local_entries, bucket.grad.device
                self._residual[name] = torch.zeros(numel, dtype=torch.float32, device=device)
                self.offered[name] = torch.zeros_like(self._residual[name])

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        stored = sum(where.numel for where in bucket.slices.values())
        counted = bucket.index in self._counted
        self.entries_stored += stored * counted
        if step.t < self.start_iter or not self._names[bucket.index]:
            self.entries_sent += stored * counted
            return self._dense.reduce(bucket, step)
        if not self._told:
            self._told = True
            self._notes.append(f"{self.name}: gradients of matrices are compressed from here on")
        self._work[bucket.index] = work = self.compress(bucket, step)
        self.entries_sent += work.entries * counted
        return work

    def commit(self, bucket: GradBucket, update: torch.Tensor | None) -> None:
        work = self._work.pop(bucket.index, None)
        if work is None:
            return
        work.commit()
        self.began = True
        for name in self._names[bucket.index]:
            self._residual[name], self.offered[name] = self.offered[name], self._residual[name]

    def abort(self, bucket: GradBucket) -> None:
        self._work.pop(bucket.index, None)

    def inactive_reason(self, first: int, last: int) -> str:
        if self.start_iter <= last or not any(self._names.values()):
            return ""
        return (
            f"{self.prefix or self.name}_start_iter {self.start_iter} is past the last update of "
            f"this run, {last}; start at {first}, or train for longer"
        )

    def stats(self, *, full: bool = False) -> ReducerStats:
        dense, squares = self._dense.stats(), self._squared_residual() if full else 0.0
        matrices = sum(map(len, self._names.values()))
        mine = [self.entries_sent, self.entries_stored, squares, matrices]
        sent, stored, squares, matrices = self.model_shard.total(mine)
        if not matrices and not self._told:
            self._told = True
            flags = self.sends_all_by
            reason = f"{flags} sends everything" if flags else "none would become smaller"
            self._notes.append(
                f"{self.name}: compresses no matrix of this model, as {reason}; "
                "all gradients travel as with --grad-path dense"
            )
        stats = ReducerStats(
            bytes_sent=dense.bytes_sent,
            density=sent / stored if stored else 1.0,
            wait_seconds=dense.wait_seconds,
            extra={"residual_norm": math.sqrt(squares)} if full else {},
            notes=tuple(self._notes),
        )
        self.entries_sent = self.entries_stored = 0
        self._notes.clear()
        return stats

    def state_tensors(self) -> Iterator[tuple[str, PerEntryState]]:
        # Before the first compressed step every residual is 0.
        for name in self._residual if self.began else ():
            yield name, PerEntryState(param=name, values=partial(self._residual.__getitem__, name))

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        self.began = self._told = bool(own)
        for name, residual in own.items():
            if name in self._residual:
                self._residual[name].copy_(residual)
            else:
                # On this grid the parts are too small for factors to save anything.
                self._notes.append(f"{self.name}: sends {name} whole, what waited is dropped")

    def _squared_residual(self) -> float:
        """Return the squared norm of the residuals that this rank counts."""
        import torch

        names = [name for index in self._counted for name in self._names[index]]
        norms = [torch.linalg.vector_norm(self._residual[name]).double() for name in names]
        return float(torch.stack(norms).square().sum()) if norms else 0.0


def check_start(config: Config, name: str, start: int) -> None:
    """Raise `ConfigError` if the first compressed step is past the end of the run."""
    last = known_length(config)
    if last is not None and start > last:
        raise ConfigError(
            f"{name}: {start} is past the last step, {last}, and nothing would be compressed; "
            f"start at {last} or before, or give --grad-path dense"
        )
