"""What a sparse step does beside a dense one at 124M parameters, where no network limits either.

Two ranks on this machine's loopback, GPT-2 small, sequence 256, micro-batch 2. Steps of dense and
Radius (d = 0.4) take turns; stopwatches around the verbs of engine and optimizer tell what is
Radius's own: gathering what is sent, placing it for the optimizer, keeping the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron.parallel.dims import ParallelDims  # noqa: E402
from megatron.parallel.groups import ProcessGroups  # noqa: E402
from tools.bench.contenders import Shape  # noqa: E402
from tools.bench.methods import method  # noqa: E402
from tools.bench.netlab import Network, run  # noqa: E402
from tools.bench.path_contenders import SMOKE_SHAPE, TrainerPath  # noqa: E402
from tools.bench.path_rows import SPREAD, Target  # noqa: E402
from tools.bench.phases import KEEP, PATH_PHASES, PLACE, REDUCE, PathPhases  # noqa: E402

RANKS, INTERVAL, WARM_UP = 2, 4, 2
DENSE, SPARSE, RESAMPLE = "dense", "radius-0.4", "resample"
SMALL_GPT2 = Shape(
    layers=12,
    hidden=768,
    heads=12,
    sequence=256,
    vocabulary=50257,
    batch=2,
    log_interval=1_000_000,
)
OWN_SHARE = {"bf16": 0.06, "fp32": 0.03}
RESAMPLE_SHARE = 0.01
STEP = "step"


def measure_cost(dtypes: Sequence[str], *, rounds: int, out: Path | None, smoke: bool) -> int:
    """Measure, print and write `path_cost.md` and `.json` to `out`; the exit code."""
    parts: list[str] = []
    values: dict[str, Any] = {}
    missed = False
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as folder:
            settings = {"dtype": dtype, "rounds": rounds, "folder": folder, "smoke": smoke}
            program = [str(Path(__file__).resolve()), json.dumps(settings)]
            if code := run(Network(ranks=RANKS).command(program, folder=Path(folder))):
                raise SystemExit(f"a rank failed with exit code {code}")
            found = json.loads((Path(folder) / "cost.json").read_text(encoding="utf-8"))
        targets = judge(found, dtype)
        missed |= not all(target.met for target in targets)
        parts.append(as_markdown(found, targets, dtype))
        values[dtype] = {"seconds": found, "targets": [vars(t) for t in targets]}
        print(parts[-1], flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "path_cost.md").write_text("\n".join(parts), encoding="utf-8")
        (out / "path_cost.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return 1 if missed and not smoke else 0


def judge(found: Mapping[str, Mapping[str, float]], dtype: str) -> list[Target]:
    """Targets from median seconds by kind of step (`DENSE`, `SPARSE`, `RESAMPLE`) and phase."""
    dense, sparse, resample = found[DENSE], found[SPARSE], found[RESAMPLE]
    own = sum(sparse[phase] for phase in PATH_PHASES) / dense[STEP]
    share = (resample[STEP] - sparse[STEP]) / (SPREAD * dense[STEP])
    return [
        _at_most(f"{dtype}: own work of a sparse step / dense step", own, OWN_SHARE[dtype]),
        _at_most(f"{dtype}: sparse step / dense step", sparse[STEP] / dense[STEP], 1.0),
        _at_most(
            f"{dtype}: a resample beyond a sparse step, over {SPREAD} dense steps",
            share,
            RESAMPLE_SHARE,
        ),
    ]


def as_markdown(
    found: Mapping[str, Mapping[str, float]], targets: Sequence[Target], dtype: str
) -> str:
    """Milliseconds by phase and kind of step, and the targets."""
    kinds = (DENSE, SPARSE, RESAMPLE)
    lines = [f"### A step at 124M parameters, {dtype}, {RANKS} ranks, no limit", ""]
    lines += [f"| ms | {' | '.join(kinds)} |", "|---|" + "---:|" * len(kinds)]
    for phase in [STEP, *(phase for phase in found[DENSE] if phase != STEP)]:
        cells = " | ".join(f"{1e3 * found[kind][phase]:.1f}" for kind in kinds)
        lines.append(f"| {phase} | {cells} |")
    lines += ["", f"Own work of a sparse step: {REDUCE}; {PLACE}; {KEEP}.", ""]
    return "\n".join([*lines, *(f"- {target}" for target in targets)]) + "\n"


def _at_most(text: str, value: float, limit: float) -> Target:
    return Target(text=f"{text} {value:.4f} (at most {limit:g})", met=value <= limit)


# ---- a rank ------------------------------------------------------------------------------------


def serve(arguments: Sequence[str]) -> int:
    """One rank: median seconds of each phase by kind of step, the slower rank's of each step."""
    settings = json.loads(arguments[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=RANKS, pp=1), rank=rank)
    shape = replace(SMOKE_SHAPE, vocabulary=512) if settings["smoke"] else SMALL_GPT2
    folder = Path(settings["folder"])
    with open(folder / f"console-{rank}", "w", encoding="utf-8") as stream:
        with contextlib.redirect_stdout(stream):
            steps = _take_turns(shape, settings["dtype"], settings["rounds"], groups, folder)
    if rank == 0:
        found = {
            kind: {
                phase: statistics.median(step[phase] for step in of_kind) for phase in of_kind[0]
            }
            for kind, of_kind in steps.items()
        }
        (folder / "cost.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _take_turns(
    shape: Shape, dtype: str, rounds: int, groups: ProcessGroups, folder: Path
) -> dict[str, list[dict[str, float]]]:
    contenders = [
        TrainerPath(method(name, interval=INTERVAL), shape, dtype, groups, folder / name)
        for name in (DENSE, SPARSE)
    ]
    phases = [PathPhases(contender.trainer) for contender in contenders]
    for _ in range(INTERVAL - 1):
        contenders[1].step()
    steps: dict[str, list[dict[str, float]]] = {DENSE: [], SPARSE: [], RESAMPLE: []}
    for number in range(WARM_UP + rounds):
        turns = list(zip(contenders, phases, strict=True))
        for contender, watch in turns if number % 2 else reversed(turns):
            groups.world.barrier()
            before = watch.totals()
            watch.start()
            began = perf_counter()
            contender.step()
            took = perf_counter() - began
            watch.stop()
            passed = {phase: s - before[phase] for phase, s in watch.totals().items()}
            name = contender.name
            if name == SPARSE and contender.facts().density >= 1.0:
                name = RESAMPLE
            if number >= WARM_UP:
                steps[name].append(_slowest({STEP: took, **passed}))
    return steps


def _slowest(seconds: dict[str, float]) -> dict[str, float]:
    """The greatest of all ranks, by phase."""
    values = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(seconds, values.tolist(), strict=True))


if __name__ == "__main__":
    code = serve(sys.argv[1:])
    # torch's own threads sometimes abort an interpreter that takes itself apart.
    sys.stdout.flush()
    os._exit(code)
