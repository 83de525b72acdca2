"""The cost that a sparse step adds at 124M parameters, without a network limit.

GPT-2 small, sequence 256, micro-batch 2, one thread per rank. Steps of the methods take turns;
stopwatches around the methods of engine and optimizer measure a path's own work. For Radius (d =
0.4, two ranks on this machine's loopback) this is gathering values, placing them for the optimizer,
and keeping the rest. For SAMO (p = 0.9, one process) it is compressing each gradient in backward,
which dense steps copy instead, and expanding the updated weights. Each is measured in bf16 with
gradients in 16 bit, and accumulated in fp32.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.common.netlab import Network, run
from tools.bench.common.page_files import write_page
from tools.bench.common.phases import CPU_TIME, GATHER, KEEP, PATH_PHASES, PLACE, REDUCE, SCATTER
from tools.bench.gradient_path.cost_rank import RESAMPLE, STEP
from tools.bench.gradient_path.rows import SPREAD
from tools.bench.gradient_path.targets import SpeedTarget, at_most

RANK = ("-m", "tools.bench.gradient_path.cost_rank")
DENSE, SPARSE = "dense", "radius-0.4"
OWN_SHARE = {"bf16": 0.06, "fp32": 0.03}
RESAMPLE_SHARE = 0.01
SAMO_PAIRS = {
    "bf16": [("samo-0.9", "dense-bf16"), ("samo-0.9-fp32", "dense")],
    "fp32": [("samo-0.9-fp32", "dense")],
}
"""Compared methods, by the dtype of the parameters."""
SAMO_OWN_SHARE = 0.02

Seconds = Mapping[str, Mapping[str, float]]
"""Medians by kind of step and phase."""


@dataclass(frozen=True, kw_only=True)
class CostStudy:
    """Methods to compare, by dtype, on a number of ranks.

    `own` describes the phases of a method's own work for the page, and `judge` returns the targets.
    """

    ranks: int
    methods: Mapping[str, Sequence[str]]
    own: str
    judge: Callable[[Seconds, str], list[SpeedTarget]]


def measure_cost(
    study: CostStudy, dtypes: Sequence[str], *, rounds: int, out: Path | None, smoke: bool
) -> int:
    """Measure, print and write cost.md and cost.json to `out`; return the exit code."""
    parts: list[str] = []
    values: dict[str, Any] = {}
    missed = False
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                "dtype": dtype,
                "methods": study.methods[dtype],
                "rounds": rounds,
                "folder": folder,
                "smoke": smoke,
            }
            program = [*RANK, json.dumps(settings)]
            if code := run(Network(ranks=study.ranks).command(program, folder=Path(folder))):
                raise SystemExit(f"a rank failed with exit code {code}")
            found = json.loads((Path(folder) / "cost.json").read_text(encoding="utf-8"))
        targets = study.judge(found, dtype)
        missed |= not all(target.met for target in targets)
        parts.append(as_markdown(study, found, targets, dtype))
        values[dtype] = {"seconds": found, "targets": [vars(t) for t in targets]}
        print(parts[-1], flush=True)
    write_page(out, text="\n".join(parts), values=values, part="cost")
    return 1 if missed and not smoke else 0


def radius_targets(found: Seconds, dtype: str) -> list[SpeedTarget]:
    """Return the targets of `DENSE`, `SPARSE` and `RESAMPLE` steps.

    A dense step launches its buckets and scales its result in the same phases, so the own work of a
    sparse step is its time beyond that of a dense step. The page also gives the whole time, and the
    CPU time on everything but computing and waiting, beyond a dense step's; a short vector saves
    time elsewhere, so that is less.
    """
    dense, sparse, resample = found[DENSE], found[SPARSE], found[RESAMPLE]
    whole, shared = (sum(kind[phase] for phase in PATH_PHASES) for kind in (sparse, dense))
    own = (whole - shared) / dense[STEP]
    net = (sparse[CPU_TIME] - dense[CPU_TIME]) / dense[STEP]
    told = f"{whole / dense[STEP]:.4f} in all; {CPU_TIME} beyond a dense one's {net:.4f}"
    share = (resample[STEP] - sparse[STEP]) / (SPREAD * dense[STEP])
    return [
        _share(f"{dtype}: own work of a sparse step / dense step ({told})", own, OWN_SHARE[dtype]),
        _share(f"{dtype}: sparse step / dense step", sparse[STEP] / dense[STEP], 1.0),
        _share(
            f"{dtype}: a resample beyond a sparse step, over {SPREAD} dense steps",
            share,
            RESAMPLE_SHARE,
        ),
    ]


def samo_targets(found: Seconds, dtype: str) -> list[SpeedTarget]:
    """Return the targets of `SAMO_PAIRS`.

    Compressing and expanding replace copies of the dense path, so their cost is the time beyond
    these copies: the 8 to 12 % of the SAMO paper are the difference of compute times between SAMO
    and dense (VI-B). The page also gives the whole time.
    """
    targets: list[SpeedTarget] = []
    for name, base in SAMO_PAIRS[dtype]:
        samo, dense, over = found[name], found[base], f"a step of {base}"
        own, copies = (kind[GATHER] + kind[SCATTER] for kind in (samo, dense))
        what = f"{dtype}: what {name} takes to compress and expand"
        total = f"{own / dense[STEP]:.4f} in all"
        targets += [
            _share(
                f"{what} beyond {base}'s copies / {over} ({total})",
                (own - copies) / dense[STEP],
                SAMO_OWN_SHARE,
            ),
            _share(f"{dtype}: a step of {name} / {over}", samo[STEP] / dense[STEP], 1.0),
        ]
    return targets


def _share(text: str, value: float, limit: float) -> SpeedTarget:
    return at_most(text, value, limit, digits=4)


def as_markdown(
    study: CostStudy, found: Seconds, targets: Sequence[SpeedTarget], dtype: str
) -> str:
    """Return milliseconds by phase and kind of step, and the targets."""
    network = "one process" if study.ranks == 1 else f"{study.ranks} ranks, no limit"
    lines = [f"### A step at 124M parameters, {dtype}, {network}", ""]
    lines += [f"| ms | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
    for phase in [STEP, *(phase for phase in found[DENSE] if phase != STEP)]:
        cells = " | ".join(f"{1e3 * seconds[phase]:.1f}" for seconds in found.values())
        lines.append(f"| {phase} | {cells} |")
    lines += ["", study.own, ""]
    return "\n".join([*lines, *(f"- {target}" for target in targets)]) + "\n"


STUDIES = {
    "radius": CostStudy(
        ranks=2,
        methods=dict.fromkeys(OWN_SHARE, (DENSE, SPARSE)),
        own=f"Own work of a sparse step: {REDUCE}; {PLACE}; {KEEP}; beyond a dense one's.",
        judge=radius_targets,
    ),
    "samo": CostStudy(
        ranks=1,
        methods={dtype: [n for pair in pairs for n in pair] for dtype, pairs in SAMO_PAIRS.items()},
        own=f"Own work of samo: {GATHER}, which compresses; {SCATTER}, which expands. "
        "samo-0.9-fp32 and dense accumulate gradients in fp32, samo-0.9 and dense-bf16 in bf16.",
        judge=samo_targets,
    ),
}
"""The studies by the value of `--set` of `run.py`."""
