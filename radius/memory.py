"""Bytes of the Radius index and residual, and of the messages of each step. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from megatron.data_parallel.bucket import ALIGNMENT
from megatron.data_parallel.bucket_plan import (
    PathBytes,
    PlannedCollective,
    RankShapes,
    StepTraffic,
    mean_traffic,
    part_payload,
    payload,
    shard_length,
)
from megatron.sparse.sizes import counted_bytes
from radius.index import index_bytes, keeps_bits, num_selected
from radius.native_library import instruction_sets

RESAMPLE = "resample"
"""Name of the steps that send everything and select."""
PAPERS = 1 + 4
"""Bytes per parameter that the paper's implementation adds: a boolean and an fp32 residual."""


def radius_bytes(
    matrices: Iterable[int],
    *,
    density: Fraction,
    residual: str,
    rolling_interval: int | None,
    value_bytes: int,
    bits: bool,
    keeps_rounding: bool = False,
) -> dict[str, int]:
    """Return the bytes of index, residual and values for matrices of these numbers of entries.

    `bits`: whether indices are bitmaps. `keeps_rounding`: whether the residual also keeps what a
    wire rounds off, which takes a second buffer. `values` are the values sent, `value_bytes` each,
    and the step counts of a rolling schedule; on a CPU they are kept from step to step, on a GPU
    they exist only while they are sent.
    """
    sizes = list(matrices)
    if density >= 1:
        return {"index": 0, "residual": 0, "values": 0}
    entries, chosen = sum(sizes), sum(num_selected(density, size) for size in sizes)
    sent, each = chosen, value_bytes
    if rolling_interval is not None:
        sent += -(-(entries - chosen) // rolling_interval)
        each += 4 if residual != "none" else 0
    return {
        "index": index_bytes(entries, chosen, bits=bits),
        "residual": (4 + 4 * keeps_rounding) * entries if residual == "separate" else 0,
        "values": each * sent,
    }


def memory_note(entries: int, kinds: dict[str, int], device: str, *, bits: bool) -> str:
    """Return the log line on `kinds`, from `radius_bytes`, of matrices with `entries` entries."""
    index, residual, values = (_size(kinds[kind]) for kind in ("index", "residual", "values"))
    papers = f"(the paper: {_size(PAPERS * entries)} of booleans and residual)"
    if device == "cpu":
        kept = f"{index} of index, {residual} of residual and {values} of values"
        best = instruction_sets()[-1:]
        by = " with ".join(["compiled kernels", *best]) if bits else "torch"
        return f"radius: keeps {kept} for {entries:,} entries {papers}; moves them by {by}"
    return (
        f"radius: keeps {index} of index and {residual} of residual for {entries:,} entries, and "
        f"{values} of values while they are sent {papers}"
    )


def _size(size: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1000:.3g} kB"


class SelectedCounts(NamedTuple):
    """The matrix entries of a bucket, and how many of them are selected.

    Selected entries of a shared tensor are assumed to be spread evenly over its ranks.
    """

    bucket: int
    numel: int
    entries: int
    chosen: int


def planned_bytes(
    rank: RankShapes,
    *,
    density: Fraction,
    residual: str,
    rolling_interval: int | None,
    value_bytes: int,
    shards: int = 1,
    alignment: int = ALIGNMENT,
    selects_by_gradient: bool = False,
) -> PathBytes:
    """Return the bytes in memory and in a checkpoint, once entries are selected.

    Index and residual include the alignment gaps of the buckets, unlike in `radius_bytes`, so the
    figures are exact for tensors that this rank holds alone. `shards`: the ranks of a node, each of
    which has one shard of every bucket; shards begin at multiples of `alignment`.
    `selects_by_gradient`: a resample holds a copy of the mean of all matrices until it selects.
    """
    index = waiting = values = rest = everything = means = 0
    bits = keeps_bits(rank.device, density)
    for whole in _chosen(rank, density):
        bucket = _shard_of(whole, shards, alignment)
        index += index_bytes(bucket.numel, bucket.chosen, bits=bits)
        waiting += 4 * bucket.numel * (residual == "separate")
        sent, each = bucket.chosen, value_bytes
        if rolling_interval is not None:
            sent += _part_of(bucket, rolling_interval)
            each += 4 * (residual != "none")
        values += each * sent
        means += value_bytes * bucket.entries * selects_by_gradient
        everything += -(-whole.entries // 8)
        rest += (bucket.entries - bucket.chosen) * (residual != "none")
    kept, lasting = {"index": index, "residual": waiting}, rank.device == "cpu"
    compact = {"values": values}
    copied = {"mean gradients": means} if means else {}
    # A checkpoint has one bit per entry for the selection, and the residual of unselected entries.
    return PathBytes(
        kept=kept | compact if lasting else kept,
        passing=copied if lasting else copied | compact,
        shared=everything,
        own=4 * rest,
    )


class PlannedRun(NamedTuple):
    """A run of `steps` steps without skipped steps, with the settings of `RadiusSettings`."""

    density: Fraction
    start: int
    interval: int
    rolling: bool
    steps: int

    def kinds_of_steps(
        self,
        whole: Sequence[PlannedCollective],
        resample: Sequence[PlannedCollective],
        sparse: Sequence[PlannedCollective],
    ) -> list[StepTraffic]:
        """Return the traffic of the run, given the collectives of each kind of step.

        Steps are dense up to the first resample, and then follow the schedule.
        """
        interval, steps = self.interval, self.steps
        first = -(-max(self.start, 1) // interval) * interval
        if self.density >= 1 or first > steps:
            return [StepTraffic("every step", steps, whole)]
        resamples = 1 if self.rolling else steps // interval - first // interval + 1
        found = [
            StepTraffic("dense, before Radius starts", first - 1, whole),
            StepTraffic(RESAMPLE, resamples, resample),
            StepTraffic("sparse", steps - first + 1 - resamples, sparse),
        ]
        return [each for each in found if each.steps]


def planned_traffic(
    rank: RankShapes, run: PlannedRun, *, value_bytes: int, wire: str | None = None
) -> list[StepTraffic]:
    """Return the traffic of a run whose optimizer states are whole on every rank."""
    carried = partial(payload, ranks=rank.ranks, grad_bytes=value_bytes, wire=wire)
    whole = [
        PlannedCollective("all-reduce", carried(bucket, bucket.numel), number)
        for number, bucket in enumerate(rank.buckets)
    ]
    sparse = dict(enumerate(whole))
    for bucket in _chosen(rank, run.density):
        sent = bucket.chosen + _flushed(bucket, run)
        nbytes = carried(rank.buckets[bucket.bucket], sent)
        sparse[bucket.bucket] = PlannedCollective("all-reduce", nbytes, bucket.bucket)
    return run.kinds_of_steps(whole, whole, list(sparse.values()))


def node_traffic(
    rank: RankShapes,
    run: PlannedRun,
    *,
    selects_by_values: bool,
    inner: int,
    grad_bytes: int,
    param_bytes: int,
    alignment: int,
) -> list[StepTraffic]:
    """Return the traffic of a run in which a shard of each bucket is reduced between nodes.

    Gradients are averaged within the `inner` ranks of a node, and parameters are gathered there, in
    every step. Where entries are selected by values, of which each rank of a node has a shard,
    these ranks sum counts.
    """
    (every,) = mean_traffic(
        rank,
        steps=run.steps,
        grad_bytes=grad_bytes,
        param_bytes=param_bytes,
        sharded=True,
        inner=inner,
        alignment=alignment,
    )
    sent: dict[int, int] = {}
    sums: list[PlannedCollective] = []
    parts: list[PlannedCollective] = []
    for whole in _chosen(rank, run.density):
        shard = _shard_of(whole, inner, alignment)
        sent[whole.bucket] = grad_bytes * (shard.chosen + _flushed(shard, run))
        for name in rank.buckets[whole.bucket].slices if selects_by_values else ():
            total = rank.total(name)
            add = partial(PlannedCollective, "all-reduce", bucket=whole.bucket, ranks=inner)
            if not run.rolling:
                sums += [add(n, inner=True) for n in counted_bytes(total, rank.device)]
                continue
            part = -(-total // run.interval)
            one = [add(n, inner=True) for n in counted_bytes(part, rank.device)]
            parts += one
            sums += one * run.interval
    sparse = [
        each if each.inner or each.bucket not in sent else each._replace(nbytes=sent[each.bucket])
        for each in every.sent
    ]
    return run.kinds_of_steps(every.sent, [*every.sent, *sums], [*sparse, *parts])


def with_shards(
    found: Iterable[StepTraffic],
    rank: RankShapes,
    *,
    density: Fraction,
    selects_by_update: bool,
    grad_bytes: int,
    param_bytes: int,
    wire: str | None,
    alignment: int,
) -> list[StepTraffic]:
    """Return the traffic from `planned_traffic` of a run whose optimizer states are sharded.

    Updated parameters are gathered in every step. A resample that selects by the update sums counts
    and gathers the index, one bit per position. Buckets that are always sent whole are reduced to
    shards where that is done at all.
    """
    shards = [shard_length(bucket.numel, rank.ranks, alignment) for bucket in rank.buckets]
    sparse = {each.bucket for each in _chosen(rank, density)}
    gathered = [
        PlannedCollective("all-gather", param_bytes * own, number)
        for number, own in enumerate(shards)
    ]
    index = [
        *(
            PlannedCollective("all-reduce", nbytes, number)
            for number in sorted(sparse)
            for name in rank.buckets[number].slices
            for nbytes in counted_bytes(rank.total(name), rank.device)
        ),
        *(
            PlannedCollective("all-gather", shards[number] // 8, number)
            for number in sorted(sparse)
        ),
    ]

    def reduced(each: PlannedCollective) -> PlannedCollective:
        if each.bucket in sparse or (rank.device != "cuda" and wire is None):
            return each
        bucket, own = rank.buckets[each.bucket], shards[each.bucket]
        nbytes = rank.ranks * part_payload(bucket, own, grad_bytes, wire)
        return PlannedCollective("reduce-scatter", nbytes, each.bucket)

    return [
        StepTraffic(
            kind.name,
            kind.steps,
            [
                *map(reduced, kind.sent),
                *gathered,
                *(index if kind.name == RESAMPLE and selects_by_update else ()),
            ],
        )
        for kind in found
    ]


def _chosen(rank: RankShapes, density: Fraction) -> Iterator[SelectedCounts]:
    """Yield the entry counts of each bucket of matrices."""
    if density >= 1:
        return
    for number, bucket in enumerate(rank.buckets):
        if bucket.kind.matrix:
            entries, chosen = _counts(rank, list(bucket.slices), density)
            yield SelectedCounts(number, bucket.numel, entries, chosen)


def _counts(rank: RankShapes, names: Sequence[str], density: Fraction) -> tuple[int, int]:
    entries = chosen = 0
    for name in names:
        total = rank.total(name)
        entries += rank.params[name].share(total)
        chosen += rank.params[name].share(num_selected(density, total))
    return entries, chosen


def _shard_of(bucket: SelectedCounts, shards: int, alignment: int) -> SelectedCounts:
    """Return the counts of one of `shards` shards, over which entries are spread evenly."""
    return SelectedCounts(
        bucket.bucket,
        shard_length(bucket.numel, shards, alignment),
        -(-bucket.entries // shards),
        -(-bucket.chosen // shards),
    )


def _flushed(bucket: SelectedCounts, run: PlannedRun) -> int:
    """Return the mean number of entries that a step sends besides the selected ones."""
    return _part_of(bucket, run.interval) if run.rolling else 0


def _part_of(bucket: SelectedCounts, interval: int) -> int:
    return -(-(bucket.entries - bucket.chosen) // interval)
