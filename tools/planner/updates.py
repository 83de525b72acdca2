"""The schedule of reductions, norms and updates after backward.

It decides which reductions, norms and updates overlap. Seconds count from the caller's origin.

              network     | sum 0 | sum 1 | sum 2 |
    usual     device              |0|     |1|     |2| agreed | 0 1 2 |    |n| the norm's pass of n
    streams   device              |0,  0  |1,  1  |2,  2  |               as soon as it is there

Updates wait for the norm of all gradients, so only the norm's passes overlap sums. If states are
offloaded and gradients are not clipped, each piece of a bucket (`most` entries at most) is updated
when its sum has arrived (AxoNN, V-C); all ranks have voted on the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron.config import GPTConfig
from megatron.data_parallel.bucket_plan import BYTES, PlannedCollective, RankShapes
from megatron.memory_estimate import RankGrid
from tools.planner.site import Link, Site
from tools.planner.traffic import state_width


class Summed(NamedTuple):
    """A collective, with its start and end."""

    sent: PlannedCollective
    start: float
    stop: float


class BucketSums(NamedTuple):
    """The reductions of one rank in a step, in order, and the collectives after updates."""

    done: list[Summed]
    late: list[PlannedCollective]

    def over(self, since: float) -> float:
        """Return the time at which all reductions are complete, at least `since`."""
        return max([since, *(each.stop for each in self.done)])


class UpdateJob(NamedTuple):
    """The part of a bucket that is updated at once: entries of this rank, complete at `arrives`."""

    name: str
    entries: float
    arrives: float


class Ran(NamedTuple):
    """A job, with its start and end."""

    job: UpdateJob
    start: float
    stop: float


def streams(config: GPTConfig) -> bool:
    """Return whether updates follow sums one by one (`GradientEngine.streams`)."""
    plain = config.gradient.grad_wire is None
    return config.offload.optimizer_cpu_offload and not config.optimizer.clip_grad and plain


def play_sums(
    rank: RankShapes,
    sent: Iterable[PlannedCollective],
    *,
    ready: Callable[[int, float, float], float],
    takes: Callable[[PlannedCollective], float],
) -> BucketSums:
    """Schedule the reductions one after the other, first in first out.

    `ready` returns the time from which a bucket may be sent, given its number, the share of all
    gradients that are complete with it, and the time at which the network is free. `takes` returns
    the seconds of a collective. A second all-gather of a bucket is left for the time after updates.
    """
    entries = sum(bucket.numel for bucket in rank.buckets)
    done, rest, late = list[Summed](), list[PlannedCollective](), list[PlannedCollective]()
    seen = set[tuple[int, int]]()
    filled, free, at = 0, 0.0, 0.0
    for each in sent:
        if (each.bucket, each.piece) in seen:
            if each.ranks is not None and each.kind != "all-gather":  # it follows its shard at once
                done.append(Summed(each, free, free + takes(each)))
                free = done[-1].stop
                continue
            (late if each.kind == "all-gather" else rest).append(each)
            continue
        seen.add((each.bucket, each.piece))
        if not each.piece:
            filled += rank.buckets[each.bucket].numel
            at = ready(each.bucket, filled / entries, free)
        start = max(free, at)
        free = start + takes(each)
        done.append(Summed(each, start, free))
    for each in rest:
        done.append(Summed(each, free, free + takes(each)))
        free = done[-1].stop
    return BucketSums(done, late)


def gather_delay(
    rank: RankShapes,
    late: Sequence[PlannedCollective],
    *,
    takes: Callable[[PlannedCollective], float],
    forward: float,
) -> float:
    """Return the seconds by which `--overlap-param-gather` delays the next step.

    The all-gathers `late` are in forward order. A microbatch's forward pass, which takes `forward`
    seconds, needs each bucket after the share of its time that the earlier buckets have of all
    entries.
    """
    entries = sum(rank.buckets[each.bucket].numel for each in late)
    delay, arrived, needed = 0.0, 0.0, 0.0
    for each in late:
        arrived += takes(each)
        delay = max(delay, arrived - needed)
        needed += forward * rank.buckets[each.bucket].numel / entries
    return delay


def jobs_of(grid: RankGrid, rank: RankShapes, sums: BucketSums) -> list[UpdateJob]:
    """Return a rank's updates in order: pieces if they are updated one by one, else buckets."""
    shared = grid.config.parallel.num_shards(rank.ranks)
    whole = not streams(grid.config)
    arrives, sizes = dict[tuple[int, int], float](), dict[tuple[int, int], int]()
    for sent, _, stop in sums.done:
        key = (sent.bucket, 0 if whole else sent.piece)
        arrives[key] = max(stop, arrives.get(key, 0.0))
        sizes[key] = sent.nbytes
    together = dict[int, int]()
    for (number, _), size in sizes.items():
        together[number] = together.get(number, 0) + size
    found: list[UpdateJob] = []
    for (number, piece), stop in sorted(arrives.items()):
        share = 1.0 if whole else sizes[number, piece] / together[number]
        name = f"{number}.{piece}" if share < 1 else f"{number}"
        found.append(UpdateJob(name, share * rank.buckets[number].numel / shared, stop))
    return found


def in_turns(
    jobs: Sequence[UpdateJob], since: float, takes: Callable[[float], float]
) -> Iterator[Ran]:
    """Schedule updates one after the other from `since` on; `takes` returns seconds of entries."""
    now = since
    for job in jobs:
        start = max(now, job.arrives)
        now = start + takes(job.entries)
        yield Ran(job, start, now)


def embedding_seconds(grid: RankGrid, link: Link, entries: int) -> float:
    """Return the seconds of summing a tied table's two gradients, at the pipeline's two ends."""
    return link.ring(BYTES[grid.config.precision.grad_dtype] * entries, 2, rounds=2)


def norm_seconds(grid: RankGrid, site: Site, entries: float) -> float:
    """Return the seconds of a pass over `entries` gradient entries for their norm."""
    return BYTES[grid.config.precision.grad_dtype] * entries / site.memory_rate


def update_seconds(grid: RankGrid, site: Site, entries: float) -> float:
    """Return the seconds of updating `entries` entries, from the bytes that an update moves.

    These are the gradient, states both ways, and a 16-bit parameter. Entries count as those of
    matrices, since vectors are few. On a GPU a 16-bit gradient is
    widened in memory. Offloaded states move over a GPU's link both ways at once, each way at the
    link's rate unless the host's memory, which all GPUs of the node share, is slower. Each of the
    two sets of buffers is filled once it is empty, so half of an update adds to a copy. A CPU does
    everything in sequence.
    """
    config, states = grid.config, state_width(grid.config)
    grad, param = (BYTES[x] for x in (config.precision.grad_dtype, config.precision.param_dtype))
    moved = grad + 2 * states + (param if param < 4 else 0)
    if grad < 4 and grid.device == "cuda":
        moved += 2 * 4
    update = moved * entries / site.memory_rate
    if not config.offload.optimizer_cpu_offload:
        return update
    if grid.device == "cpu":
        return update + 2 * states * entries / site.host_link_rate
    here = min(site.gpus_per_node, grid.dims.world_size)
    copy = states * entries * max(1 / site.host_link_rate, 2 * here / site.host_memory_rate)
    return max(update, copy + update / 2)
