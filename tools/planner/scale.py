"""What grows with the number of ranks: calls, files and bytes, per step and per event.

Gradient collectives are those of the plan. Counts of everything else are read off the code that
the table names; rates that no site states are the assumptions below. Sums inside a copy of the
model (tensor-parallel sums, pipeline messages) do not grow with the ranks and are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.fault_tolerance.flight_recorder import SETTINGS
from megatron.launch import LAZY_GLOO_RANKS
from megatron.metrics.log_line import byte_size, scaled
from tools.planner.plan import Plan
from tools.planner.seconds import collective_seconds, link_of

WORLDS = (64, 1024, 8192)
HOP = 20e-6
"""Seconds of a small message of gloo, over TCP; assumed."""
TCP_RATE = 1e9
"""Bytes per second through one process over TCP, such as the rendezvous store; assumed."""
STORE_RATE = 50_000
"""Requests per second that the rendezvous store answers; assumed."""
FILE_RATE = 50_000
"""Opens, creations or looks per second of a shared file system, of all clients; assumed."""
HASH_RATE = 1e9
"""Bytes per second that a rank hashes with SHA-256; assumed."""
NEW_GROUP = 50e-6
"""Seconds of torch's `new_group` on a rank outside the group; assumed."""
RECORD = 200
"""Bytes of JSON of a slice in a manifest, and of a collective in a dump."""
ADDRESS, PAIR = 184, 8
"""Bytes that a rank of gloo leaves in the store, and more for each peer it connects to at once.

Measured with torch 2.13 on 2 to 32 ranks, with TORCH_GLOO_LAZY_INIT=1 and without.
"""
LOOKS = 2
"""Looks at status.json, and writes of a heartbeat, of each rank in a second."""
HEADER = 704
"""Bytes of a heartbeat's header."""
TIMERS = 10
CHECKS = 12
"""Agreements of all ranks during a start (`raise_on_all_ranks`)."""
SOURCES = 250
"""Python files that each rank reads to compare the code of all ranks, 2.5 MB in all."""
TORCH_FILES = 1446 + 1845
"""Files that a rank opens, and other paths that it looks at, to import torch.

Measured with strace of torch 2.13 for CPUs in a virtual environment. Each path counts once, since
the client of a shared file system answers the other 13,855 looks, at parts of paths.
"""
TORCH_BYTES = 571_634_277
"""Bytes of the files that it opens, 547 MB of them libraries, which are mapped; also measured."""
STEEP = 1.15
"""Exponent of growth from which a row counts as faster than linear."""


@dataclass(frozen=True)
class ScaleCost:
    """A row at one number of ranks: `count` calls or files, and bytes, of all ranks together.

    `seconds` is what the event takes longer for it.
    """

    event: str
    what: str
    count: float
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Row:
    """A row at each of `WORLDS`."""

    costs: Sequence[ScaleCost]

    def growth(self, kind: str) -> float:
        """Return the exponent of N by which a field grows from the first to the last size."""
        first, last = (getattr(cost, kind) for cost in (self.costs[0], self.costs[-1]))
        if not first or not last:
            return 0.0
        return math.log(last / first) / math.log(WORLDS[-1] / WORLDS[0])


def rows(plans: Sequence[Plan]) -> list[Row]:
    """Return the rows of plans of one configuration, one for each of `WORLDS`."""
    return [Row(costs) for costs in zip(*(list(costs_of(plan)) for plan in plans), strict=True)]


def costs_of(plan: Plan) -> Iterator[ScaleCost]:
    """Yield the costs of a run on the ranks of a plan."""
    yield from _steps(plan)
    yield from _meanwhile(plan)
    yield from _saves(plan)
    yield from _starts(plan)
    yield from _failures(plan)


def _small(plan: Plan, ranks: int) -> float:
    """Return the seconds of a sum of a few numbers: NCCL's tree, or gloo's ring on CPUs."""
    if plan.grid.device == "cpu":
        return _ring(ranks)
    return 2 * math.ceil(math.log2(ranks)) * plan.site.nic_latency


def _ring(ranks: int) -> float:
    return 2 * (ranks - 1) * HOP


def _steps(plan: Plan) -> Iterator[ScaleCost]:
    dims, world = plan.grid.dims, plan.grid.dims.world_size
    link = plan.site.link(dims, "dp")
    usual = [max(stage.dp, key=lambda kind: kind.steps) for stage in plan.traffic]
    for what, gathers in (("gradient collectives", False), ("gathers of ZeRO-1", True)):
        sent = [[c for c in kind.sent if (c.kind == "all-gather") == gathers] for kind in usual]
        calls = max(sum(1 for c in each if c.bytes_sent(dims.dp)) for each in sent)
        nbytes = sum(c.bytes_sent(dims.dp) for each in sent for c in each) * dims.tp * dims.dp
        seconds = max(
            sum(collective_seconds(c, link_of(c, plan.site, dims, link), dims.dp) for c in each)
            for each in sent
        )
        yield ScaleCost("step", what, calls * world, nbytes, seconds)
    groups = [dims.tp, dims.pp, dims.dp, world]
    payloads = [8, 8 + 16, 16, 40]
    nbytes = sum(2 * (n - 1) / n * size * world for n, size in zip(groups, payloads, strict=True))
    seconds = sum(_small(plan, n) for n in groups if n > 1)
    yield ScaleCost("step", "norm, loss and vote", 4 * world, nbytes, seconds)
    each = 8 * TIMERS * world
    seconds = _ring(world) + 2 * each / TCP_RATE
    yield ScaleCost("step", "timers, if logged", world, 2 * (world - 1) * each, seconds)
    axes = [n for n in (dims.tp, dims.pp, dims.dp) if n > 1]
    nbytes = sum(2 * (n - 1) / n * 24 * world for n in axes)
    yield ScaleCost(
        "step", "stop vote, evaluation", len(axes) * world, nbytes, sum(map(_ring, axes))
    )


def _meanwhile(plan: Plan) -> Iterator[ScaleCost]:
    world = plan.grid.dims.world_size
    yield ScaleCost("second", "heartbeat files", LOOKS * world, LOOKS * world * 4096, 0.0)
    yield ScaleCost("second", "looks at status.json", LOOKS * world, 0, LOOKS * world / FILE_RATE)


def _saves(plan: Plan) -> Iterator[ScaleCost]:
    dims, world = plan.grid.dims, plan.grid.dims.world_size
    moments = plan.grid.config.optimizer.num_moments
    tensors = sum(len(stage.rank.params) for stage in plan.stages) * dims.tp * (1 + moments)
    # A shard of the states cuts a tensor, of each kind, at each of its ends.
    records = tensors + world * (1 + moments) * plan.grid.config.parallel.use_distributed_optimizer
    # Each data-parallel rank has a residual of its own of each parameter.
    own = [plan.grid.path.plan_bytes(plan.grid.config, stage.rank).own for stage in plan.stages]
    parts = [
        len(stage.rank.params) * (each > 0) for stage, each in zip(plan.stages, own, strict=True)
    ]
    records += sum(parts) * dims.tp * dims.dp
    announced = RECORD * records
    seconds = _ring(world) / 2 + announced / TCP_RATE
    yield ScaleCost("save", "shares announced to all", world, (world - 1) * announced, seconds)
    agreed = 3 * (_ring(world) / 2 + 300 * world / TCP_RATE)
    yield ScaleCost(
        "save", "agreements on phases", 3 * world, 3 * world * (world - 1) * 300, agreed
    )
    seconds = plan.checkpoint / (plan.site.disk_rate * plan.nodes) + world / FILE_RATE
    yield ScaleCost("save", "files of the checkpoint", world + 2, plan.checkpoint, seconds)
    manifest = announced + 150 * world
    yield ScaleCost("save", "manifest, by rank 0", 1, manifest, manifest / plan.site.disk_rate)
    yield _hashed(plan, "save", "hashed, by --keep-last")


def _hashed(plan: Plan, event: str, what: str) -> ScaleCost:
    """Return the costs of reading and hashing a checkpoint, of which each rank has a share."""
    world = plan.grid.dims.world_size
    seconds = plan.checkpoint / min(plan.site.disk_rate * plan.nodes, HASH_RATE * world)
    return ScaleCost(event, what, 2 * world, plan.checkpoint, seconds + 2 * world / FILE_RATE)


def _starts(plan: Plan) -> Iterator[ScaleCost]:
    dims, world = plan.grid.dims, plan.grid.dims.world_size
    yield ScaleCost(
        "start", "rendezvous of ranks", 3 * world, 3 * world * 100, 3 * world / STORE_RATE
    )
    lazy = world >= LAZY_GLOO_RANKS
    sockets = world * (2 if lazy else world - 1)
    # Each rank reads what every rank left in the store.
    nbytes = world**2 * (ADDRESS + PAIR * world * (not lazy))
    yield ScaleCost("start", "sockets of gloo's world", sockets, nbytes, nbytes / TCP_RATE)
    edges = 2 * world if dims.pp > 1 and plan.grid.device == "cuda" else 0
    lines = sum(world // n for n in (dims.tp, dims.pp, dims.dp, dims.pp) if n > 1) + edges
    yield ScaleCost("start", "process groups", lines * world, 0, lines * NEW_GROUP)
    texts = 40 + 64 + 64 + 150
    seconds = 4 * _ring(world) + world * texts / TCP_RATE
    yield ScaleCost(
        "start", "hosts, settings, origin", 4 * world, world * (world - 1) * texts, seconds
    )
    nbytes = CHECKS * 2 * (world - 1) * 4
    yield ScaleCost("start", "agreements", CHECKS * world, nbytes, CHECKS * _ring(world))
    yield ScaleCost(
        "start", "code compared", SOURCES * world, 2.5e6 * world, SOURCES * world / FILE_RATE
    )
    # A node keeps what it has read for its other ranks.
    seconds = TORCH_FILES * world / FILE_RATE + TORCH_BYTES / plan.site.disk_rate
    nbytes = TORCH_BYTES * plan.nodes
    yield ScaleCost("start", "torch imported", TORCH_FILES * world, nbytes, seconds)
    yield _hashed(plan, "start", "checkpoint hashed")
    yield ScaleCost("start", "data and index opened", 4 * world, 0, 4 * world / FILE_RATE)
    yield ScaleCost("start", "logs of ranks", world, 0, world / FILE_RATE)


def _failures(plan: Plan) -> Iterator[ScaleCost]:
    world = plan.grid.dims.world_size
    yield ScaleCost("failure", "headers, by one rank", world, HEADER * world, world / FILE_RATE)
    # Each failed rank polls the lock of the finding every 10 ms, for up to 2 s.
    yield ScaleCost("failure", "polls for the finding", 200 * world, 0, 200 * world / FILE_RATE)
    dump = RECORD * int(SETTINGS["TORCH_FR_BUFFER_SIZE"][1])
    seconds = 2 * world / FILE_RATE + 2 * dump * world / (plan.site.disk_rate * plan.nodes)
    yield ScaleCost("failure", "dumps of collectives", 2 * world, 2 * dump * world, seconds)
    yield ScaleCost("failure", "status.json rewritten", world, 2000 * world, world / FILE_RATE)


def lines_of(found: Sequence[Row]) -> Iterator[str]:
    """Yield the table, and a line on each row that grows faster than the ranks."""
    yield f"{'':26}" + "".join(f"{f'{world:,} ranks':>24} " for world in WORLDS).rstrip()
    yield f"{'':26}" + "".join(f"{'count':>7}{'bytes':>9}{'s':>8} " for _ in WORLDS).rstrip()
    event = ""
    for row in found:
        if row.costs[0].event != event:
            event = row.costs[0].event
            yield f"each {event}"
        yield f"  {row.costs[0].what:24}" + "".join(map(_cell, row.costs)).rstrip()
    yield ""
    yield f"faster than linear, of all ranks together, from {WORLDS[0]} to {WORLDS[-1]:,} ranks"
    for row in found:
        powers = {"count": row.growth("count"), "bytes": row.growth("nbytes")}
        steep = [f"{kind} as N^{power:.1f}" for kind, power in powers.items() if power > STEEP]
        if steep:
            yield f"  {row.costs[0].what:24}{', '.join(steep)}"


def _cell(cost: ScaleCost) -> str:
    size = byte_size(int(cost.nbytes)) if cost.nbytes else "-"
    seconds = f"{cost.seconds:.2g}" if cost.seconds < 100 else f"{cost.seconds:.0f}"
    return f"{scaled(cost.count).strip() or '0':>7}{size:>9}{seconds if cost.seconds else '-':>8} "


def as_data(found: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows as data for JSON."""
    return [{**dataclasses.asdict(row), "worlds": list(WORLDS)} for row in found]
