"""The optimizer: master weights and moments in flat buckets, updated chunk by chunk.

States are fp32, or of matrices in the formats of `state_formats`; the arithmetic is fp32 always.

Chunks of the buckets in which gradients were reduced stay in cache between widening, scaling,
updating and, if the reducer asks for it, recording the update.

If the reducer shards buckets (ZeRO-1), a rank keeps the states of its shards. The updated values of
a bucket are gathered while the next bucket is updated:

    bucket 0   update --> cast ~~~ gather ~~~> expand
    bucket 1              update --> cast ~~~ gather ~~~> expand

or, with `overlap_param_gather`, while the next forward pass runs (`param_gather`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.data_parallel.bucket import ALIGNMENT, STATE_BLOCK, GradBucket, ParamInfo, Slice
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.gradient_path import LayoutChange
from megatron.data_parallel.reducer import ReducedGrad, SparseIndex, Step
from megatron.optimizer.chunks import CPU_CHUNK, CUDA_CHUNK, CUDA_CODED_CHUNK, coded_chunk
from megatron.optimizer.coded_update import GradChunk, SparseGrad, fill_runs, update_chunk
from megatron.optimizer.distributed_optimizer import ShardUpdates, StateShard, bind, encode
from megatron.optimizer.host import beside
from megatron.optimizer.param_gather import ParamGather
from megatron.optimizer.rounding import RandomBits
from megatron.optimizer.state_formats import (
    FP32,
    StateFormat,
    StateFormats,
    StateVector,
    vector_of,
    write_all,
)
from megatron.optimizer.update_rules import Hyper, UpdateRule
from megatron.sparse.shard import FlatShard

PARAM = "param"
"""The kind of state that the master weights are."""


@dataclass
class BucketState:
    """States of one bucket, as long as its gradient, or as this rank's shard.

    `vectors` are the master weights, then the moments in the rule's order. If this rank's shard is
    part of the parameters' storage, `params` is that storage: all shards, in rank order.
    """

    vectors: tuple[StateVector, ...]
    params: torch.Tensor | None = None

    @property
    def master(self) -> torch.Tensor:
        """The master weights, 1-D in their dtype."""
        return self.vectors[0].values

    @property
    def moments(self) -> tuple[torch.Tensor, ...]:
        """The moments, 1-D in their dtypes."""
        return tuple(vector.values for vector in self.vectors[1:])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, with scales and compensations."""
        return [tensor for vector in self.vectors for tensor in vector.tensors]

    def cut(self, start: int, stop: int) -> BucketState:
        """Return a view of the states of positions `[start, stop)`; `start` begins a block."""
        return BucketState(tuple(vector.cut(start, stop) for vector in self.vectors))

    @property
    def formats(self) -> tuple[StateFormat, ...]:
        """The formats of master weights and moments."""
        return tuple(vector.format for vector in self.vectors)

    @property
    def is_fp32(self) -> bool:
        """True if all states are fp32."""
        return all(vector.is_fp32 for vector in self.vectors)


class BucketOptimizer:
    """The optimizer that applies an `UpdateRule` to the buckets of an engine.

    A chunk has at most `most` entries. Parameters that are stored whole become views of master
    weights of their dtype; others get the rounded result from `layout.scatter`. Sharded fp32 master
    weights are copies. `formats` are the formats of the states.
    """

    def __init__(
        self,
        engine: GradientEngine,
        rule: UpdateRule,
        *,
        most: int = CUDA_CHUNK,
        formats: StateFormats | None = None,
    ) -> None:
        self.engine, self.rule = engine, rule
        self.formats = formats or StateFormats()
        self.applied = 0
        self._updates = ShardUpdates(engine)
        self._device = engine.buckets[0].grad.device
        self._chunk = min(most, CPU_CHUNK if self._device.type == "cpu" else CUDA_CHUNK)
        assert self._chunk % ALIGNMENT == 0
        self._coded_chunk = coded_chunk(self._chunk, self._device.type)
        least = STATE_BLOCK if self.formats.has_blocks else ALIGNMENT
        assert all(bucket.alignment % least == 0 for bucket in engine.buckets)
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
        updates = self._updates
        for bucket in updates.buckets:
            reduced = step.reduced.begun(bucket.index)
            decays = bucket.weight_decay or self.rule.decays_all
            hyper = Hyper(
                t=self.applied,
                lr=lr,
                weight_decay=weight_decay if decays else 0.0,
            )
            if bucket.shard is None:
                self._update(bucket, reduced, step.factor, hyper)
            else:
                self._update(bucket, reduced, step.factor, hyper, out=updates.open(bucket))
                updates.send()
        updates.settle()

    def overlap_param_gather(self, modules: Iterable[torch.nn.Module]) -> None:
        """Let `step` leave all-gathers in progress, for which `modules` wait in their forward pass.

        Everything else that reads parameters must call `finish_param_gather` first. The states must
        be sharded, and `modules`, the model, must be complete and compiled, if at all.
        """
        assert self.is_sharded, "whole states need no all-gather"
        self._updates = ParamGather(self.engine, modules)

    def finish_param_gather(self) -> None:
        """Wait until all parameters have their values of the last step.

        This returns at once, unless `overlap_param_gather` was called.
        """
        self._updates.finish()

    def end_step(self, iteration: int) -> None:
        """Average the replicas' weights if a round of local steps ends with this attempted step.

        Every rank calls this method after each step, applied or skipped. Collective over the
        data-parallel group.
        """
        if (local := self.engine.local_steps) is not None:
            self._copy_buckets_to_params(local.end_step(iteration, self._masters()))

    def end_round(self) -> None:
        """End the round of local steps that an earlier start left. Collective as `end_step`."""
        assert self.engine.local_steps is not None, "called for a run of local steps"
        self._copy_buckets_to_params(self.engine.local_steps.end_round(self._masters()))

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Hold in the context, on every rank, the weights that data-parallel ranks have in common.

        Inside a round of local steps these are the anchor; otherwise nothing changes. All
        parameters are up to date.
        """
        self.finish_param_gather()
        self._swap_anchors()
        try:
            yield
        finally:
            self._swap_anchors()

    def update_masks(self) -> None:
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
        self.finish_param_gather()
        before, engine = self.engine.layout, self.engine
        old = {(kind, name): held for kind, name, held in self._held()}
        if change.reset_moments:
            old = {(kind, name): held for (kind, name), held in old.items() if kind == PARAM}
        self._states.clear()
        engine.rebucket(change.layout)
        # Convert bucket by bucket, so that old states are freed as new ones are allocated.
        for bucket in engine.buckets:
            self._states.append(self._allocate(bucket))
            for name, kind, state in self._slices(bucket):
                if kind == PARAM:
                    self._bind(name, state.values)
                held = old.pop((kind, name), None)
                if held is not None:
                    # Convert by way of the dense tensor, since layouts do not know each other.
                    param = engine.infos[name].param
                    stored = held.whole()
                    whole = torch.zeros(param.shape, dtype=torch.float32, device=stored.device)
                    beside(before, stored, param).scatter(name, stored, whole)
                    encode(engine, name, state, whole)
        self._size_scratch()
        self._copy_all_to_params()

    def weights(self) -> Iterator[tuple[ParamInfo, torch.Tensor]]:
        """Yield the master weights of each parameter's stored entries: fp32, 1-D.

        fp32 weights are views. Sharded weights are copied one by one, collectively over the
        data-parallel group.
        """
        for kind, name, held in self._held():
            if kind == PARAM:
                yield self.engine.infos[name], held.whole()

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield every state as (kind, logical name, stored entries), for reading and loading.

        The kind is "param" for the master weight, else the name of the moment. The tensors are
        views, in their dtypes; for sharded states of the entries of `GradBucket.kept_of`, possibly
        none.
        """
        for kind, name, state in self.vectors():
            yield kind, name, state.values

    def vectors(self) -> Iterator[tuple[str, str, StateVector]]:
        """Yield every state as `tensors` does, with scales and compensation."""
        for bucket in self.engine.buckets:
            for name, kind, state in self._slices(bucket):
                yield kind, name, state

    def whole_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield every state in fp32, with all stored entries on every rank.

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
                master, length = state.vectors[0], state.master.numel()
                # Piece by piece, since fp64 takes twice the memory of the weights.
                for start in range(0, length, CUDA_CODED_CHUNK):
                    piece = master.cut(start, min(start + CUDA_CODED_CHUNK, length)).read()
                    sums += piece.double().square_().sum()
        if self.is_sharded:
            groups.shards.all_reduce(sums, dist.ReduceOp.SUM)
        return math.sqrt(groups.sum_over_model(sums))

    @property
    def is_sharded(self) -> bool:
        """True if this rank keeps only a shard of the states."""
        return self.engine.buckets[0].shard is not None

    def finish_load(self) -> None:
        """Begin to train with the master weights, which were written to.

        For sharded states this is collective over the data-parallel group.
        """
        self._begin_rounds()
        self.copy_to_params()

    def copy_to_params(self) -> None:
        """Write the master weights to the parameters that are not views of them.

        For sharded states this is collective over the data-parallel group.
        """
        self._copy_all_to_params()
        if self.is_sharded:
            self.engine.reducer.exchange.take_counters()  # its bytes belong to no step

    def _copy_all_to_params(self) -> None:
        updates = ShardUpdates(self.engine)
        for bucket, state in zip(self.engine.buckets, self.states, strict=True):
            if bucket.shard is None:
                for name, where in bucket.slices.items():
                    self._copy_to_param(name, where.of(state.master))
            else:
                updates.open(bucket).copy_(state.master)
                updates.send()
        updates.finish()

    def _copy_buckets_to_params(self, buckets: Iterable[GradBucket]) -> None:
        for bucket in buckets:
            for name, where in bucket.slices.items():
                self._copy_to_param(name, where.of(self.states[bucket.index].master))

    def _masters(self) -> list[torch.Tensor]:
        return [state.master for state in self.states]

    def _begin_rounds(self) -> None:
        if (local := self.engine.local_steps) is not None:
            local.start(self._masters())

    def _swap_anchors(self) -> None:
        if (local := self.engine.local_steps) is not None:
            self._copy_buckets_to_params(local.swap(self._masters()))

    def _open(self) -> None:
        """Allocate states for the engine's buckets: the initial weights, and moments of zero."""
        self._states: list[BucketState] = []
        # Bucket by bucket, so that parameters that become views free their storage before the next
        # bucket's states are allocated.
        for bucket in self.engine.buckets:
            self._states.append(self._allocate(bucket))
            for name, kind, state in self._slices(bucket):
                if kind == PARAM:
                    self._bind(name, state.values)
        self._begin_rounds()
        self._size_scratch()

    def _bind(self, name: str, flat: torch.Tensor) -> None:
        """Fill a master weight from the parameter, and share memory where possible."""
        bucket, where = self.engine.place(name)
        params = self._states[bucket.index].params
        if params is None:
            bind(self.engine, name, flat)
        else:
            self.engine.layout.bind(name, where.of(params), self.engine.infos[name].leaves)

    def _size_scratch(self) -> None:
        """Allocate scratch memory for the current buckets."""
        self._scratch = self._room()

    def _room(self) -> torch.Tensor:
        """Return an fp32 tensor on the device, as long as the longest chunk."""
        longest = max(bucket.kept.numel for bucket in self.engine.buckets)
        is_coded = not all(state.is_fp32 for state in self._states)
        # A chunk of coded states has at least one block, which may be longer.
        most = max(self._chunk, self._coded_chunk) if is_coded else self._chunk
        return torch.empty(min(most, longest), dtype=torch.float32, device=self._device)

    def _slices(self, bucket: GradBucket) -> Iterator[tuple[str, str, StateVector]]:
        """Yield name, kind and the entries that this rank keeps of every state of a bucket."""
        kinds, state = (PARAM, *self.rule.moments), self.states[bucket.index]
        for name, where in bucket.slices.items():
            kept = bucket.kept_of(name)
            # An empty slice may start anywhere.
            own = Slice(max(where.start + kept.start - bucket.kept.start, 0), kept.numel)
            for kind, vector in zip(kinds, state.vectors, strict=True):
                yield name, kind, vector.cut(own.start, own.start + own.numel)

    def _held(self) -> Iterator[tuple[str, str, StateShard]]:
        """Yield kind, name and this rank's shard of every state."""
        for bucket in self.engine.buckets:
            for name, kind, state in self._slices(bucket):
                yield kind, name, StateShard.of(bucket, name, state)

    def _allocate(self, bucket: GradBucket) -> BucketState:
        def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, device=bucket.grad.device)

        formats = self._formats(bucket)
        shard, params = bucket.shard, None
        if shard is not None and formats[0] is not FP32 and self._is_whole(bucket):
            # Parameters become views of the tensor in which their shards lie side by side.
            params = zeros(shard.length, formats[0].dtype)
        vectors = [vector_of(each, bucket.kept.numel, zeros) for each in formats]
        if shard is not None and params is not None:
            vectors[0] = dataclasses.replace(vectors[0], values=shard.where.of(params))
        return BucketState(tuple(vectors), params)

    def _formats(self, bucket: GradBucket) -> list[StateFormat]:
        """Return the formats of the master weights and moments of a bucket."""
        param = self.engine.infos[bucket.names[0]].param
        return [self.formats.of_main(param), *self.formats.of_moments(param, self.rule.moments)]

    def _is_whole(self, bucket: GradBucket) -> bool:
        """Return whether all entries of all parameters of a bucket are stored."""
        params = {name: self.engine.infos[name].param for name in bucket.names}
        return all(bucket.slices[name].numel == param.numel() for name, param in params.items())

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
        keep = self._keeps_update(bucket)
        state = self.states[bucket.index]
        if not state.is_fp32:
            self._update_coded(bucket, reduced, factor, hyper, out)
            return
        if reduced.index is not None and reduced.part is None and out is not None:
            self._update_sparse_shard(bucket, reduced.index, reduced, factor, hyper, out)
            return
        if reduced.index is not None:
            self._update_sparse(bucket, reduced.index, reduced, factor, hyper, out)
            return
        mean = bucket.kept.of(reduced.values) if reduced.part is None else reduced.values
        waiting = list(bucket.slices.items())
        for start in range(0, mean.numel(), self._chunk):
            cut = slice(start, min(start + self._chunk, mean.numel()))
            values, weight = mean[cut], state.master[cut]
            moments = [moment[cut] for moment in state.moments]
            old_weight = weight.clone() if keep else weight
            # Batch step 11: update master weights and moments.
            self.rule.apply(weight, self._scaled(values, factor), moments, hyper)
            if keep:
                values.copy_(self.rule.direction(old_weight, moments, hyper))
            if out is not None:
                out[cut].copy_(weight)
                continue
            # Update parameters while their master weights are still in cache.
            while waiting and waiting[0][1].start + waiting[0][1].numel <= cut.stop:
                name, where = waiting.pop(0)
                self._copy_to_param(name, where.of(state.master))

    def _update_sparse(
        self,
        bucket: GradBucket,
        index: SparseIndex,
        reduced: ReducedGrad,
        factor: float,
        hyper: Hyper,
        out: torch.Tensor | None,
    ) -> None:
        """Update all states of a bucket that this rank has, by an index of the same positions."""
        state = self.states[bucket.index]
        runs = index.runs if self.engine.wants_update else ()
        # The index updates all runs at once, so old weights are copied first if the update needs
        # them.
        weights = [state.master[run.start : run.stop] for run in runs]
        if hyper.weight_decay:
            weights = [weight.clone() for weight in weights]
        # Batch step 11: update the selected entries.
        index.apply(self.rule, reduced, state.master, state.moments, hyper, factor=factor)
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
        if out is not None:
            out.copy_(state.master)
            return
        for name, where in bucket.slices.items():
            self._copy_to_param(name, where.of(state.master))

    def _keeps_update(self, bucket: GradBucket) -> bool:
        """Return whether the update must overwrite the gradient of a bucket."""
        return self.engine.wants_update and not bucket.lends_grad

    def _update_sparse_shard(
        self,
        bucket: GradBucket,
        index: SparseIndex,
        reduced: ReducedGrad,
        factor: float,
        hyper: Hyper,
        out: torch.Tensor,
    ) -> None:
        """Update this rank's shard of a bucket by an index of the whole bucket."""
        assert not index.runs or not self._keeps_update(bucket), "runs are updated by bucket"
        sparse, state = SparseGrad(index, reduced, factor), self.states[bucket.index]
        first, length = bucket.kept.start, bucket.num_kept
        for start in range(0, length, self._chunk):
            cut = slice(start, min(start + self._chunk, length))
            grad = sparse.cut(slice(first + cut.start, first + cut.stop))
            # Batch step 11: update master weights and moments.
            update_chunk(self.rule, [each[cut] for each in state.tensors], grad, hyper)
            out[cut].copy_(state.master[cut])

    def _update_coded(
        self,
        bucket: GradBucket,
        reduced: ReducedGrad,
        factor: float,
        hyper: Hyper,
        out: torch.Tensor | None,
    ) -> None:
        """Update a bucket whose states are not all fp32."""
        state, index = self.states[bucket.index], reduced.index
        mean = bucket.kept.of(reduced.values) if reduced.part is None else reduced.values
        keep = self._keeps_update(bucket)
        first = bucket.kept.start if reduced.part is None else 0
        sparse = None if index is None else SparseGrad(index, reduced, factor)
        for name, cut in self._coded_cuts(bucket, bucket.num_kept):
            held = state.cut(cut.start, cut.stop)
            if sparse is not None:
                grad = sparse.cut(slice(first + cut.start, first + cut.stop))
            else:
                grad = GradChunk(self._scaled(mean[cut], factor))
            states = [vector.read() for vector in held.vectors]
            old_weight = states[0].clone() if keep else states[0]
            # Batch step 11: update master weights and moments.
            update_chunk(self.rule, states, grad, hyper)
            if keep:
                update = self.rule.direction(old_weight, states[1:], hyper, grad.steps_accumulated)
                if index is None:
                    mean[cut].copy_(update)
                else:
                    fill_runs(index, reduced, cut, update)
            write_all(held.vectors, states, self._random_bits(bucket, name, cut, hyper.t))
            if out is not None:
                out[cut].copy_(held.master)
            elif cut.stop >= bucket.slices[name].start + bucket.slices[name].numel:
                self._copy_to_param(name, bucket.slices[name].of(state.master))

    def _coded_cuts(self, bucket: GradBucket, length: int) -> Iterator[tuple[str, slice]]:
        """Yield the chunks of this rank's part, each of one parameter and the gap behind it.

        Chunks are positions in the part, of which the first `length` have a gradient.
        """
        starts = [where.start for where in bucket.slices.values()]
        for (name, where), past in zip(
            bucket.slices.items(), [*starts[1:], bucket.numel], strict=True
        ):
            first = max(where.start - bucket.kept.start, 0)
            end = min(where.start + where.numel - bucket.kept.start, length)
            for start in range(first, end, self._coded_chunk):
                stop = min(start + self._coded_chunk, past - bucket.kept.start, length)
                yield name, slice(start, stop)

    def _random_bits(self, bucket: GradBucket, name: str, cut: slice, step: int) -> RandomBits:
        """Return the random bits of a chunk's entries, which depend on their logical positions."""
        info, where = self.engine.infos[name], bucket.slices[name]
        start, stop = (at + bucket.kept.start - where.start for at in (cut.start, cut.stop))
        positions = self.engine.layout.positions(name, start, min(stop, where.numel), self._device)
        if info.tp_shard is not None:
            positions = FlatShard.of(info.tp_shard).logical(positions)
        # Entries of a gap stay 0, whatever their bits.
        positions = F.pad(positions.to(torch.int32), (0, stop - start - positions.numel()))
        return RandomBits(self.formats.seed, step, name, positions)

    def _scaled(self, values: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the chunk in fp32 times factor, which is the chunk itself if nothing changes."""
        if factor == 1.0 and values.dtype == torch.float32:
            return values
        out = self._scratch[: values.numel()]
        if values.dtype == torch.float32:
            return torch.mul(values, factor, out=out)
        return out.copy_(values).mul_(factor)

    def _copy_to_param(self, name: str, master: torch.Tensor) -> None:
        """Batch step 12: write updated master weights to the parameter that the model reads."""
        self.engine.layout.scatter(name, master, self.engine.infos[name].param.detach())
