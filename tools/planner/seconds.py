"""A model of the time of a step on a machine, with few constants, all of them a site's.

    pipeline                                                    reduce       optimizer
    F F F | B F B F ... with messages and bubble | last B ...   |----------|----------|
                                                     '--------' buckets leave, hidden here

Computation is FLOPs at a share of peak, which may depend on the shapes of products. Groups are
alpha-beta links. `timeline` simulates the schedule, and `updates` the work after it. The gradient
path's own computation, data, saving and evaluation are not included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megatron.data_parallel.bucket_plan import PlannedCollective, RankShapes, StepTraffic
from megatron.low_memory.checkpoint_interval import layers_again, recomputes_attention
from megatron.memory_estimate import Activations, RankGrid, microbatches_of
from megatron.model.flops import flops_per_token
from megatron.parallel.dims import ParallelDims
from megatron.pipeline.schedule import Kind, Operation, interleaved
from tools.planner.products import Product, ShapeLaw, attention_products, layer_products
from tools.planner.site import Link, Site
from tools.planner.timeline import Player, Timeline, driven, timeline
from tools.planner.traffic import tensor_traffic
from tools.planner.updates import (
    embedding_seconds,
    gather_delay,
    in_turns,
    jobs_of,
    norm_seconds,
    play_sums,
    streams,
    update_seconds,
)

Lasts = Callable[[int, Operation, float], float]
"""A function that returns the seconds of a pass from its rank, its operation and model seconds."""


def unchanged(rank: int, operation: Operation, seconds: float) -> float:
    """Return the time unchanged: the `Lasts` of a machine that behaves like the model."""
    return seconds


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one microbatch through a stage, with exposed tensor-parallel sums."""

    forward: float
    backward: float
    tensor: float

    @property
    def total(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of an average step.

    `compute` and `tensor` (waiting for tensor-parallel sums) are of the busiest stage. `bubble`
    includes messages. `exposed` is the part of `reduce` that no backward hides, and norm and
    `optimizer` are the parts that no reduction hides.
    """

    compute: float
    tensor: float
    bubble: float
    reduce: float
    exposed: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.tensor + self.bubble + self.exposed + self.optimizer


def step_seconds(grid: RankGrid, site: Site, ranks: Sequence[RankShapes]) -> StepSeconds:
    """Return the time of an average training step; `ranks` has one item per stage."""
    passes = [pass_seconds(grid, site, stage) for stage in range(grid.dims.pp)]
    slowest = max(passes, key=lambda each: each.total)
    count = microbatches_of(grid)
    busy = count * slowest.total
    whole = pipeline_seconds(grid, passes, site.message(grid.dims), count)
    after = [_mean_after(grid, site, rank, slowest) for rank in ranks]
    tensor = count * slowest.tensor
    return StepSeconds(
        compute=busy - tensor,
        tensor=tensor,
        bubble=max(whole - busy, 0.0),
        reduce=max(each.reduce for each in after),
        exposed=max(each.exposed for each in after),
        optimizer=max(each.looked for each in after) + max(each.updated for each in after),
    )


def pass_seconds(grid: RankGrid, site: Site, stage: int, *, hides_sums: bool = True) -> PassSeconds:
    """Return the seconds of a microbatch through all chunks of a stage.

    `hides_sums`: whether tensor-parallel sums of backward overlap the gradients of weights, as in
    this program.
    """
    config, tp = grid.config, grid.dims.tp
    model, split = config.model, grid.split[stage]
    rate = site.peak_fp32 if config.precision.param_dtype == "float32" else site.peak
    rate *= site.efficiency * tp
    tokens = config.training.micro_batch_size * model.seq_length
    vocabulary, size = model.padded_vocab_size(grid.vocabulary), config.training.micro_batch_size
    head = 6.0 * model.hidden_size * vocabulary
    layer = (flops_per_token(model, grid.vocabulary) - head) / model.num_layers / 3
    law = ShapeLaw(site.half_size)
    layer *= law.slowness(layer_products(model, sequences=size, tp=tp))
    head *= law.slowness([Product(tokens, vocabulary / tp, model.hidden_size)])
    forward = layer * sum(map(len, split)) + (head / 3 if grid.holds_head(stage) else 0.0)
    again = layer * sum(layers_again(len(run), config.recompute)[0] for run in split)
    if recomputes_attention(config.recompute):
        scores = 4.0 * model.seq_length * model.num_attention_heads * model.head_dim
        again = scores * sum(map(len, split))
        again *= law.slowness(attention_products(model, sequences=size, tp=tp))
    ahead, back = tokens * forward / rate, tokens * (2 * forward + again) / rate
    sent, link = tensor_traffic(grid, stage), site.link(grid.dims, "tp")
    sums = link.ring(sent.forward, tp, rounds=sent.forward_rounds)
    # A recomputed forward waits for its sums as the first one did.
    left = link.ring(sent.again, tp, rounds=sent.again_rounds)
    answers = link.ring(sent.backward, tp, rounds=sent.backward_rounds)
    # The gradients of the weights take as long as a forward.
    left += max(answers - ahead, 0.0) if hides_sums else answers
    return PassSeconds(ahead + sums, back + left, sums + left)


def evaluation_seconds(grid: RankGrid, site: Site) -> float:
    """Return the seconds of a global batch with forward passes only."""
    passes = [pass_seconds(grid, site, stage).forward for stage in range(grid.dims.pp)]
    messages = site.message(grid.dims).message(Activations(grid).hidden) * (grid.dims.pp - 1)
    return sum(passes) + messages + (microbatches_of(grid) - 1) * max(passes)


def pipeline_seconds(
    grid: RankGrid, passes: Sequence[PassSeconds], link: Link, microbatches: int
) -> float:
    """Return the seconds of all microbatches through a pipeline; `passes` has one item per stage.

    Stages with equal times wait for the bubble of Eq. 6 and 7 of the SAMO paper.
    """
    stages = grid.dims.pp
    if stages == 1:
        return microbatches * passes[0].total
    transfer = link.message(Activations(grid).hidden)

    def played(count: int) -> float:
        return float(play(grid, passes, transfer, count).length)

    if microbatches <= 4 * stages:
        return played(microbatches)
    # From here on every round of as many microbatches as stages takes as long as the last round.
    # Microbatches that do not fill a round come first; with chunks there are none.
    odd = microbatches % stages
    some, more = played(2 * stages + odd), played(3 * stages + odd)
    return more + (microbatches - odd - 3 * stages) // stages * (more - some)


def play(
    grid: RankGrid,
    passes: Sequence[PassSeconds],
    transfer: float,
    microbatches: int,
    *,
    lasts: Lasts = unchanged,
) -> Timeline:
    """Simulate the passes of the stages, and return the timeline in seconds.

    `transfer` is the seconds of a message, which occupies no rank. `lasts` turns the model's
    seconds of a pass into the simulated ones.
    """
    stages, chunks = grid.dims.pp, len(grid.split[0])
    parallel = grid.config.parallel

    def seconds(rank: int, operation: Operation) -> float:
        each = passes[rank]
        whole = each.forward if operation.kind is Kind.FORWARD else each.backward
        return lasts(rank, operation, whole / chunks)

    players: Sequence[Player | Sequence[Operation]]
    if parallel.pipeline_schedule == "message-driven":
        players = driven(stages, microbatches, parallel.pipeline_limit or stages)
    else:
        players = [interleaved(stage, stages, chunks, microbatches) for stage in range(stages)]
    return timeline(players, chunks=chunks, transfer=transfer, factor=seconds)


def link_of(sent: PlannedCollective, site: Site, dims: ParallelDims, link: Link) -> Link:
    """Return the link of a collective; `link` is that of all data-parallel ranks."""
    if sent.ranks is None:
        return link
    if not sent.inner:
        # All ranks of a node send at once, each to the ranks of other nodes with its shard.
        inner = dims.dp // sent.ranks
        dims = dataclasses.replace(dims, tp=dims.tp * inner)
    return site.link(dataclasses.replace(dims, dp=sent.ranks, dp_inner=1), "dp")


def collective_seconds(sent: PlannedCollective, link: Link, ranks: int) -> float:
    """Return the seconds of one collective of a run with `ranks` data-parallel ranks."""
    ranks = sent.ranks or ranks
    if ranks == 1 or not sent.nbytes:
        return 0.0
    rounds = 2 if sent.kind == "all-reduce" else 1
    return link.ring(sent.bytes_sent(ranks), ranks, rounds=rounds)


class AfterBackward(NamedTuple):
    """Seconds of one stage's rank after backward.

    `reduce` is the time of all its reductions, and `exposed` the part after backward. `looked` is
    the time from the last reduction until the norm is known, and `updated` the time from the norm
    until parameters are updated. If updates follow sums one by one, `looked` is 0.
    """

    reduce: float
    exposed: float
    looked: float
    updated: float


def after_backward(
    grid: RankGrid, site: Site, rank: RankShapes, step: StepTraffic, passes: PassSeconds
) -> AfterBackward:
    """Return the time after backward in a step of this kind; buckets are sent as they fill."""
    backward = passes.backward
    link, ranks = site.link(grid.dims, "dp"), grid.dims.dp
    overlaps = grid.config.parallel.overlap_grad_reduce and step.overlaps

    def ready(number: int, share: float, free: float) -> float:
        bucket = rank.buckets[number]
        if bucket.kind.tied and grid.dims.pp > 1:
            start, between = max(free, backward), site.message(grid.dims)
            return start + embedding_seconds(grid, between, bucket.numel)
        waits = bucket.kind.tied or bucket.kind.partial or not overlaps
        return backward * (1.0 if waits else share)

    def takes(sent: PlannedCollective) -> float:
        return collective_seconds(sent, link_of(sent, site, grid.dims, link), ranks)

    sums = play_sums(rank, step.sent, ready=ready, takes=takes)
    late = sum(map(takes, sums.late))
    if grid.config.parallel.overlap_param_gather:
        # The last gradients are those of the first layers.
        late = gather_delay(rank, sums.late[::-1], takes=takes, forward=passes.forward)
    over, jobs = sums.over(backward), jobs_of(grid, rank, sums)
    found = AfterBackward(sum(map(takes, step.sent)), over - backward + late, 0.0, 0.0)
    norm, update = partial(norm_seconds, grid, site), partial(update_seconds, grid, site)
    if streams(grid.config):
        *_, last = in_turns(jobs, backward, lambda entries: norm(entries) + update(entries))
        return found._replace(updated=max(last.stop - over, 0.0))
    *_, last = in_turns(jobs, backward, norm)
    return found._replace(looked=last.stop - over, updated=sum(update(j.entries) for j in jobs))


def _mean_after(grid: RankGrid, site: Site, rank: RankShapes, passes: PassSeconds) -> AfterBackward:
    """Return `after_backward`, averaged over the steps of the run."""
    kinds = grid.path.plan_traffic(grid.config, rank)
    found = [(kind.steps, after_backward(grid, site, rank, kind, passes)) for kind in kinds]
    count = sum(steps for steps, _ in found)
    if not count:
        return found[0][1]
    of_each = zip(*(after for _, after in found), strict=True)
    return AfterBackward(
        *(
            sum(steps * each for (steps, _), each in zip(found, one, strict=True)) / count
            for one in of_each
        )
    )
