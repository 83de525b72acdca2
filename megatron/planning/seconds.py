"""What a step takes on a machine: a cost model of few constants, all of them a site's.

    pipeline                                                    reduce       optimizer
    F F F | B F B F ... with messages and bubble | last B ...   |----------|----------|
                                                     '--------' buckets leave, hidden here

Computation is FLOPs at a share of peak; groups are alpha-beta links; the schedule is played by
`pipeline.timeline`. What a path itself computes, data, saving
and evaluation are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.data_parallel.bucket_plan import RankShapes, Sent, StepTraffic
from megatron.low_memory.spans import recompute_spans, recomputes_attention
from megatron.model.flops import flops_per_token
from megatron.pipeline.schedule import Kind, Operation, interleaved
from megatron.pipeline.timeline import Player, Timeline, driven, timeline
from megatron.planning.activations import Activations, microbatches_of
from megatron.planning.layout import Grid
from megatron.planning.site import Link, Site
from megatron.planning.traffic import tensor_traffic

ADAM_STREAMS = 28
"""Bytes that AdamW reads and writes for an entry: gradient, and weight and moments twice."""
OFFLOADED = 24
"""Bytes of an entry over the link to the host, there and back: weight and moments."""
Lasts = Callable[[int, Operation, float], float]
"""Seconds that a pass of a rank takes, out of those that it takes by the model."""


def unchanged(rank: int, operation: Operation, seconds: float) -> float:
    """`Lasts` of a machine that is as steady as the model."""
    return seconds


@dataclass(frozen=True)
class PassSeconds:
    """Of one microbatch through a whole stage, tensor-parallel sums that nothing hides included."""

    forward: float
    backward: float
    tensor: float

    @property
    def total(self) -> float:
        """Both ways."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StepSeconds:
    """Of a mean step: `compute` of the busiest stage, `tensor` of it waiting for sums, `bubble` and
    messages, `exposed`: what of `reduce` no backward hides, and the optimizer's."""

    compute: float
    tensor: float
    bubble: float
    reduce: float
    exposed: float
    optimizer: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.tensor + self.bubble + self.exposed + self.optimizer


def step_seconds(grid: Grid, site: Site, ranks: Sequence[RankShapes]) -> StepSeconds:
    """Of a mean step of the run; `ranks` has one of each stage."""
    passes = [pass_seconds(grid, site, stage) for stage in range(grid.dims.pp)]
    slowest = max(passes, key=lambda each: each.total)
    count = microbatches_of(grid)
    busy = count * slowest.total
    whole = pipeline_seconds(grid, passes, site.message(grid.dims), count)
    waits = [_mean_reduce(grid, site, rank, slowest.backward) for rank in ranks]
    reduce, exposed = max(waits, key=lambda wait: wait[1])
    tensor = count * slowest.tensor
    return StepSeconds(
        compute=busy - tensor,
        tensor=tensor,
        bubble=max(whole - busy, 0.0),
        reduce=reduce,
        exposed=exposed,
        optimizer=max(optimizer_seconds(grid, site, rank) for rank in ranks),
    )


def pass_seconds(grid: Grid, site: Site, stage: int) -> PassSeconds:
    """Of a microbatch through all chunks of a stage."""
    config, tp = grid.config, grid.dims.tp
    model, split = config.model, grid.split[stage]
    rate = site.peak_fp32 if config.precision.param_dtype == "float32" else site.peak
    rate *= site.efficiency * tp
    tokens = config.training.micro_batch_size * model.seq_length
    head = 6.0 * model.hidden_size * model.padded_vocab_size(grid.vocabulary)
    layer = (flops_per_token(model, grid.vocabulary) - head) / model.num_layers / 3
    forward = layer * sum(map(len, split)) + (head / 3 if grid.holds_head(stage) else 0.0)
    again = layer * sum(
        span.stop - span.start
        for run in split
        for span in recompute_spans(len(run), config.recompute)
        if span.recomputed
    )
    if recomputes_attention(config.recompute):
        scores = 4.0 * model.seq_length * model.num_attention_heads * model.head_dim
        again = scores * sum(map(len, split))
    ahead, back = tokens * forward / rate, tokens * (2 * forward + again) / rate
    sent, link = tensor_traffic(grid, stage), site.link(grid.dims, "tp")
    sums = link.ring(sent.forward, tp, rounds=2 * sent.forward_calls)
    # Backward's sums hide behind the gradients of the weights, which take as long as a forward.
    answers = link.ring(sent.backward, tp, rounds=2 * sent.backward_calls)
    left = max(answers - ahead, 0.0)
    return PassSeconds(ahead + sums, back + left, sums + left)


def pipeline_seconds(
    grid: Grid, passes: Sequence[PassSeconds], link: Link, microbatches: int
) -> float:
    """All microbatches through a pipeline; `passes`: of each stage."""
    stages = grid.dims.pp
    if stages == 1:
        return microbatches * passes[0].total
    transfer = link.message(Activations(grid).hidden)

    def played(count: int) -> float:
        return float(play(grid, passes, transfer, count).length)

    if microbatches <= 4 * stages:
        return played(microbatches)
    # By then every round of as many microbatches as there are stages takes as long as the last. A
    # few that make no whole round come first, with chunks there are none.
    odd = microbatches % stages
    some, more = played(2 * stages + odd), played(3 * stages + odd)
    return more + (microbatches - odd - 3 * stages) // stages * (more - some)


def play(
    grid: Grid,
    passes: Sequence[PassSeconds],
    transfer: float,
    microbatches: int,
    *,
    lasts: Lasts = unchanged,
) -> Timeline:
    """What the stages do when. `transfer`: seconds of a message, which occupies no rank; `lasts`:
    what becomes of the seconds of a pass."""
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


def collective_seconds(sent: Sent, link: Link, ranks: int) -> float:
    """Of one collective over so many data-parallel ranks."""
    if ranks == 1:
        return 0.0
    rounds = 2 if sent.kind == "all-reduce" else 1
    return link.ring(sent.bytes_sent(ranks), ranks, rounds=rounds)


def reduce_seconds(
    grid: Grid, link: Link, rank: RankShapes, step: StepTraffic, backward: float
) -> tuple[float, float]:
    """Of all collectives of a step, and what of it is left after the last backward, which takes so
    long: buckets leave as they fill, one after the other. The first of a bucket's is hidden, what
    comes after it waits for the optimizer or for all ranks."""
    ranks, total, free, rest = grid.dims.dp, 0.0, 0.0, 0.0
    filled, seen = 0, set[int]()
    entries = sum(bucket.numel for bucket in rank.buckets)
    for sent in step.sent:
        takes = collective_seconds(sent, link, ranks)
        total += takes
        if sent.bucket in seen:
            rest += takes
            continue
        seen.add(sent.bucket)
        bucket = rank.buckets[sent.bucket]
        filled += bucket.numel
        waits = bucket.kind.tied or bucket.kind.partial
        ready = backward if waits else backward * filled / entries
        free = max(free, ready) + takes
    if not grid.config.parallel.overlap_grad_reduce:
        return total, total
    return total, max(free - backward, 0.0) + rest


def _mean_reduce(grid: Grid, site: Site, rank: RankShapes, backward: float) -> tuple[float, float]:
    """Over the steps of the run."""
    link = site.link(grid.dims, "dp")
    kinds = grid.path.plan_traffic(grid.config, rank)
    steps = sum(kind.steps for kind in kinds)
    each = [(kind.steps, *reduce_seconds(grid, link, rank, kind, backward)) for kind in kinds]
    if not steps:
        return each[0][1:]
    return tuple(sum(e[0] * e[i] for e in each) / steps for i in (1, 2))  # type: ignore[return-value]


def optimizer_seconds(grid: Grid, site: Site, rank: RankShapes) -> float:
    """Of one update of all that a rank holds, by what it moves."""
    config = grid.config
    held = sum(bucket.numel for bucket in rank.buckets)
    if config.offload.optimizer_cpu_offload:
        return OFFLOADED * held / site.host_link_rate
    shared = rank.ranks if config.parallel.use_distributed_optimizer else 1
    return ADAM_STREAMS * held / shared / site.memory_rate
