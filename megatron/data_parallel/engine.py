"""The engine that takes gradients from autograd, bucket by bucket, to their mean over all ranks.

        backward of the last microbatch                      finish
    hook --> gather --> [bucket full] --> reduce ....... agree --> wait --> norm, factor
     (5)      (6)                          (7)              (8)       (9)      (10)

The numbers are the batch steps of docs/architecture.md. From hook (5) until the next step begins,
the engine owns the gradients: outside backward every `param.grad` is None. On a GPU, gradients wait
between (5) and (6) until one launch accumulates many of them (`held_gradients`). Buckets are
launched in index order and no hook waits for a collective, so all ranks send in the same order.

If the engine `streams` and nothing else must come first, `finish` ends with the agreement:
iterating over `Step.reduced` waits for each mean (9), and the norm (10) comes last. Such a step is
accepted before its sums have arrived, so all gradients must be finite and too small for any sum to
overflow. Otherwise, and for clipping, `finish` waits for all means.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.data_parallel.bucket import ALIGNMENT, GradBucket, ParamInfo, Slice
from megatron.data_parallel.bucket_plan import BucketPlan, entries_of, fingerprint, plan_buckets
from megatron.data_parallel.gradient_path import PathParts
from megatron.data_parallel.held_gradients import HeldGradients, Slot
from megatron.data_parallel.layout import BucketLayout
from megatron.data_parallel.norm import may_overflow, reach, sum_of_squares
from megatron.data_parallel.outer_step import LocalReducer
from megatron.data_parallel.reducer import (
    PerEntryState,
    PiecewiseWork,
    ReducedGrad,
    ReducerStats,
    Step,
    StepContext,
    Work,
)
from megatron.data_parallel.streaming import PiecewiseArrival, StreamedGrads
from megatron.errors import ConfigError, NumericsError, PeerError
from megatron.parallel.groups import Group, ProcessGroups
from megatron.parallel.tensor_shard import ModelShard
from megatron.parallel.traffic import Calls
from megatron.transfer import to_device

CLIP_EPSILON = 1e-6
"""Megatron's guard against a zero norm when clipping."""
MASK_UPDATER = "rewirer/"
"""Prefix of the mask updater's tensors in a checkpoint, among those of the reducer."""


class _Term(NamedTuple):
    """A bucket's contribution (scalar) to a sum over the model."""

    mean: ReducedGrad
    value: torch.Tensor


class _Vote(NamedTuple):
    """The ranks' agreement; `unbounded` if sums of the finite gradients might not be finite.

    `finite` is about the ranks that skip a step together, which are those of a replica if replicas
    take local steps, else all ranks. `skipped` counts such sets of ranks that skip the step.
    """

    finite: bool
    request: int
    unbounded: bool
    skipped: int


class GradientEngine:
    """The owner of one rank's gradients, which accumulates and reduces them and agrees on the step.

    A step is `begin`, backward passes, `finish`, and then either the optimizer and `commit`, or
    `abort`; both forget the gradients, which those of the next step overwrite.
    `expect_last_backward` announces the last backward of each set of parameters.

    `cap` is the maximum number of entries of a bucket. With `overlap`, full buckets are reduced
    during backward, otherwise in `finish`. `stream` permits steps that are `Step.arriving`, if the
    reducer does. All ranks of the world must then construct the engine together: votes get
    connections of their own, since a vote must not queue behind gradients. Slices and shards begin
    at multiples of `alignment`.

    `local_steps` is the reducer if each replica (copy of the model) applies its own gradients, else
    None. Then each replica accepts or skips a step on its own.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        parts: PathParts,
        groups: ProcessGroups,
        *,
        cap: int,
        grad_dtype: torch.dtype,
        overlap: bool = True,
        stream: bool = False,
        alignment: int = ALIGNMENT,
    ) -> None:
        self.infos = {info.name: info for info in infos}
        self.reducer, self.mask_updater, self.groups = parts.reducer, parts.mask_updater, groups
        self.model_shard = ModelShard(infos, groups)
        self._cap, self._grad_dtype, self._overlap = cap, grad_dtype, overlap
        self._alignment = alignment
        self._growth = parts.reducer.overflow_bound if stream else None
        self._voters = _apart(groups.world) if self.streams else groups.world
        self.local_steps = parts.reducer if isinstance(parts.reducer, LocalReducer) else None
        self._handles = [
            leaf.register_post_accumulate_grad_hook(partial(self.accumulate, info.name))
            for info in infos
            for leaf in info.leaves
        ]
        self._context = StepContext(t=1)
        self.buckets: list[GradBucket] = []
        self.rebucket(parts.layout)

    def rebucket(self, layout: BucketLayout) -> None:
        """Replace the buckets by empty ones for `layout`, between steps. Collective over all ranks.

        The caller must convert states that are stored by bucket (`BucketOptimizer.rebucket`).

        Raises:
            ConfigError: Ranks of a data-parallel group have different layouts.
        """
        infos = list(self.infos.values())
        entries = entries_of(infos, layout)
        plans = plan_buckets(entries, cap=self._cap, alignment=self._alignment)
        self.layout, self.fingerprint = layout, fingerprint(plans, layout)
        _compare_fingerprints(self.fingerprint, self.groups)
        # Free the old buckets, including all views of them, before the new buckets are allocated.
        if self.buckets:
            self.reducer.attach((), layout)
        self.buckets = []
        self._slots: dict[str, Slot] = {}
        device = infos[0].param.device
        self.buckets = [
            _allocate(index, plan, self._grad_dtype_of(plan), device, self._alignment)
            for index, plan in enumerate(plans)
        ]
        self.reducer.attach(self.buckets, layout)
        self._slots = {
            name: Slot(bucket, where, len(self.infos[name].leaves))
            for bucket in self.buckets
            for name, where in bucket.slices.items()
        }
        self._arrivals = [
            sum(self._slots[name].arrivals for name in bucket.slices) for bucket in self.buckets
        ]
        self._start_over()

    # ---- the step ------------------------------------------------------------------------------

    def begin(self, context: StepContext) -> None:
        """Begin a step. The gradients of all backward passes until `finish` are added up."""
        final = self.mask_updater is None or self.mask_updater.layout_is_final
        self._context = dataclasses.replace(context, layout_is_final=final)
        self._start_over()

    def expect_last_backward(self, names: Iterable[str] | None = None) -> None:
        """Announce the last backward of the named parameters (None: all) in this step.

        With `overlap`, buckets are then reduced as soon as they are full.
        """
        self._last.update(self.infos if names is None else names)

    def accumulate(self, name: str, leaf: torch.nn.Parameter) -> None:
        """Batch step 5: take the gradient of this backward, and reduce the bucket if it is full."""
        slot = self._slots[name]
        grad, leaf.grad = leaf.grad, None
        assert grad is not None, "the hook runs right after a gradient was accumulated"
        if self._held.takes(grad, slot):
            self._held.add(name, grad, slot)
        else:
            # Batch step 6: gather the stored entries into the bucket.
            store = self.layout.gather if slot.fresh else self.layout.gather_add
            store(name, grad, slot.out)
            slot.fresh = False
        if name in self._last:
            self._pending[slot.bucket.index] -= 1
            if self._overlap:
                self._launch_full()

    def finish(self, *, tag: int, clip_norm: float = 0.0, request: int = 0) -> Step:
        """Agree on all ranks whether to accept the step, and wait for the means unless they stream.

        Collective over the world.

        Args:
            tag: The caller's step number.
            clip_norm: Global norm to clip to; 0 disables clipping.
            request: This rank's request for after the step; every rank learns the largest.

        Raises:
            PeerError: Ranks are at different steps.
        """
        self._pending = [0] * len(self.buckets)
        self._finishing = True
        self._launch_full()
        vote = self._agree(tag, request)
        replicas_skipped = 0 if self.local_steps is None else vote.skipped
        if not vote.finite:
            for work in self._work:
                work.drop()
            return Step(
                ok=False,
                norm=math.nan,
                factor=0.0,
                request=vote.request,
                reduced=StreamedGrads(self._take, 0),
                replicas_skipped=replicas_skipped,
            )
        step = Step(
            ok=True,
            norm=math.nan,
            factor=1.0 / self._context.loss_scale,
            request=vote.request,
            reduced=StreamedGrads(self._take, len(self._work)),
            arriving=True,
            replicas_skipped=replicas_skipped,
        )
        if self.streams and not (clip_norm > 0.0 or vote.unbounded):
            self._arriving = step
            return step
        self._await(step)
        step.ok = math.isfinite(step.norm)
        if clip_norm > 0.0 and step.norm > clip_norm:
            step.factor *= clip_norm / (step.norm + CLIP_EPSILON)
        return step

    def commit(self, step: Step) -> None:
        """Commit the step, which the optimizer has applied, so that the reducer saves its state.

        For an arriving step this computes the norm, collectively over the model's ranks, and raises
        `NumericsError` if the norm is not finite.
        """
        if step.arriving:
            self._await(step)
            if not math.isfinite(step.norm):
                raise NumericsError(
                    f"the gradients of update {self._context.t} were finite, and so small that "
                    "their sums have to be, but a sum is not: numbers changed on their way; the "
                    "weights are spoilt and not saved; start the same command again, and suspect "
                    "memory and network if it comes back"
                )
        wanted = self.wants_update
        for bucket, reduced in zip(self.buckets, step.reduced, strict=True):
            # Batch step 13: commit.
            self.reducer.commit(bucket, reduced.values if wanted else None)
        # Reduced values may be views of buckets that are about to be replaced.
        step.reduced.clear()
        self._start_over()

    def abort(self) -> None:
        """Drop the step on every rank without changing saved state. Collective as `commit` is."""
        if self._arriving is not None:
            self._await(self._arriving)
        for bucket in self.buckets:
            # Batch step 13: abort.
            self.reducer.abort(bucket)
            # Where values travel in blocks, one that is not finite spoils its whole block, and with
            # it the gap behind its parameter, which no later gradient overwrites.
            bucket.zero_gaps()
        self._start_over()

    @property
    def streams(self) -> bool:
        """True if steps may be `Step.arriving`."""
        return self._growth is not None

    @property
    def wants_update(self) -> bool:
        """True if the optimizer must overwrite the gradient by its corrected update.

        In sparse buckets it overwrites only the runs of the index.
        """
        return self.reducer.wants_update(self._context)

    # ---- queries and state ---------------------------------------------------------------------

    def slices(self) -> Iterator[tuple[ParamInfo, GradBucket, Slice]]:
        """Yield every parameter with its bucket and its slice, in bucket order."""
        for bucket in self.buckets:
            for name, where in bucket.slices.items():
                yield self.infos[name], bucket, where

    def count_zeros(self, step: Step) -> int:
        """Return the number of zeros in the mean gradient of the model's stored entries.

        Padding does not count. Collective over the ranks of a model copy.
        """
        stored = 0
        nonzero: list[_Term] = []
        for bucket, reduced in zip(self.buckets, step.reduced, strict=True):
            if self.model_shard.owns(bucket):
                # Padding at a slice's end takes no gradient: non-zero values are entries.
                nonzero.append(_Term(reduced, torch.count_nonzero(reduced.values)))
                stored += sum(
                    min(where.numel, self.infos[name].local_entries)
                    for name, where in bucket.slices.items()
                )
        return int(self.groups.sum_over_model(stored - self._over_parts(nonzero)))

    def place(self, name: str) -> tuple[GradBucket, Slice]:
        """Return the bucket of a parameter and the parameter's slice of that bucket."""
        slot = self._slots[name]
        return slot.bucket, slot.where

    def inactive_reason(self, first: int, last: int) -> str:
        """Return why the path acts as the dense path in the updates `first` to `last`, else ""."""
        idle = (
            self.mask_updater.inactive_reason(first, last) if self.mask_updater is not None else ""
        )
        return idle or self.reducer.inactive_reason(first, last)

    def stats(self, *, full: bool = False) -> ReducerStats:
        """Return counters since the last call; `full` adds those that need a pass over state."""
        stats = self.reducer.stats(full=full)
        if self.mask_updater is None:
            return stats
        extra = {**stats.extra, **self.mask_updater.stats()}
        return dataclasses.replace(
            stats, extra=extra, notes=(*stats.notes, *self.mask_updater.notes())
        )

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor | PerEntryState]]:
        """Yield the path's checkpoint state that is equal on all data-parallel ranks."""
        yield from self.reducer.shared_tensors()
        if self.mask_updater is not None:
            for name, tensor in self.mask_updater.state_tensors():
                yield f"{MASK_UPDATER}{name}", tensor

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        """Load what `shared_tensors` and the reducer's `state_tensors` yielded."""
        self.reducer.load_state_tensors(own, shared)
        if self.mask_updater is not None:
            theirs = [name for name in shared if name.startswith(MASK_UPDATER)]
            self.mask_updater.load_state_tensors(
                {n.removeprefix(MASK_UPDATER): shared[n] for n in theirs}
            )

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    # ---- internals -----------------------------------------------------------------------------

    def _grad_dtype_of(self, plan: BucketPlan) -> torch.dtype:
        # Parameters that stay in fp32 in a 16-bit run, as norms may, have fp32 gradients.
        mixed = any(info.param.dtype is not torch.float32 for info in self.infos.values())
        return torch.float32 if mixed and plan.kind.dtype is torch.float32 else self._grad_dtype

    def _start_over(self) -> None:
        # Nothing is zeroed: the first gradient of a step overwrites the old values.
        for slot in self._slots.values():
            slot.fresh = True
        self._held = HeldGradients()
        self._last: set[str] = set()
        self._finishing = False
        self._pending = list(self._arrivals)
        self._work: list[Work] = []
        self._reached: list[torch.Tensor] = []
        self._squares: list[_Term] = []
        self._arriving: Step | None = None

    def _launch_full(self) -> None:
        """Batch step 7: reduce every full bucket that does not wait for an earlier one."""
        while len(self._work) < len(self.buckets) and self._pending[len(self._work)] <= 0:
            bucket = self.buckets[len(self._work)]
            if not self._finishing and self._is_summed_first(bucket):
                return
            self._held.store()
            for name, where in bucket.slices.items():
                if self._slots[name].fresh:  # no gradient arrived: set zero
                    where.of(bucket.grad).zero_()
            # All backwards of this stage are done, so no rank waits here for a microbatch.
            if bucket.partial:
                self.groups.tp.all_reduce(bucket.grad, dist.ReduceOp.SUM)
            if bucket.tied:
                # The other copy is on another stage.
                self.groups.embedding.all_reduce(bucket.grad, dist.ReduceOp.SUM)
            self._reached.append(reach(bucket.grad))
            self._work.append(self.reducer.reduce(bucket, self._context))

    def _is_summed_first(self, bucket: GradBucket) -> bool:
        """Return whether groups other than the data-parallel group also reduce the bucket."""
        tied = bucket.tied and self.groups.embedding.size > 1
        return tied or (bucket.partial and self.groups.tp.size > 1)

    def _agree(self, tag: int, request: int) -> _Vote:
        """Batch step 8: vote on finite and bounded gradients, and find the largest request."""
        reached = torch.stack(self._reached)
        # Each replica that takes steps of its own has its own flag for non-finite gradients.
        flags, mine = 1, 0
        if self.local_steps is not None:
            flags, mine = self.groups.dp.size, self.groups.dp.rank
        numbers = [tag, -tag, request, 0.0, *[0.0] * flags]
        vote = to_device(torch.tensor(numbers, dtype=torch.float64), reached.device)
        vote[4 + mine] = ~torch.isfinite(reached).all()
        if self._growth is not None:
            ranks = self.groups.dp.size
            dtype = self._grad_dtype
            vote[3] = may_overflow(reached.max(), dtype, overflow_bound=self._growth, ranks=ranks)
            vote = vote.cpu()  # the voters' connections are gloo
        self._voters.all_reduce(vote, dist.ReduceOp.MAX, about="vote")
        newest, oldest, most_urgent, unbounded, *bad = vote.tolist()
        if newest != -oldest:
            raise PeerError(
                f"ranks are out of step: this rank is at step {tag}, others between "
                f"{int(-oldest)} and {int(newest)}; a collective was skipped or repeated"
            )
        return _Vote(not bad[mine], int(most_urgent), bool(unbounded), int(sum(bad)))

    def _take(self, number: int) -> ReducedGrad:
        """Batch step 9: wait for the mean of a bucket, and add its share to the norm."""
        bucket, work = self.buckets[number], self._work[number]
        seen = partial(self._see, counts=self.model_shard.owns(bucket))
        if isinstance(work, PiecewiseWork):
            return ReducedGrad(values=bucket.grad, wait_until=PiecewiseArrival(work.pieces, seen))
        seen(reduced := work.wait())
        return reduced

    def _see(self, reduced: ReducedGrad, *, counts: bool) -> None:
        if counts:
            self._squares.append(self._square(reduced))

    def _square(self, reduced: ReducedGrad) -> _Term:
        given = reduced.squared_norm
        return _Term(reduced, sum_of_squares(reduced.values) if given is None else given)

    def _await(self, step: Step) -> None:
        """Wait for the means that have not arrived yet, and compute the norm."""
        for _ in step.reduced:
            pass
        step.norm = self._norm() / self._context.loss_scale
        step.arriving, self._arriving = False, None

    def _norm(self) -> float:
        """Batch step 10: L2 norm of the whole model's mean gradient, in scaled units."""
        return math.sqrt(self.groups.sum_over_model(self._over_parts(self._squares)))

    def _over_parts(self, terms: Sequence[_Term]) -> torch.Tensor:
        """Return the sum of terms (fp64, [1]), over the ranks of shards too for sharded means."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.buckets[0].grad.device)
        for term in terms:
            sums[int(term.mean.part is not None)] += term.value
        if any(term.mean.part is not None for term in terms):
            self.groups.shards.all_reduce(sums[1:], dist.ReduceOp.SUM)
        return sums.sum().view(1)


def _apart(world: Group) -> Group:
    """Return a group of the same ranks with its own connections, reported like the others."""
    votes = Calls("votes")
    votes.tell = world.calls.tell
    return dataclasses.replace(world.new_gloo_group(), calls=votes)


def _allocate(
    index: int, plan: BucketPlan, dtype: torch.dtype, device: torch.device, alignment: int
) -> GradBucket:
    return GradBucket(
        index=index,
        slices=plan.slices,
        grad=torch.zeros(plan.numel, dtype=dtype, device=device),
        weight_decay=plan.kind.weight_decay,
        tied=plan.kind.tied,
        tp_sharded=plan.kind.tp_sharded,
        partial=plan.kind.partial,
        matrix=plan.kind.matrix,
        alignment=alignment,
    )


def _compare_fingerprints(mine: str, groups: ProcessGroups) -> None:
    seen = groups.dp.all_gather_str(mine)
    odd = [groups.dp.ranks[i] for i, text in enumerate(seen) if text != seen[0]]
    if odd:
        raise ConfigError(
            f"rank {odd[0]} cut its gradients into other buckets than rank {groups.dp.ranks[0]}; "
            "start every rank with the same configuration and code"
        )
