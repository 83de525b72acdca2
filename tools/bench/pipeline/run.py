"""Step time and bubble of the pipeline's schedules, beside what they are on paper.

    python -m tools.bench.pipeline.run [--out FOLDER]     2 and 4 stages; a minute
    python -m tools.bench.pipeline.run --smoke            does the tool work?

One process a stage runs each schedule in turn, round by round, over the transport that training
uses. A stage's layers are emulated: a pass of a microbatch sleeps (20 ms forward, 40 ms backward a
stage, in as many parts as it has chunks) and hands on tensors of a real size, so that stages which
share cores do not slow each other down. The step of the slowest rank, over the sleep of one rank,
less 1, is the bubble; on paper it is (p - 1) / (v m) (Narayanan et al. 2021, section 2.2). Beside
the ratio of 1F1B (v = 1) stands what sends cost: v chunks send v times as often. Writes
README.md and results.json to FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from statistics import median

from megatron.pipeline.schedule import interleaved
from tools.bench.common.netlab import Network, run
from tools.bench.common.page_files import write_page
from tools.planner.timeline import timeline

RANK = ("-m", "tools.bench.pipeline.rank")
FORWARD, BACKWARD = 0.020, 0.040
SHAPE = (2, 256, 768)
"""Shape of an activation: micro-batch, sequence, hidden size of GPT-2 small."""


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """A schedule: `stages` p, `chunks` v, `microbatches` m; seconds of its median step.

    It has the theoretical and the measured bubble.
    """

    stages: int
    chunks: int
    microbatches: int
    seconds: float
    paper: float
    bubble: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    scale, shape = (0.05, (1, 8, 8)) if options.smoke else (1.0, SHAPE)
    rows: list[PipelineRow] = []
    for stages in options.stages:
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                "chunks": options.chunks,
                "microbatches": options.microbatches,
                "rounds": options.rounds,
                "forward": FORWARD * scale,
                "backward": BACKWARD * scale,
                "shape": shape,
                "folder": folder,
            }
            command = Network(ranks=stages).command(
                [*RANK, json.dumps(settings)], folder=Path(folder)
            )
            if code := run(command):
                raise SystemExit(f"{stages} stages: a rank failed with exit code {code}")
            found = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
        busy = (FORWARD + BACKWARD) * scale
        for key, steps in found.items():
            chunks, microbatches = map(int, key.split())
            rows.append(_row(stages, chunks, microbatches, steps, busy))
    text = as_markdown(rows)
    print(text)
    values = {"cores": os.cpu_count(), "rows": [asdict(row) for row in rows]}
    write_page(options.out, text=text, values=values)
    return 0


def _row(
    stages: int, chunks: int, microbatches: int, steps: list[float], busy: float
) -> PipelineRow:
    orders = [interleaved(rank, stages, chunks, microbatches) for rank in range(stages)]
    paper = timeline(orders, chunks=chunks, forward=1, backward=2).bubble
    assert paper == Fraction(stages - 1, chunks * microbatches), "the schedule is what it should be"
    seconds = median(steps)
    return PipelineRow(
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        seconds=seconds,
        paper=float(paper),
        bubble=seconds / (busy * microbatches) - 1,
    )


def as_markdown(rows: Sequence[PipelineRow]) -> str:
    """Return the table with its explanation."""
    plain = {(row.stages, row.microbatches): row.seconds for row in rows if row.chunks == 1}
    lines = [
        f"Passes that sleep {1e3 * FORWARD:.0f} and {1e3 * BACKWARD:.0f} ms a stage; activations "
        f"of {' x '.join(map(str, SHAPE))} fp32 over gloo, {os.cpu_count()} cores. 1F1B is the "
        "schedule with one chunk. Step: median over rounds, of the slowest rank. Bubble: what the "
        "step takes beyond the passes of one rank, over these.",
        "",
        "| stages p | chunks v | microbatches m | step, ms | over 1F1B | bubble | (p-1) / (v m) |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        ratio = row.seconds / plain[row.stages, row.microbatches]
        lines.append(
            f"| {row.stages} | {row.chunks} | {row.microbatches} | {1e3 * row.seconds:.1f} | "
            f"{ratio:.3f} | {row.bubble:.3f} | {row.paper:.3f} |"
        )
    return "\n".join(lines) + "\n"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.pipeline.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--stages", nargs="+", type=int, default=[2, 4], help="numbers of stages")
    add("--chunks", nargs="+", type=int, default=[1, 2, 4], help="chunks of a stage; 1 is 1F1B")
    add("--microbatches", nargs="+", type=int, default=[4, 8, 16], help="of a step")
    add("--rounds", type=int, default=7, help="measured steps of each")
    add("--out", type=Path, default=None, help="folder for the report")
    add("--smoke", action="store_true", help="short sleeps")
    options = parser.parse_args(arguments)
    if 1 not in options.chunks:
        parser.error("--chunks: 1F1B, which the others are compared with, is 1")
    uneven = [m for m in options.microbatches for p in options.stages if m % p]
    if uneven:
        parser.error(f"--microbatches {uneven[0]}: interleaving takes a multiple of the stages")
    return options


if __name__ == "__main__":
    sys.exit(main())
