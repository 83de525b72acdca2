"""A plan as text for a terminal of 100 columns, and as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.config.gpt import describe_recomputation
from megatron.config.sections import describe_split
from megatron.metrics.log_line import byte_size, duration, memory_size, scaled
from tools.planner.fit import Way
from tools.planner.plan import RESERVE, Plan, group_bytes
from tools.planner.traffic import step_bytes

SECONDS = (
    ("compute", "computation"),
    ("tensor", "tensor-parallel sums"),
    ("bubble", "bubble and messages"),
    ("exposed", "gradients, not hidden"),
    ("optimizer", "norm and optimizer"),
)
WIDTH = 100


def lines_of(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan: run, memory, traffic and, if steps are known, time; then notes."""
    yield from _run(plan)
    yield from _memory(plan)
    yield from _traffic(plan)
    if plan.steps:
        yield from _time(plan)
    yield from (f"note: {note}" for note in plan.notes)


def ways_lines(ways: Sequence[Way]) -> Iterator[str]:
    """Yield the lines of settings that fit instead, the nearest first, or a line without any."""
    yield ""
    yield "it does not fit; with these flags it does" if ways else "nothing near it fits"
    width = max((len(way.flags) for way in ways), default=0)
    for way in ways:
        yield f"  {way.flags:{width}}  {memory_size(way.plan.needed):>9}"


def stages_lines(fewest: Mapping[str, Way | None]) -> Iterator[str]:
    """Yield the smallest pipelines that fit on the same ranks, and their step times."""
    yield "fewest stages (G_inter)"
    width = max(map(len, fewest))
    for what, way in fewest.items():
        if way is None:
            yield f"  {what:{width}}  none fits"
            continue
        step = f", {way.plan.seconds.total:,.2f} s a step" if way.plan.steps else ""
        yield f"  {what:{width}}  {way.plan.grid.dims.pp:>3}  {way.plan.grid.dims}{step}"


def as_data(
    plan: Plan, ways: Sequence[Way] = (), fewest: Mapping[str, Way | None] | None = None
) -> dict[str, Any]:
    """Return the report as data for JSON, in bytes and seconds."""
    grid, dims = plan.grid, plan.grid.dims
    found: dict[str, Any] = {
        "grid": {**dims.sizes, "nodes": plan.nodes, "order": dims.order},
        "layers": [[[run.start, run.stop] for run in runs] for runs in grid.split],
        "vocabulary": grid.vocabulary,
        "parameters": plan.parameters,
        "batch": {
            "global_batch_size": grid.config.training.global_batch_size,
            "micro_batch_size": grid.config.training.micro_batch_size,
            "microbatches": plan.microbatches,
            "tokens": plan.tokens,
        },
        "steps": plan.steps,
        "site": {"name": plan.site.name, "gpu": plan.site.gpu, "memory": plan.site.memory},
        "stages": [
            {
                "bytes": stage.kinds,
                "host": stage.host,
                "total": stage.total,
                "in_flight": stage.activations.in_flight,
                "bytes_tp": traffic.tp,
                "bytes_pp": traffic.pp,
                "bytes_host": traffic.host,
                "bytes_sent": [
                    {"steps": kind.steps, "kind": kind.name, "bytes": kind.bytes_sent(dims.dp)}
                    for kind in traffic.dp
                ],
            }
            for stage, traffic in zip(plan.stages, plan.traffic, strict=True)
        ],
        "reserve": RESERVE[grid.device],
        "needed": plan.needed,
        "fits": plan.fits,
        "checkpoint": plan.checkpoint,
        "checkpoints": plan.checkpoints,
        "notes": plan.notes,
        "instead": [
            {"flags": way.flags, "needed": way.plan.needed, "pp": way.plan.grid.dims.pp}
            for way in ways
        ],
        "fewest_stages": {
            what: None if way is None else way.plan.grid.dims.pp
            for what, way in (fewest or {}).items()
        },
    }
    if plan.steps:
        seconds = plan.seconds
        found["seconds"] = {name: getattr(seconds, name) for name, _ in SECONDS}
        found["seconds"] |= {"reduce": seconds.reduce, "step": seconds.total}
        found["queue_seconds"] = plan.queue.total
    return found


def _run(plan: Plan) -> Iterator[str]:
    grid, training = plan.grid, plan.grid.config.training
    path = grid.config.gradient.grad_path
    yield f"{grid.config.name}: {plan.parameters:,} parameters, gradient path {path}"
    yield (
        f"grid         {grid.dims}, {plan.nodes} node(s) of {plan.site.gpus_per_node} "
        f"{plan.site.gpu} ({plan.site.name})"
    )
    if grid.dims.pp > 1:
        yield from _wrapped("layers       ", describe_split(grid.split).split(" "))
    if told := describe_recomputation(grid.config):
        yield from _wrapped("recomputed   ", told.split(" "))
    yield (
        f"batch        {training.global_batch_size} samples = {training.micro_batch_size} x DP "
        f"{grid.dims.dp} x {plan.microbatches} microbatches; {plan.tokens:,} tokens"
    )
    tokens = plan.tokens * plan.steps
    length = f"{plan.steps:,} steps, {scaled(tokens)}tokens" if plan.steps else "not said"
    yield f"run          {length}; vocabulary {grid.vocabulary:,}"


def _memory(plan: Plan) -> Iterator[str]:
    fullest, site = plan.fullest, plan.site
    of = f" of stage {fullest.stage}, the fullest" if plan.grid.dims.pp > 1 else ""
    yield ""
    yield f"memory of a rank{of}"
    flight = fullest.activations.in_flight
    for kind, size in fullest.kinds.items():
        more = f"  {flight} microbatch(es) in flight" if kind == "activations" else ""
        yield f"  {kind:24}{size:>20,} B {memory_size(size):>10}{more}"
    yield f"  {'reserve, assumed':24}{'':22} {memory_size(RESERVE[plan.grid.device]):>10}"
    yield (
        f"  {'needed':24}{'':22} {memory_size(plan.needed):>10}  of {memory_size(site.memory)} on "
        f"{site.gpu}: {_verdict(plan.fits_device)}"
    )
    if plan.host:
        yield (
            f"  {'host memory of a node':24}{plan.host:>20,} B {memory_size(plan.host):>10}  of "
            f"{memory_size(site.host_memory)}: {_verdict(plan.fits_host)}"
        )


def _verdict(fits: bool) -> str:
    return "fits" if fits else "DOES NOT FIT"


def _traffic(plan: Plan) -> Iterator[str]:
    busiest = group_bytes(plan)
    yield ""
    yield "bytes sent by a rank in a step, at most"
    dims = plan.grid.dims
    first = max(plan.stages, key=lambda stage: _largest(plan, stage.stage))
    for kind in step_bytes(plan.grid, first.stage, first.rank).dp:
        label = f"  data-parallel, {kind.name}"
        yield f"{label:44}{byte_size(kind.bytes_sent(dims.dp)):>10}  {kind.steps:,} steps"
    for axis, name in (("tp", "tensor-parallel"), ("pp", "pipeline")):
        if getattr(dims, axis) > 1:
            yield f"  {name:42}{byte_size(busiest[axis]):>10}"
    if busiest["host"]:
        yield f"  {'states to the host, and as much back':42}{byte_size(busiest['host']):>10}"


def _largest(plan: Plan, stage: int) -> int:
    ranks = plan.grid.dims.dp
    return sum(kind.steps * kind.bytes_sent(ranks) for kind in plan.traffic[stage].dp)


def _time(plan: Plan) -> Iterator[str]:
    seconds, queue = plan.seconds, plan.queue
    yield ""
    yield f"a mean step, by the cost model with {plan.site.efficiency:.0%} of peak"
    for name, text in SECONDS:
        value = getattr(seconds, name)
        more = f"  of {1000 * seconds.reduce:,.1f} ms" if name == "exposed" else ""
        yield f"  {text:24}{1000 * value:>12,.1f} ms {value / seconds.total:>5.0%}{more}"
    rate = plan.tokens / seconds.total
    yield f"  {'step':24}{1000 * seconds.total:>12,.1f} ms  {rate:,.0f} tokens/s"
    yield ""
    hours = queue.total / 3600
    yield (
        f"time in jobs {duration(queue.total)} in all on {plan.nodes} node(s): "
        f"{hours * plan.nodes:,.0f} node-hours"
    )
    yield (
        f"disk         {byte_size(plan.checkpoint)} a checkpoint; at most {plan.checkpoints} kept: "
        f"{byte_size(plan.checkpoint * plan.checkpoints)}"
    )


def _wrapped(label: str, words: Sequence[str]) -> Iterator[str]:
    line = label
    for word in words:
        if len(line) + len(word) + 1 > WIDTH:
            yield line.rstrip()
            line = " " * len(label)
        line += word + " "
    yield line.rstrip()
