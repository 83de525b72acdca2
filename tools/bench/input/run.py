"""The time that reading batches takes of a step, with and without a thread that reads ahead.

    python -m tools.bench.input.run [--rounds N] [--out FOLDER]     some minutes
    python -m tools.bench.input.run --smoke                         a tiny model

Two trainers of equal settings take turns step by step, one with `--prefetch-batches true` and one
with false, on 64 samples of 1,024 tokens of a generated `.bin/.idx` pair. Phases are the run's own
timers (`--timing-log-level 2`), of which the tables have medians.

`cpu`: a small GPT computes on this CPU. `device`: the passes of each microbatch sleep instead, so
that the host waits as it does for a GPU; the seconds of a step are those of GPT 124M on a device of
400 TFLOP/s. No batch is pinned or copied here. Exit code 1 if reading takes 1 % of a step or more
with the thread, or if the two trainers do not compute the same losses.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from megatron.data.indexed_dataset import IndexedDatasetWriter
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tools.bench.common.contenders import Ours, Shape, quiet
from tools.bench.common.page_files import write_page
from tools.bench.common.side_by_side import interleave, ratio_of

SMALL = Shape(layers=1, hidden=64, heads=2, sequence=1024, vocabulary=512, batch=8, microbatches=8)
SMOKE = Shape(layers=1, hidden=32, heads=2, sequence=32, vocabulary=512, batch=2, microbatches=2)
DEVICE_SECONDS = 0.14
"""Seconds of the passes of a step: 56 TFLOP of GPT 124M for 65,536 tokens at 400 TFLOP/s."""
TARGET = 0.01
"""Largest share of a step that reading may take with the thread."""
READING = "batch-generator"
PHASES = (READING, "forward-compute", "backward-compute", "all-grads-sync", "optimizer")
ON, OFF = "read ahead", "read between steps"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The median seconds of a step of one trainer, and of its phases."""

    name: str
    step: float
    phases: dict[str, float]

    @property
    def reading(self) -> float:
        """The share of a step that reading takes."""
        return self.phases[READING] / self.step


@dataclass(frozen=True, kw_only=True)
class InputComparison:
    """A comparison of the two trainers.

    `ratio` is the speed of `ON` divided by that of `OFF`, the median over rounds.
    """

    where: str
    on: Steps
    off: Steps
    ratio: float
    same_losses: bool

    @property
    def met(self) -> bool:
        """Whether reading ahead keeps the target and changes no loss."""
        return self.on.reading < TARGET and self.same_losses


class TimedOurs(Ours):
    """Our trainer with the seconds of each step by phase; the passes sleep if `asleep` is given."""

    def __init__(
        self,
        flags: Sequence[str],
        groups: ProcessGroups,
        run_dir: Path,
        *,
        name: str,
        asleep: float | None,
    ) -> None:
        super().__init__(flags, groups, run_dir, name=name)
        self.losses: list[float] = []
        self.steps: list[dict[str, float]] = []
        if asleep is not None:
            (chunk,) = self.trainer.stage.chunks
            vars(chunk)["run"] = _Sleeping(list(chunk.parameter_infos()), asleep)

    def step(self) -> float:
        record, _ = self.trainer.train_step()
        self.metrics.step(record)
        self.losses.append(record.loss)
        found = {phase: record.timers[phase][0] for phase in PHASES}
        self.steps.append(found | {"step": record.step_seconds})
        return record.loss

    def medians(self, rounds: int) -> Steps:
        """Return the medians of the last `rounds` steps."""
        timed = self.steps[-rounds:]
        found = {phase: median(step[phase] for step in timed) for phase in PHASES}
        return Steps(name=self.name, step=median(step["step"] for step in timed), phases=found)


class _Sleeping:
    """The passes of a microbatch on a device that takes `seconds`; the loss tells the batch."""

    def __init__(self, infos: Sequence[Any], seconds: float) -> None:
        self._leaves = [leaf for info in infos for leaf in info.leaves]
        self._seconds = seconds

    def __call__(self, iteration: int, batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        time.sleep(self._seconds)
        nothing = torch.stack([leaf.float().sum() for leaf in self._leaves]).sum() * 0.0
        return (nothing + batch.labels.sum())[None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    shape = SMOKE if options.smoke else SMALL
    facts = _facts(shape)
    comparisons: list[InputComparison] = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus", documents=200 if options.smoke else 20_000)
        for where in ("cpu", "device"):
            rounds = options.rounds or {"cpu": 15, "device": 60}[where]
            comparisons.append(
                compare(where, shape, corpus, rounds=rounds, folder=Path(folder) / where)
            )
    text = "; ".join(f"{name} {value}" for name, value in facts.items()) + "\n"
    text += "".join(f"\n{_table(comparison)}" for comparison in comparisons)
    print(text)
    write_page(options.out, text=text, values={"facts": facts, "comparisons": _values(comparisons)})
    return 0 if options.smoke or all(comparison.met for comparison in comparisons) else 1


def write_corpus(prefix: Path, *, documents: int) -> Path:
    """Write documents of 50 to 1,500 random tokens; return the prefix of the pair."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in random.integers(50, 1500, documents):
            writer.add_document(random.integers(0, 512, length).astype(np.uint16))
        writer.close()
    return prefix


def compare(
    where: str, shape: Shape, corpus: Path, *, rounds: int, folder: Path
) -> InputComparison:
    """Let the trainer with the thread and the trainer without it take turns."""
    folder.mkdir()
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    asleep = DEVICE_SECONDS / shape.microbatches if where == "device" else None
    train = rounds + 1  # the thread reads in every step that is timed
    with quiet(folder / "console"):
        on, off = (
            TimedOurs(
                _flags(shape, corpus, prefetch=prefetch, steps=train + 1),
                groups,
                folder / prefetch,
                name=name,
                asleep=asleep,
            )
            for name, prefetch in ((ON, "true"), (OFF, "false"))
        )
        tokens = shape.batch * shape.microbatches * shape.sequence
        _, seconds = interleave([on, off], rounds=rounds, warm_up=1, tokens=tokens)
        for trainer in (on, off):
            trainer.metrics.close()
    return InputComparison(
        where=where,
        on=on.medians(rounds),
        off=off.medians(rounds),
        ratio=ratio_of(seconds, ON, OFF).ratio,
        same_losses=on.losses == off.losses,
    )


def _flags(shape: Shape, corpus: Path, *, prefetch: str, steps: int) -> list[str]:
    flags = [flag for flag in shape.flags(dtype="fp32") if flag != "--mock-data"]
    flags[flags.index("--train-iters") + 1] = str(steps)
    return [
        *flags,
        *("--train-data-path", str(corpus), "--eval-iters", "0"),
        *("--timing-log-level", "2", "--prefetch-batches", prefetch),
    ]


def _table(found: InputComparison) -> str:
    """Return a heading and the table of one place."""
    titles = {
        "cpu": "The CPU computes",
        "device": f"The passes of a step sleep {1e3 * DEVICE_SECONDS:.0f} ms, as the host of a GPU",
    }
    losses = "bitwise equal" if found.same_losses else "DIFFERENT"
    verdict = "met" if found.on.reading < TARGET else "MISSED"
    lines = [
        f"### {titles[found.where]}",
        "",
        f"Speed with the thread / without: {found.ratio:.4f}. {READING} with the thread: "
        f"{found.on.reading:.3%} of a step (target below {TARGET:.0%}: {verdict}). Losses: "
        f"{losses}.",
        "",
        f"| phase | {OFF}, ms | share | {ON}, ms | share |",
        "|---|---:|---:|---:|---:|",
    ]
    for phase in (*PHASES, "step"):
        off, on = (
            each.step if phase == "step" else each.phases[phase] for each in (found.off, found.on)
        )
        lines.append(
            f"| {phase} | {1e3 * off:.3f} | {off / found.off.step:.2%} | {1e3 * on:.3f} | "
            f"{on / found.on.step:.2%} |"
        )
    return "\n".join(lines) + "\n"


def _values(comparisons: Sequence[InputComparison]) -> list[dict[str, Any]]:
    return [asdict(each) | {"met": each.met} for each in comparisons]


def _facts(shape: Shape) -> Mapping[str, Any]:
    samples = shape.batch * shape.microbatches
    return {
        "batch": f"{samples} samples of {shape.sequence:,} tokens in {shape.microbatches} "
        "microbatches",
        "shape": f"{shape.layers} layer, hidden {shape.hidden}, vocabulary {shape.vocabulary}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads of torch": torch.get_num_threads(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.input.run",
        description="Step time by phase with batches read ahead and between steps.",
    )
    add = parser.add_argument
    add("--rounds", type=int, default=None, help="steps of each trainer (15; 60 asleep)")
    add("--out", type=Path, default=None, help="folder for README.md and results.json")
    add("--smoke", action="store_true", help="a tiny model: does the tool work?")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
