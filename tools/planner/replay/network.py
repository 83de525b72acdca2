"""This repository's benchmarks of gradient paths and pipelines on limited links, simulated.

Latency and rate come from all-reduces of two sizes timed in the same run, the time of a step
without communication from steps that send nothing. No constant comes from a predicted step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.config import parse, resolve
from megatron.data_parallel.bucket_plan import ParamShape, RankShapes, plan_buckets
from megatron.memory_estimate import RankGrid
from megatron.parallel.dims import ParallelDims
from pretrain_gpt import GRADIENT_PATHS
from tools.planner.course import Links, Setting
from tools.planner.replay.machines import REPO, SITES
from tools.planner.replay.rows import ReplayRow, ReplayTable
from tools.planner.seconds import PassSeconds
from tools.planner.simulation import SimulatedStep, simulate
from tools.planner.site import Link, read_site

BENCHES = REPO / "tools" / "bench"
NO_LIMIT, CORES = "none", 2
CROWDED = (
    "four ranks on two cores, which others used too: a step that sends nothing took 499 to 521 "
    "ms at least and 514 to 676 ms in the median, so least steps are compared. Latency and rate "
    "as the four timed them, and medians, leave errors of up to 30 %"
)
LAYERS, SHAPE = 8, (1120, 1280)
PASSES = PassSeconds(0.150, 0.300, 0.0)
INTERVAL = 5
"""Any resample interval: the compared step lies between two resamples."""
METHOD = re.compile(
    r"(?P<path>dense|radius|samo)(-(?P<number>0\.\d+))?(\+radius-(?P<density>0\.\d+))?"
    r"(?P<variants>(-(no-overlap|bf16|fp32))*)"
)
SMALL = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 64 --mock-data "
    "--vocab-size 64 --micro-batch-size 1 --train-iters 40 --lr 1e-3"
)
"""Flags of a run; the simulation takes shapes and pass times from elsewhere."""
MESSAGE = 2 * 256 * 768 * 4
"""Bytes between the stages of tools/bench/pipeline/run.py, whose passes are those of a stage."""
STAGE = PassSeconds(0.020, 0.040, 0.0)


@dataclass(frozen=True)
class ReplayMethod:
    """A gradient path of the benchmark as flags; `half` tells whether it sends 16-bit numbers."""

    flags: str
    half: bool

    @classmethod
    def named(cls, name: str) -> ReplayMethod | None:
        """Return the gradient path that a row of the benchmark measures.

        None if the name is not of a dense, Radius or SAMO path, which alone are simulated.
        """
        match = METHOD.fullmatch(name)
        if match is None or (match["path"] != "dense") != (match["number"] is not None):
            return None
        path, variants = match["path"], match["variants"]
        half = "bf16" in variants or (path == "samo" and "fp32" not in variants)
        flags = [f"--overlap-grad-reduce {'false' if 'no-overlap' in variants else 'true'}"]
        if path == "samo":
            flags.append(f"--samo-sparsity {match['number']} --samo-pruning random")
        density = match["number"] if path == "radius" else match["density"]
        if density:
            flags.append(
                f"--radius-density {density} --radius-interval {INTERVAL} --radius-start-iter 5"
            )
        if match["density"]:
            path = "samo+radius"
        if half:
            flags.append("--bf16 --grad-reduce-in-bf16")
        return cls(" ".join([*flags, f"--grad-path {path}"]), half)


def step_of(method: ReplayMethod, link: Link, ranks: int) -> SimulatedStep:
    """Return the emulated step of `ranks` ranks, without an optimizer."""
    flags = f"{SMALL} --global-batch-size {ranks} {method.flags}".split()
    config = resolve(parse(flags, paths=GRADIENT_PATHS), ranks)
    shapes = {f"layers.{n}.{kind}": SHAPE if kind == "weight" else SHAPE[1:]
              for n in range(LAYERS) for kind in ("weight", "bias")}  # fmt: skip
    params = {n: ParamShape(name=n, logical_shape=s, rows=s[0]) for n, s in shapes.items()}
    path, cap = GRADIENT_PATHS[config.gradient.grad_path], math.prod(SHAPE)
    stored = path.stored(config, params.values())
    # The gradients of a step appear in the order of the layers there.
    entries = [
        p.entry(stored.get(p.name, p.numel), config.precision.param_dtype) for p in params.values()
    ]
    rank = RankShapes(
        params=params, buckets=plan_buckets(entries, cap=cap), ranks=ranks, stored=stored
    )
    grid = RankGrid(
        config=config,
        dims=ParallelDims(tp=1, dp=ranks, pp=1),
        path=path,
        vocabulary=64,
        cap=cap,
        device="cpu",
    )
    site = read_site(SITES, "local")
    steps = simulate(Setting(grid, site, [rank], [PASSES], Links(link, link)))
    return next((step for step in steps if step.name == "sparse"), steps[-1])


def tables() -> list[ReplayTable]:
    """Return tables for all networks with a limit, and for the pipelines of one machine."""
    found: list[ReplayTable] = []
    for name in ("gradient_path", "samo_path"):
        emulated = [each for each in _read(name)["tables"] if each["protocol"] == "emulated"]
        links = {
            each["network"]["rate"]: _link(each["link"])
            for each in emulated
            if each["network"]["ranks"] == 2
        }
        limited = [each for each in emulated if each["network"]["rate"] != NO_LIMIT]
        found += [_network(each, links[each["network"]["rate"]]) for each in limited]
        if name == "gradient_path":
            loopback = links[NO_LIMIT]
    return [*found, _pipelines(loopback)]


def _read(name: str) -> Any:
    return json.loads((BENCHES / name / "results.json").read_text(encoding="utf-8"))


def _link(measured: Mapping[str, float]) -> Link:
    return Link(measured["alpha"], 1 / measured["beta"])


def _network(measured: Mapping[str, Any], link: Link) -> ReplayTable:
    """Return a table; `link` was timed by two ranks under this limit."""
    ranks = measured["network"]["ranks"]
    crowded = ranks > CORES
    which = "least" if crowded else "median"
    found = {row["method"]: row[which] for row in measured["rows"]}
    rows: list[ReplayRow] = []
    for name, seconds in found.items():
        method = ReplayMethod.named(name)
        if method is None:
            continue
        idle = found[_base(method, found)] - PASSES.total
        step = step_of(method, link, ranks)
        simulated = step.phases.compute + step.phases.exposed + idle
        rows.append(
            ReplayRow(
                what=name, unit="ms", measured=1e3 * seconds, simulated=1e3 * simulated, digits=1
            )
        )
    notes = [
        f"measured, not fitted: latency {1e3 * link.latency:.2f} ms and rate "
        f"{link.rate / 1e6:.1f} MB/s by two ranks under this limit, "
        f"{1e3 * found['compute']:.1f} ms without sending; {which} steps"
    ]
    if crowded:
        notes.append(CROWDED)
    return ReplayTable(
        name=f"Emulated network, {ranks} ranks, {measured['network']['rate']}"
        + (", SAMO's rows" if "samo-0.9" in found else ""),
        machine="two cores, limited links (tools/bench)",
        constants={},
        rows=rows,
        source="our benchmark",
        notes=notes,
    )


def _base(method: ReplayMethod, medians: Mapping[str, float]) -> str:
    return "compute-bf16" if method.half and "compute-bf16" in medians else "compute"


def _pipelines(link: Link) -> ReplayTable:
    rows: list[ReplayRow] = []
    for each in _read("pipeline")["rows"]:
        rows.append(
            ReplayRow(what=f"{each['stages']} stages, {each['chunks']} chunks, "
                f"{each['microbatches']} microbatches", unit="ms", measured=1e3 * each["seconds"],
                simulated=1e3 * _pipeline(each, link), digits=1)
        )  # fmt: skip
    return ReplayTable(
        name="Pipelines of passes that sleep, loopback",
        machine="two cores (tools/bench/pipeline)",
        constants={},
        rows=rows,
        source="our benchmark",
        notes=[
            f"measured, not fitted: messages at the loopback's {1e3 * link.latency:.2f} ms and "
            f"{link.rate / 1e6:.0f} MB/s, from the gradient-path benchmark; passes as they were "
            "asked to sleep. What a pass takes beyond its sleep, with more chunks more often, is "
            "not in it",
        ],
    )


def _pipeline(each: Mapping[str, Any], link: Link) -> float:
    stages, chunks = each["stages"], each["chunks"]
    flags = SMALL.replace("--num-layers 1", f"--num-layers {stages * chunks}")
    flags += f" --global-batch-size {each['microbatches']} --pipeline-model-parallel-size {stages}"
    if chunks > 1:
        flags += " --num-layers-per-virtual-pipeline-stage 1"
    config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), stages)
    grid = RankGrid(
        config=config,
        dims=ParallelDims(tp=1, dp=1, pp=stages),
        path=GRADIENT_PATHS["dense"],
        vocabulary=64,
        cap=10**9,
        device="cpu",
    )
    small = link.message(MESSAGE)
    setting = Setting(
        grid,
        read_site(SITES, "local"),
        [grid.rank(stage) for stage in range(stages)],
        [STAGE] * stages,
        Links(link, replace(link, latency=small, rate=math.inf)),
    )
    phases = simulate(setting)[0].phases
    return phases.compute + phases.bubble
