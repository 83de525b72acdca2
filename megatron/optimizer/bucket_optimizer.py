"""The optimizer: fp32 master weights and moments in flat buckets, updated chunk by chunk.

Chunks of the buckets in which gradients were reduced stay in cache between widening, scaling,
updating and, if the reducer asks for it, recording the update.

If the reducer shards buckets (ZeRO-1), a rank keeps the states of its shards. The updated values of
a bucket are gathered while the next bucket is updated:

    bucket 0   update --> cast ~~~ gather ~~~> expand
    bucket 1              update --> cast ~~~ gather ~~~> expand
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.data_parallel.bucket import ALIGNMENT, GradBucket, ParamInfo, Slice
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.gradient_path import LayoutChange
from megatron.data_parallel.reducer import ReducedGrad, SparseIndex, Step
from megatron.optimizer.chunks import CPU_CHUNK, CUDA_CHUNK
from megatron.optimizer.distributed_optimizer import ShardUpdates, StateShard, bind, fill
from megatron.optimizer.host import beside
from megatron.optimizer.update_rules import Hyper, UpdateRule
from megatron.transfer import to_device

PARAM = "param"
"""The kind of state that the master weights are."""


@dataclass
class BucketState:
    """States of one bucket: 1-D fp32 tensors as long as its gradient, or as this rank's shard."""

    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]


class BucketOptimizer:
    """The optimizer that applies an `UpdateRule` to the buckets of an engine.

    A chunk has at most `most` entries. fp32 parameters that are stored whole become views of the
    master weights, unless those are sharded; 16-bit parameters get the rounded result from
    `layout.scatter`.
    """

    def __init__(self, engine: GradientEngine, rule: UpdateRule, *, most: int = CUDA_CHUNK) -> None:
        self.engine, self.rule = engine, rule
        self.applied = self.moments_since = 0
        self._device = engine.buckets[0].grad.device
        self._chunk = min(most, CPU_CHUNK if self._device.type == "cpu" else CUDA_CHUNK)
        assert self._chunk % ALIGNMENT == 0
        self._open()

    @property
    def states(self) -> list[BucketState]:
        """States of all buckets, in order, complete and safe to read or write."""
        return self._states

    def step(self, step: Step, *, lr: float, weight_decay: float) -> None:
        """Apply a good step; may overwrite its reduced values.

        Buckets are updated one after another, so that each waits only for its own mean. Buckets
        whose parameters do not decay use a weight decay of 0, unless the rule decays all.
        """
        self.applied += 1
        updates = ShardUpdates(self.engine)
        for bucket in self.engine.buckets:
            reduced = step.reduced.begun(bucket.index)
            decays = bucket.weight_decay or self.rule.decays_all
            hyper = Hyper(
                t=self.applied - self.moments_since,
                lr=lr,
                weight_decay=weight_decay if decays else 0.0,
            )
            if bucket.shard is None:
                self._update(bucket, reduced, step.factor, hyper)
            else:
                self._update(bucket, reduced, step.factor, hyper, out=updates.open(bucket))
                updates.send()
        updates.finish()

    def rewire(self) -> None:
        """Let the mask updater change the layout, after a step was applied and committed.

        Every rank calls this method after the same steps.
        """
        if (mask_updater := self.engine.mask_updater) is None:
            return
        # Batch step 14: change which entries exist.
        change = mask_updater.after_update(self.applied, self.engine.layout, self.weights())
        if change is not None:
            self.rebucket(change)

    def rebucket(self, change: LayoutChange) -> None:
        """Change the layout of engine and states. Collective as `GradientEngine.rebucket` is."""
        before, engine = self.engine.layout, self.engine
        old = {(kind, name): held for kind, name, held in self._held()}
        if change.reset_moments:
            # Bias correction counts the updates since the moments began.
            self.moments_since = self.applied
            old = {(kind, name): held for (kind, name), held in old.items() if kind == PARAM}
        self._states.clear()
        engine.rebucket(change.layout)
        # Convert bucket by bucket, so that old states are freed as new ones are allocated.
        for bucket in engine.buckets:
            self._states.append(self._allocate(bucket))
            for name, kind, flat in self._slices(bucket):
                if kind == PARAM:
                    self._bind(name, flat)
                held = old.pop((kind, name), None)
                if held is not None:
                    # Convert by way of the dense tensor, since layouts do not know each other.
                    param = engine.infos[name].param
                    whole = torch.zeros(param.shape, dtype=torch.float32, device=flat.device)
                    beside(before, flat, param).scatter(name, held.whole(), whole)
                    if name in change.anew:
                        whole.view(-1)[to_device(change.anew[name], whole.device)] = 0.0
                    fill(engine, name, flat, whole)
        self._size_scratch()
        self._bring_all_up()

    def weights(self) -> Iterator[tuple[ParamInfo, torch.Tensor]]:
        """Yield the master weights of each parameter's stored entries (1-D views).

        Sharded weights are copied one by one, collectively over the data-parallel group.
        """
        for kind, name, held in self._held():
            if kind == PARAM:
                yield self.engine.infos[name], held.whole()

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield every state as (kind, logical name, stored entries), for reading and loading.

        The kind is "param" for the master weight, else the name of the moment. The tensors are
        views; for sharded states of the entries of `GradBucket.kept_of`, possibly none.
        """
        for bucket in self.engine.buckets:
            for name, kind, flat in self._slices(bucket):
                yield kind, name, flat

    def whole_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield every state as `tensors` does, but with all stored entries on every rank.

        Sharded states are copied one by one, collectively over the data-parallel group.
        """
        for kind, name, held in self._held():
            yield kind, name, held.whole()

    def params_norm(self) -> float:
        """Return the L2 norm of the whole model's master weights. Collective over the world."""
        groups = self.engine.groups
        sums = torch.zeros(1, dtype=torch.float64, device=self.states[0].master.device)
        for bucket, state in zip(self.engine.buckets, self.states, strict=True):
            if self.engine.model_shard.owns(bucket):
                sums += state.master.double().square().sum()
        if self.is_sharded:
            groups.dp.all_reduce(sums, dist.ReduceOp.SUM)
        return math.sqrt(groups.sum_over_model(sums))

    @property
    def is_sharded(self) -> bool:
        """True if this rank keeps only a shard of the states."""
        return self.engine.buckets[0].shard is not None

    def loaded(self) -> None:
        """Update the parameters that are not views of the master weights, which were written to.

        For sharded states this is collective over the data-parallel group.
        """
        self._bring_all_up()
        if self.is_sharded:
            self.engine.reducer.stats()  # drop its bytes, which belong to no step

    def _bring_all_up(self) -> None:
        updates = ShardUpdates(self.engine)
        for bucket, state in zip(self.engine.buckets, self.states, strict=True):
            if bucket.shard is None:
                for name, where in bucket.slices.items():
                    self._bring_up(name, where.of(state.master))
            else:
                updates.open(bucket).copy_(state.master)
                updates.send()
        updates.finish()

    def _open(self) -> None:
        """Allocate states for the engine's buckets: the initial weights, and moments of zero."""
        self._states = [self._allocate(bucket) for bucket in self.engine.buckets]
        for bucket in self.engine.buckets:
            for name, kind, flat in self._slices(bucket):
                if kind == PARAM:
                    self._bind(name, flat)
        self._size_scratch()

    def _bind(self, name: str, flat: torch.Tensor) -> None:
        """Fill a master weight from the parameter, and share memory where possible."""
        bind(self.engine, name, flat)

    def _size_scratch(self) -> None:
        """Allocate scratch memory for the current buckets."""
        self._scratch = self._room()

    def _room(self) -> torch.Tensor:
        """Return an fp32 tensor on the device, as long as the longest chunk."""
        longest = max(bucket.kept.numel for bucket in self.engine.buckets)
        return torch.empty(min(self._chunk, longest), dtype=torch.float32, device=self._device)

    def _slices(self, bucket: GradBucket) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield name, kind and the entries that this rank keeps of every state of a bucket."""
        kinds, state = (PARAM, *self.rule.moments), self.states[bucket.index]
        for name, where in bucket.slices.items():
            kept = bucket.kept_of(name)
            # An empty slice may start anywhere.
            own = Slice(max(where.start + kept.start - bucket.kept.start, 0), kept.numel)
            for kind, flat in zip(kinds, (state.master, *state.moments), strict=True):
                yield name, kind, own.of(flat)

    def _held(self) -> Iterator[tuple[str, str, StateShard]]:
        """Yield kind, name and this rank's shard of every state."""
        for bucket in self.engine.buckets:
            for name, kind, flat in self._slices(bucket):
                yield kind, name, StateShard.of(bucket, name, flat)

    def _allocate(self, bucket: GradBucket) -> BucketState:
        def zeros() -> torch.Tensor:
            return torch.zeros(bucket.kept.numel, dtype=torch.float32, device=bucket.grad.device)

        return BucketState(zeros(), tuple(zeros() for _ in self.rule.moments))

    def _update(
        self,
        bucket: GradBucket,
        reduced: ReducedGrad,
        factor: float,
        hyper: Hyper,
        out: torch.Tensor | None = None,
    ) -> None:
        """Update one bucket; `out`, for this rank's shard, may overwrite consumed gradients."""
        reduced.wait_until(reduced.values.numel())
        if reduced.index is not None:
            self._update_sparse(bucket, reduced.index, reduced, factor, hyper)
            return
        keep = self.engine.wants_update
        assert not (keep and out is not None), "a shard's update would have no place"
        state = self.states[bucket.index]
        mean = bucket.kept.of(reduced.values) if reduced.part is None else reduced.values
        waiting = list(bucket.slices.items())
        for start in range(0, mean.numel(), self._chunk):
            cut = slice(start, min(start + self._chunk, mean.numel()))
            values, weight = mean[cut], state.master[cut]
            moments = [moment[cut] for moment in state.moments]
            old_weight = weight.clone() if keep else weight
            # Batch step 11: update master weights and moments.
            self.rule.apply(weight, self._scaled(values, factor), moments, hyper)
            if out is not None:
                out[cut].copy_(weight)
                continue
            if keep:
                values.copy_(self.rule.direction(old_weight, moments, hyper))
            # Update parameters while their master weights are still in cache.
            while waiting and waiting[0][1].start + waiting[0][1].numel <= cut.stop:
                name, where = waiting.pop(0)
                self._bring_up(name, where.of(state.master))

    def _update_sparse(
        self,
        bucket: GradBucket,
        index: SparseIndex,
        reduced: ReducedGrad,
        factor: float,
        hyper: Hyper,
    ) -> None:
        state = self.states[bucket.index]
        runs = index.runs if self.engine.wants_update else ()
        # The index updates all runs at once, so old weights are copied first if the update needs
        # them.
        weights = [state.master[run.start : run.stop] for run in runs]
        if hyper.weight_decay:
            weights = [weight.clone() for weight in weights]
        sent = hyper
        if reduced.unselected == "frozen" and hyper.weight_decay:
            # Weight decay needs no gradient, so frozen entries decay, too.
            state.master.mul_(hyper.shrink)
            sent = dataclasses.replace(hyper, weight_decay=0.0)
        # Batch step 11: update the selected entries.
        index.apply(self.rule, reduced, state.master, state.moments, sent, factor=factor)
        for run, weight in zip(runs, weights, strict=True):
            moments = [moment[run.start : run.stop] for moment in state.moments]
            values = reduced.values[run.values]
            waited = (
                None if reduced.steps_accumulated is None else reduced.steps_accumulated[run.values]
            )
            for start in range(0, values.numel(), self._chunk):
                cut = slice(start, start + self._chunk)
                mine = [moment[cut] for moment in moments]
                counts = None if waited is None else waited[cut]
                values[cut].copy_(self.rule.direction(weight[cut], mine, hyper, counts))
        for name, where in bucket.slices.items():
            self._bring_up(name, where.of(state.master))

    def _scaled(self, values: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the chunk in fp32 times factor, which is the chunk itself if nothing changes."""
        if factor == 1.0 and values.dtype == torch.float32:
            return values
        out = self._scratch[: values.numel()]
        if values.dtype == torch.float32:
            return torch.mul(values, factor, out=out)
        return out.copy_(values).mul_(factor)

    def _bring_up(self, name: str, master: torch.Tensor) -> None:
        """Batch step 12: write updated master weights to the parameter that the model reads."""
        self.engine.layout.scatter(name, master, self.engine.infos[name].param.detach())
