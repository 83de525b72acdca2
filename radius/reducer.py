"""The Radius reducer: sparse all-reduce of the selected entries, with error feedback.

Algorithms 1 and 2 of the Radius paper, and the schedule `rolling`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import GradBucket
from megatron.data_parallel.layout import BucketLayout
from megatron.data_parallel.reduce_scatter import ReduceScatterReducer
from megatron.data_parallel.reducer import (
    GradientReducer,
    PerEntryState,
    ReducedGrad,
    ReducerStats,
    StepContext,
    Work,
)
from megatron.errors import PeerError
from megatron.parallel.tensor_shard import ModelShard
from megatron.sparse.selection import Selection, draw_seeded
from megatron.sparse.shard import FlatShard
from radius.agreement import IndexChoice, hash_of
from radius.bucket import Phase, RadiusBucket
from radius.index import IndexPart, keeps_bits, num_selected
from radius.part_selection import SumCounts, select_from_shards, select_parts
from radius.places import find_places
from radius.residual import RESIDUALS, Residual, WireResidual
from radius.schedule import RadiusSettings, why_no_resample
from radius.stats import RadiusStats

if TYPE_CHECKING:
    from megatron.data_parallel.exchange import Exchange


@dataclass
class RadiusWork:
    """A reduction in progress, and the function that turns its result into the reduced gradient."""

    under_way: Work
    read: Callable[[ReducedGrad], ReducedGrad]

    def wait(self) -> ReducedGrad:
        return self.read(self.under_way.wait())

    def drop(self) -> None:
        self.under_way.drop()


STEPS = "radius/steps"
"""Name in a checkpoint of the start, the first resample and the latest one, in t."""
SELECTING = (Phase.RESAMPLE, Phase.ROLLING)
"""Phases that select entries."""


class RadiusReducer(GradientReducer):
    """Reducer that averages whole buckets at resamples and selected entries between them.

    With density 1 everything is sent, and no state is kept. The k of a parameter, ties, draws and
    the T parts of a rolling schedule refer to the whole tensor, so that every grid selects the same
    entries.

    Args:
        exchange: Collectives over data-parallel ranks.
        entries: Number of logical entries on this rank, which come first in the slice, of each
            parameter that may be sent in part; other parameters' buckets are always sent whole.
        settings: The settings of Radius.
        model_shard: This rank's part of the model; None for a whole model.
        sharded: Whether data-parallel ranks shard the optimizer states (ZeRO-1). Index and residual
            are of the whole bucket all the same, since each rank has a gradient of its own.
        shards: Collectives over the ranks that have the other shards of this rank's buckets, if
            these are from `GradBucket.own_shard`; None for whole buckets.
        keeps_rounding: Keep what an encoded wire loses of sent entries in the residual.
    """

    def __init__(
        self,
        exchange: Exchange,
        entries: Mapping[str, int],
        settings: RadiusSettings,
        model_shard: ModelShard | None = None,
        sharded: bool = False,
        shards: Exchange | None = None,
        keeps_rounding: bool = False,
    ) -> None:
        super().__init__(exchange)
        assert not (sharded and settings.schedule == "rolling" and settings.select == "update"), (
            "updates of parts are not gathered"
        )
        self.settings = settings
        self.model_shard = model_shard or ModelShard()
        self._entries = entries if settings.density < 1 else {}
        self._shards, self._keeps_rounding = shards, keeps_rounding
        self._whole = (ReduceScatterReducer if sharded else AllReduceReducer)(exchange)
        self._own: list[RadiusBucket] = []
        self._step = StepContext(t=0)
        self._first = self._last = 0
        self._stats = RadiusStats(settings, self.model_shard, keeps_rounding=keeps_rounding)

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout | None = None) -> None:
        assert not self._first, "which entries exist is settled before Radius starts"
        cuts = [
            {
                name: min(where.numel, self._entries[name])
                for name, where in (bucket.whole or bucket).slices.items()
                if name in self._entries
            }
            for bucket in buckets
        ]
        stored = {name: count for cut in cuts for name, count in cut.items()}
        names = [list(cut) for cut in cuts]
        places = find_places(self.model_shard, stored, names, layout) if buckets else {}
        bits = bool(buckets) and self._all_keep_bits(buckets[0].grad.device)
        self._own = [self._take_on(bucket, places, bits) for bucket in buckets]
        if isinstance(self._whole, ReduceScatterReducer):
            for own in self._own:
                # The next residual is in the gradient's memory, or the update to select by.
                self._whole.shard(own.bucket, lends_grad=self.lends_grad(own.bucket))
        if buckets:
            self._stats.attached()

    def _all_keep_bits(self, device: torch.device) -> bool:
        """Return whether all ranks keep bitmaps. Collective over the world.

        Ranks with another kind of index would update frozen entries in pieces of other lengths,
        whose last few entries round differently.
        """
        mine = keeps_bits(device.type, self.settings.density)
        if device.type != "cpu":
            return mine
        copies = self.exchange.all_gather_str("bits" if mine else "")
        model, ranks = self.model_shard.total([all(copies), 1])
        return model == ranks

    def _take_on(
        self, bucket: GradBucket, places: Mapping[str, FlatShard], bits: bool
    ) -> RadiusBucket:
        density = self.settings.density
        parts = [
            IndexPart(name, where.start, places[name], num_selected(density, places[name].total))
            for name, where in (bucket.whole or bucket).slices.items()
            if name in places
        ]
        if bucket.whole is not None:
            parts = [part.of_shard(bucket.whole.kept)[0] for part in parts]
        kind = WireResidual if self._keeps_rounding else RESIDUALS[self.settings.residual]
        return RadiusBucket(bucket, parts, (kind if parts else Residual)(bucket), bits)

    # ---- the step ------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        own = self._own[bucket.index]
        own.flushed_norm = None
        self._step = step
        own.phase = self._phase(step) if own.parts else Phase.WHOLE
        values = self._to_send(own, step)
        self._stats.sent(bucket, values.numel())
        work = RadiusWork(self._averaged(own, values, step), partial(self._received, own))
        if bucket.index == len(self._own) - 1:
            # The last message is waited for longest, so the residuals are prepared meanwhile.
            for each in self._own:
                each.prepare(step.loss_scale)
        return work

    def _averaged(self, own: RadiusBucket, values: torch.Tensor, step: StepContext) -> Work:
        """Start to average the values that a bucket sends."""
        sending = dataclasses.replace(own.bucket, grad=values)
        lost = own.residual.lost(values.numel()) if step.layout_is_final else None
        if lost is None:
            return self._whole.reduce(sending, step)
        return self._whole.average(sending, lost)

    def _phase(self, step: StepContext) -> Phase:
        settings, t = self.settings, step.t
        if not step.layout_is_final:
            return Phase.WHOLE
        if self._first and settings.schedule == "rolling":
            return Phase.ROLLING
        # With `--no-load-optim` updates are counted from 1 again although entries are selected.
        if t % settings.interval == 0 and (self._first or t >= settings.start):
            return Phase.RESAMPLE
        return Phase.SPARSE if self._first else Phase.WHOLE

    def _to_send(self, own: RadiusBucket, step: StepContext) -> torch.Tensor:
        if own.phase is Phase.SPARSE:
            return own.gather_chosen(step.loss_scale)
        if own.phase is Phase.ROLLING:
            settings, interval = self.settings, self.settings.interval
            flushed = own.cuts(step.t % interval, interval, settings.density)
            values = own.gather_rolling(flushed, step.loss_scale)
            if settings.residual != "none":
                own.count_steps(min(self._waited(self._first), interval))
            return values
        return own.gather_all(step.loss_scale)

    def _received(self, own: RadiusBucket, mean: ReducedGrad) -> ReducedGrad:
        if self.settings.select == "gradient" and own.phase in SELECTING:
            # The optimizer may overwrite it before all ranks know that the step is applied.
            own.mean = [part.clone() for part in own.of_parts(mean.values)]
        settings, norm = self.settings, None
        if settings.clip == "per-step" and settings.residual != "none" and own.phase in SELECTING:
            norm = own.norm_per_step(mean.values, self._waited(self._last))
        return dataclasses.replace(
            mean,
            index=own.sent,
            unselected="frozen" if own.phase is Phase.ROLLING else "zero",
            steps_accumulated=own.steps_accumulated,
            squared_norm=norm,
        )

    def _waited(self, since: int) -> int:
        """Return the steps that a residual sums which was last empty after update `since`.

        They are a whole interval if updates are counted from 1 again.
        """
        steps, interval = self._step.t - since, self.settings.interval
        return steps if steps > 0 else interval

    def lends_grad(self, bucket: GradBucket) -> bool:
        return not any(name in self._entries for name in bucket.slices)

    def wants_update(self, step: StepContext) -> bool:
        selects = bool(self._entries) and self.settings.select == "update"
        return selects and self._phase(step) in SELECTING

    def commit(self, bucket: GradBucket, update: torch.Tensor | None) -> None:
        own = self._own[bucket.index]
        values = self._to_select_by(own, update) if own.phase in SELECTING else ()
        if own.phase is Phase.RESAMPLE:
            # Before the residual changes, since the update may share memory with it.
            self._resample(own, values)
        own.residual.keep(own.sent, self._step.loss_scale)
        if own.phase is Phase.ROLLING:
            self._roll(own, values)
        own.forget_step()
        if bucket.index == len(self._own) - 1:
            self._compare_choices()

    def abort(self, bucket: GradBucket) -> None:
        own = self._own[bucket.index]
        own.flushed_norm = None
        own.forget_step()

    def inactive_reason(self, first: int, last: int) -> str:
        settings = self.settings
        if not self._entries or self._first:
            return ""
        return why_no_resample(settings.start, first, last, settings.interval)

    # ---- selecting -----------------------------------------------------------------------------

    def _to_select_by(
        self, own: RadiusBucket, update: torch.Tensor | None
    ) -> Sequence[torch.Tensor | None]:
        """Return the values by which to select, for each part; None means a random draw."""
        if self.settings.select == "seeded":
            return [None] * len(own.parts if own.phase is Phase.RESAMPLE else own.flushed)
        if self.settings.select == "gradient":
            return own.mean
        assert update is not None, "asked for by `wants_update`"
        return own.of_parts(update)

    def _resample(self, own: RadiusBucket, values: Sequence[torch.Tensor | None]) -> None:
        """Select entries in the whole bucket, by values for each part."""
        settings = self.settings
        compare = own.open_index()
        pieces = settings.interval if settings.schedule == "rolling" else 1
        cuts: list[tuple[IndexPart, torch.Tensor | None]] = []
        for part, whole in zip(own.parts, values, strict=True):
            for number in range(pieces):
                cut = part.cut(number, pieces, settings.density)
                start = cut.start - part.start
                cuts.append((cut, None if whole is None else whole[start : start + cut.length]))
        self._choose(own, cuts, compare=compare)
        if not self._first:
            self._first = self._step.t
            self._stats.switched(self._step.t)
        self._last = self._step.t

    def _roll(self, own: RadiusBucket, values: Sequence[torch.Tensor | None]) -> None:
        """Select entries in the flushed parts, by values for each part."""
        # Compare the first part's selections only, as often as in the paper's schedule.
        compare = self._step.t % self.settings.interval == 0
        for part in own.flushed:
            own.residual.flush(part)
        self._choose(own, list(zip(own.flushed, values, strict=True)), compare=compare)
        if self._step.t < self._last:
            # Updates are counted from 1 again: every residual has waited for a whole interval.
            self._first = -self.settings.interval
        self._last = self._step.t

    def _choose(
        self,
        own: RadiusBucket,
        parts: Sequence[tuple[IndexPart, torch.Tensor | None]],
        *,
        compare: bool,
    ) -> None:
        """Select the largest values of each part, or draw entries.

        Every rank selects the same entries. Ranks that share a tensor select together, even if they
        have no entry of a part.
        """
        largest = self._largest(own, [(part, each) for part, each in parts if each is not None])
        for part, each in parts:
            if not part.length:
                continue
            selection = self._drawn(part) if each is None else largest[part.name]
            chosen, kept = own.choose(part, selection, compare=compare)
            self._stats.chose(own.bucket, chosen, kept)

    def _drawn(self, part: IndexPart) -> Selection:
        seed, step, total = self.settings.seed, self._step.t, part.places.total
        return draw_seeded(
            total, part.wanted, seed=seed, step=step, name=part.name, shard=part.places
        )

    def _largest(
        self, own: RadiusBucket, parts: Sequence[tuple[IndexPart, torch.Tensor]]
    ) -> dict[str, Selection]:
        """Return the selection of the largest values of each part, by the part's name."""
        # Every rank has the whole mean gradient, but only the update of its shard.
        if own.bucket.shard is None or self.settings.select == "gradient":
            return select_parts(parts, self.model_shard, self._sum_shards)
        return select_from_shards(parts, own, self.model_shard, self.exchange)

    @property
    def _sum_shards(self) -> SumCounts | None:
        shards = self._shards
        return None if shards is None else lambda counts: shards.sum(counts).wait()

    def _compare_choices(self) -> None:
        """Raise `PeerError` if data-parallel ranks have selected different entries.

        Ranks compare after each resample, and once per interval in a rolling schedule, since the
        comparison waits for the GPU.
        """
        if not (self._first and self._last == self._step.t) or self.exchange.ranks == 1:
            return
        if self._step.t % self.settings.interval:
            return
        chosen = [
            IndexChoice(own.index, part.start, part.length)
            for own in self._own
            if own.index is not None
            for part in own.parts
        ]
        mine = f"{hash_of(chosen):x}"
        by_rank = self.exchange.all_gather_str(mine)
        odd = next((rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]), None)
        if odd is not None:
            ranks = self.exchange.world_ranks
            raise PeerError(
                f"rank {ranks[odd]} selected other entries than rank "
                f"{ranks[0]} at update {self._step.t}: their gradients would be added "
                "to those of other weights; must be equal, as on processors that round alike; "
                "start the same command again on machines of one kind, from the last checkpoint"
            )

    # ---- statistics ----------------------------------------------------------------------------

    def stats(self, *, full: bool = False) -> ReducerStats:
        return self._stats.stats(self._whole.stats(), self._own, on=bool(self._first), full=full)

    # ---- state ---------------------------------------------------------------------------------

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor | PerEntryState]]:
        if self._entries:
            yield STEPS, torch.tensor([self.settings.start, self._first, self._last])
        for own in self._own:
            yield from own.chosen_state()

    def state_tensors(self) -> Iterator[tuple[str, PerEntryState]]:
        for own in self._own:
            yield from own.waiting_state()

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        if STEPS not in shared:
            return
        start, self._first, self._last = shared[STEPS].tolist()
        self.settings = dataclasses.replace(self.settings, start=start)
        for bucket in self._own:
            bucket.load(own, shared, has_index=bool(self._first))
