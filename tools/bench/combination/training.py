"""The rows of the combination study that are trained: WRN-16-1 on CIFAR-10's images.

A run is that of the report in small: `STEPS` steps of `BATCH` images, learning rates by per cent of
nonzeros (table 6) that change at the same shares of the run (table 5), and fractions of rewiring
(table 8). Recomputation leaves every number as it is, so the runs do without it: the strategy of a
row says how its memory is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.report import read_run
from samo.schedule import FRACTION
from tools.bench.combination.memory import nearest
from tools.bench.combination.settings import BATCH, MODELS, WRN, MemorySetting, smaller
from tools.bench.common.rows import Row, append_row, read_rows
from tools.bench.common.training_runs import Runner, is_finished
from tools.planner.paper_accounting import NONE, STAR_2, Bits

SEEDS = (1, 2, 3)
STEPS = 80
TEST_IMAGES = 2000
"""Test images on which the network is evaluated after the last step: the first ones."""
REWIRING = 8
"""Steps between rewirings at first; the intervals double, so that a run has four."""
SHARES = (100, 30, 10)
SMALL = MODELS["small"]


def trained() -> tuple[MemorySetting, ...]:
    """Return the trained settings, the most important first."""
    first, rest = _tiers()
    return (*first, *rest)


def _tiers() -> tuple[list[MemorySetting], list[MemorySetting]]:
    """Return the settings that compare all techniques with none, and the others.

    All together are the cross of nonzeros, bits and microbatches, whole or a tenth, and the
    shallower and the narrower network whose bytes are nearest to those of each sparse one in 16
    bits and small microbatches.
    """

    def by_nonzeros(bits: Bits, microbatch: int) -> list[MemorySetting]:
        low: dict[str, Any] = {"model": "small", "size": SMALL.size, "strategy": STAR_2}
        return [
            MemorySetting(nonzeros=each, bits=bits, microbatch=microbatch, **low) for each in SHARES
        ]

    none, every = by_nonzeros(32, BATCH), by_nonzeros(16, BATCH // 10)
    _, sparse, sparser = every
    first = [*none, *every, *baselines([sparse])]
    rest = [*by_nonzeros(32, BATCH // 10), *by_nonzeros(16, BATCH), *baselines([sparser])]
    return first, [each for each in rest if each not in first]


def baselines(sparse: Sequence[MemorySetting]) -> list[MemorySetting]:
    """Return the shallower and the narrower dense network nearest in bytes to each setting."""
    found = [
        nearest(each, [replace(each, size=size, nonzeros=100) for size in sizes])
        for each in sparse
        for sizes in smaller(each.model)
    ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A setting with a seed of initial values, order, augmentation and masks."""

    setting: MemorySetting
    seed: int

    @property
    def name(self) -> str:
        """Folder of the run and key of its row."""
        return f"{self.setting.name}-seed{self.seed}"

    def flags(self, *, data: Path, runs_dir: Path) -> list[str]:
        """Return the flags of `pretrain_vision.py`.

        Args:
            data: The folder of the images.
            runs_dir: The folder of run folders.
        """
        table = WRN["sparse"][self.setting.nonzeros]
        starts = [epoch - 1 for epoch in WRN["learning_rates"] if epoch > 1]
        values: dict[str, object] = {
            "data-path": data,
            "run-dir": runs_dir / self.name,
            "seed": self.seed,
            "train-iters": STEPS,
            "lr": f"{WRN['learning_rates'][1] * table['learning_rate']:g}",
            "full-validation": "false",
            "eval-interval": STEPS,
            "eval-iters": TEST_IMAGES // BATCH,
            "log-interval": STEPS // 4,
        }
        if self.setting.nonzeros < 100:
            values["dsr-interval"] = REWIRING
            values["dsr-fraction"] = f"{table['fraction'] * FRACTION:.8g}"
        found = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        changes = [str(round(start * STEPS / WRN["epochs"])) for start in starts]
        stored = replace(self.setting, strategy=NONE)
        return [*stored.flags, *found, "--lr-multi-step-iters", *changes]


def runs() -> tuple[TrainedRun, ...]:
    """Return all runs, the most important first: a study may be stopped at any of them."""
    return tuple(
        TrainedRun(setting=each, seed=seed) for tier in _tiers() for seed in SEEDS for each in tier
    )


def train(
    wanted: Sequence[TrainedRun],
    *,
    data: Path,
    work: Path,
    results: Path,
    runner: Runner,
    log: Callable[[str], None],
) -> list[str]:
    """Make every run without a row, one after another, and append its row when it has ended.

    Returns the names of the runs that failed, or that are left since the runner is `stopping`.
    """
    done = {row["name"] for row in read_rows(results)}
    failed: list[str] = []
    (work / "console").mkdir(parents=True, exist_ok=True)
    for run in (each for each in wanted if each.name not in done):
        if getattr(runner, "stopping", False):
            failed.append(run.name)
            continue
        console = work / "console" / f"{run.name}.txt"
        try:
            code = _ended(run, data=data, work=work, runner=runner, console=console)
            if code:
                raise DataError(f"exit code {code}; see {console}")
            row = row_of(run, work / "runs" / run.name)
        except (ConfigError, DataError) as error:
            log(f"{run.name}: {error}")
            failed.append(run.name)
            continue
        append_row(results, row)
        log(f"{run.name}: accuracy {row['valid_accuracy']:.4f}, {row['seconds']:.0f} s")
    return failed


def _ended(run: TrainedRun, *, data: Path, work: Path, runner: Runner, console: Path) -> int:
    """Start or resume a run and return its exit code; 0 if it had ended before."""
    flags = run.flags(data=data, runs_dir=work / "runs")
    if is_finished(work / "runs" / run.name, flags, 1, SMALL.task.config):
        return 0
    return runner(flags, console)


def row_of(run: TrainedRun, folder: Path) -> Row:
    """Return the row of a finished run: accuracy and loss on test images, training losses.

    Raises:
        DataError: The folder has no evaluation after the last step.
    """
    found = read_run(folder)
    accuracy = dict(found.means.get("accuracy", {}).get("valid", ()))
    loss = dict(found.evaluations.get("valid", ()))
    if STEPS not in accuracy:
        raise DataError(f"{folder}: holds no evaluation of step {STEPS}; remove the folder")
    setting = run.setting
    return {
        "name": run.name,
        "setting": asdict(setting) | {"strategy": str(setting.strategy)},
        "seed": run.seed,
        "steps": STEPS,
        "valid_accuracy": accuracy[STEPS],
        "valid_loss": loss[STEPS],
        "seconds": round(sum(found.steps["step_seconds"]), 1),
    }
