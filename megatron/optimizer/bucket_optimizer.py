"""fp32 master weights and moments in flat buckets, updated chunk by chunk.

The stock optimizers step over parameters; ours steps over the buckets in which gradients were
reduced, in chunks that stay in cache between widening, scaling, updating and, for reducers that
ask for it, recording the update. It owns its states and is what saves them.

Where the reducer shards buckets (ZeRO-1), a rank keeps the states of its part of each. Once it has
updated that, the values that the model reads travel, while it updates the next bucket:

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
"""What the master weights are called among the kinds of state."""


@dataclass
class BucketState:
    """States of one bucket, 1-D fp32 tensors as long as its gradient, or as this rank's shard."""

    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]


class BucketOptimizer:
    """Applies an `UpdateRule` to the buckets of an engine, in chunks of at most `most` entries.

    Where parameters are fp32 and stored whole they become views of the master weights, unless
    those are sharded; 16-bit parameters get the rounded result from `layout.scatter`.
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
        """Those of every bucket, in order, to be read or written now."""
        return self._states

    def step(self, step: Step, *, lr: float, weight_decay: float) -> None:
        """Apply a good step: `lr` and `weight_decay` are this update's; buckets whose parameters
        do not decay use 0. The reduced values may be overwritten. Buckets are taken one after
        another, so that a mean that is still arriving is waited for when its turn comes."""
        self.applied += 1
        updates = ShardUpdates(self.engine)
        for bucket in self.engine.buckets:
            reduced = step.reduced.begun(bucket.index)
            hyper = Hyper(
                t=self.applied - self.moments_since,
                lr=lr,
                weight_decay=weight_decay if bucket.weight_decay else 0.0,
            )
            if bucket.shard is None:
                self._update(bucket, reduced, step.factor, hyper)
            else:
                self._update(bucket, reduced, step.factor, hyper, out=updates.open(bucket))
                updates.send()
        updates.finish()

    def rewire(self) -> None:
        """After a step that was applied and committed: let the gradient path change which
        coordinates exist. Every rank calls it after the same steps."""
        if (mask_updater := self.engine.mask_updater) is None:
            return
        # Batch step 14: change which entries exist.
        change = mask_updater.after_update(self.applied, self.engine.layout, self.weights())
        if change is not None:
            self.rebucket(change)

    def rebucket(self, change: LayoutChange) -> None:
        """Go over to other coordinates, for the engine and the states. Collective, as
        `GradientEngine.rebucket`."""
        before, engine = self.engine.layout, self.engine
        old = {(kind, name): held for kind, name, held in self._held()}
        if change.reset_moments:
            # Their bias is corrected by the updates that they have seen.
            self.moments_since = self.applied
            old = {(kind, name): held for (kind, name), held in old.items() if kind == PARAM}
        self._states.clear()
        engine.rebucket(change.layout)
        # Bucket by bucket: old states go as the new ones come.
        for bucket in engine.buckets:
            self._states.append(self._allocate(bucket))
            for name, kind, flat in self._slices(bucket):
                if kind == PARAM:
                    self._bind(name, flat)
                held = old.pop((kind, name), None)
                if held is not None:
                    # By way of the whole tensor: layouts need not know of each other.
                    param = engine.infos[name].param
                    whole = torch.zeros(param.shape, dtype=torch.float32, device=flat.device)
                    beside(before, flat, param).scatter(name, held.whole(), whole)
                    if name in change.anew:
                        whole.view(-1)[to_device(change.anew[name], whole.device)] = 0.0
                    fill(engine, name, flat, whole)
        self._size_scratch()
        self._bring_all_up()

    def weights(self) -> Iterator[tuple[ParamInfo, torch.Tensor]]:
        """The master weights of each parameter's stored entries: views, or where they are sharded
        copies, one by one, which is collective over the data-parallel group."""
        for kind, name, held in self._held():
            if kind == PARAM:
                yield self.engine.infos[name], held.whole()

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Every state as (kind, logical name, stored entries): kind is "param" for the master
        weight, else the moment's name. The tensors are views: writing to them loads them. Where
        states are sharded they are those of `GradBucket.kept_of`, of which there may be none."""
        for bucket in self.engine.buckets:
            for name, kind, flat in self._slices(bucket):
                yield kind, name, flat

    def whole_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The same, all stored entries on every rank: where states are sharded copies, one by one,
        which is collective over the data-parallel group."""
        for kind, name, held in self._held():
            yield kind, name, held.whole()

    def params_norm(self) -> float:
        """L2 norm of the whole model's master weights; what `--log-params-norm` prints.
        Collective over the world."""
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
        """Whether this rank keeps a part of the states."""
        return self.engine.buckets[0].shard is not None

    def loaded(self) -> None:
        """Master weights were written to: bring the parameters that are not views of them up to
        date. Where states are sharded it is collective over the data-parallel group."""
        self._bring_all_up()
        if self.is_sharded:
            self.engine.reducer.stats()  # what that sent is no step's

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
        """States for the engine's buckets: the parameters' weights, and moments of zero."""
        self._states = [self._allocate(bucket) for bucket in self.engine.buckets]
        for bucket in self.engine.buckets:
            for name, kind, flat in self._slices(bucket):
                if kind == PARAM:
                    self._bind(name, flat)
        self._size_scratch()

    def _bind(self, name: str, flat: torch.Tensor) -> None:
        """Fill a master weight from the parameter, and tie the two together."""
        bind(self.engine, name, flat)

    def _size_scratch(self) -> None:
        """Have room to compute in, for the buckets that there are now."""
        self._scratch = self._room()

    def _room(self) -> torch.Tensor:
        """fp32, on the device, for a chunk of any bucket."""
        longest = max(bucket.kept.numel for bucket in self.engine.buckets)
        return torch.empty(min(self._chunk, longest), dtype=torch.float32, device=self._device)

    def _slices(self, bucket: GradBucket) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Name, kind and the stored entries that this rank keeps of every state of a bucket."""
        kinds, state = (PARAM, *self.rule.moments), self.states[bucket.index]
        for name, where in bucket.slices.items():
            kept = bucket.kept_of(name)
            # Where there are none, any place will do.
            own = Slice(max(where.start + kept.start - bucket.kept.start, 0), kept.numel)
            for kind, flat in zip(kinds, (state.master, *state.moments), strict=True):
                yield name, kind, own.of(flat)

    def _held(self) -> Iterator[tuple[str, str, StateShard]]:
        """Kind, name and what this rank has of every state."""
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
        """`out`: where the updated values of this rank's shard go, in the dtype that the model
        reads; it may overwrite, entry by entry, the gradients of those and of earlier ones."""
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
            # Parameters are brought up to date while their master weights are still in cache.
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
        # The index takes all runs at once, so that old weights are copied whole where they matter.
        weights = [state.master[run.start : run.stop] for run in runs]
        if hyper.weight_decay:
            weights = [weight.clone() for weight in weights]
        sent = hyper
        if reduced.unselected == "frozen" and hyper.weight_decay:
            # Weight decay needs no gradient: an entry that waits for its turn must not miss it.
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
        """The chunk in fp32 times factor; the chunk itself where that is the same."""
        if factor == 1.0 and values.dtype == torch.float32:
            return values
        out = self._scratch[: values.numel()]
        if values.dtype == torch.float32:
            return torch.mul(values, factor, out=out)
        return out.copy_(values).mul_(factor)

    def _bring_up(self, name: str, master: torch.Tensor) -> None:
        """Batch step 12: put updated master weights into the parameter that the model reads."""
        self.engine.layout.scatter(name, master, self.engine.infos[name].param.detach())
