"""TensorBoard and Weights & Biases, with Megatron-LM's names of curves.

Both are optional. If one of them raises, `Metrics` turns it off with one notice.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megatron.errors import missing_extra
from megatron.metrics.record import Evaluation, StepRecord, perplexity
from megatron.regular_file import read_regular
from megatron.status import replace_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from megatron.config import LoggingConfig


class TimedRecord(NamedTuple):
    """A step, the time of its end in seconds since 1970, and the steps that its timers add up."""

    time: float
    record: StepRecord
    steps: int = 1


class Tracker(Protocol):
    """A program that draws curves; any method may raise."""

    name: str

    def steps(self, records: Sequence[TimedRecord]) -> None:
        """Add steps, in order."""
        ...

    def evaluation(self, evaluation: Evaluation, *, time: float, samples: int) -> None:
        """Add the means of the validation or the test set."""
        ...

    def close(self) -> None:
        """Write pending values."""
        ...


def check_trackers(logging: LoggingConfig) -> None:
    """Raise `ConfigError` if the package of a requested tracker is absent; imports neither."""
    if logging.tensorboard_dir and importlib.util.find_spec("tensorboard") is None:
        raise missing_extra("tensorboard", "log")
    if logging.wandb_project and importlib.util.find_spec("wandb") is None:
        raise missing_extra("wandb", "log")


def step_scalars(record: StepRecord, logging: LoggingConfig, *, steps: int = 1) -> dict[str, float]:
    """Return the points of one step by curve; flags add throughput, memory and timers.

    A timer's point is in seconds per step, as in metrics.jsonl: the maximum over ranks of the mean
    over the `steps` since the last reading.
    """
    scalars: dict[str, float] = {
        **record.means,
        "learning-rate": record.lr,
        "batch-size": record.global_batch_size,
        "loss-scale": record.loss_scale,
        "bytes-sent": record.bytes_sent,
        "density": record.density,
        f"{record.unit}-per-second": record.per_second,
        "skipped": float(record.skipped),
    }
    optional = {
        "grad-norm": record.grad_norm,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
    }
    scalars |= {name: value for name, value in optional.items() if value is not None}
    if logging.log_throughput and record.step_seconds > 0:
        scalars["throughput"] = record.flops / record.step_seconds / record.world_size / 1e12
    if logging.log_memory_to_tensorboard:
        scalars["mem-max-allocated-bytes"] = record.peak_memory_bytes
    if logging.log_timers_to_tensorboard:
        scalars["iteration-time"] = record.step_seconds
        scalars |= {f"{name}-time": max(s) / steps for name, s in record.timers.items()}
    return scalars


def evaluation_scalars(evaluation: Evaluation, logging: LoggingConfig) -> dict[str, float]:
    """Return the points of one evaluation by curve; a flag adds the perplexity."""
    kind = {"valid": "validation", "test": "test"}[evaluation.kind]
    scalars = {f"{name} {kind}": mean for name, mean in evaluation.means.items()}
    name = evaluation.perplexity_of
    if logging.log_validation_ppl_to_tensorboard and name is not None:
        scalars[f"{name} {kind} ppl"] = perplexity(evaluation.means[name])
    return scalars


SAMPLES = "samples"
"""Folder in `--tensorboard-dir` of curves over samples, which TensorBoard shows as a run."""
_ALSO_OVER_SAMPLES = ("learning-rate", "batch-size", "loss-scale", "grad-norm")


class TensorBoardTracker:
    """Event files in `--tensorboard-dir`, and in its folder `SAMPLES` those of curves over samples.

    Older points after `start_iteration` and `start_samples` are hidden; with 0, none are.
    """

    name = "TensorBoard"

    def __init__(self, logging: LoggingConfig, *, start_iteration: int, start_samples: int) -> None:
        self._logging = logging
        # TensorBoard hides all points of a folder from one step on, whatever their curves count.
        self._over_steps = self._open("", start_iteration)
        self._over_samples = self._open(SAMPLES, start_samples)

    def steps(self, records: Sequence[TimedRecord]) -> None:
        """Add steps, in order."""
        for when, record, count in records:
            scalars = step_scalars(record, self._logging, steps=count)
            names = (name for name in (*record.means, *_ALSO_OVER_SAMPLES) if name in scalars)
            over_samples = {name: scalars[name] for name in names}
            self._add(scalars, time=when, step=record.iteration)
            self._add_over_samples(over_samples, time=when, samples=record.consumed_samples)

    def evaluation(self, evaluation: Evaluation, *, time: float, samples: int) -> None:
        """Add the means of the validation or the test set, and show them at once."""
        scalars = evaluation_scalars(evaluation, self._logging)
        self._add(scalars, time=time, step=evaluation.iteration)
        self._add_over_samples(scalars, time=time, samples=samples)
        self._over_steps.flush()
        self._over_samples.flush()

    def close(self) -> None:
        """Write pending values."""
        self._over_steps.close()
        self._over_samples.close()

    def _open(self, folder: str, start: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(
            log_dir=os.path.join(self._logging.tensorboard_dir or "", folder),
            max_queue=self._logging.tensorboard_queue_size,
            purge_step=start + 1 if start else None,
        )

    def _add(self, scalars: Mapping[str, float], *, time: float, step: int) -> None:
        for name, value in scalars.items():
            self._over_steps.add_scalar(name, value, global_step=step, walltime=time)

    def _add_over_samples(self, scalars: Mapping[str, float], *, time: float, samples: int) -> None:
        for name, value in scalars.items():
            self._over_samples.add_scalar(
                f"{name} vs samples", value, global_step=samples, walltime=time
            )


WANDB_ID = "wandb_id"
"""File in a run folder with the id of its run at Weights & Biases."""
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class WandbTracker:
    """A run at Weights & Biases; its variable WANDB_MODE decides whether data leave the machine.

    The starts of a run folder continue the run whose id is in the folder, unless the run `begins`
    again. `recorded` returns the last step of earlier starts, and their last evaluation of each
    kind: what a resumed run computes again is logged once.

    Raises:
        ValueError: The file of the id holds something else.
    """

    name = "wandb"

    def __init__(
        self,
        logging: LoggingConfig,
        *,
        name: str,
        run_dir: Path,
        summary: Mapping[str, Any],
        begins: bool,
        recorded: Callable[[], Mapping[str, int]],
    ) -> None:
        import wandb

        self._logging = logging
        known = "" if begins else _text(run_dir / WANDB_ID)
        self._recorded = recorded() if known else {}
        run_id = known or secrets.token_hex(4)
        if not _RUN_ID.fullmatch(run_id):
            raise ValueError(f"{run_dir / WANDB_ID} holds no id of a run; remove the file")
        folder = Path(logging.wandb_save_dir) if logging.wandb_save_dir else run_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=logging.wandb_project,
            entity=logging.wandb_entity,
            name=logging.wandb_exp_name or name or None,
            dir=str(folder),
            config=dict(summary),
            id=run_id,
            resume="allow",
        )
        replace_text(run_dir / WANDB_ID, run_id + "\n")

    def steps(self, records: Sequence[TimedRecord]) -> None:
        """Add steps, in order, but those that an earlier start has added."""
        for _, record, count in records:
            if record.iteration > self._recorded.get("step", 0):
                scalars = step_scalars(record, self._logging, steps=count)
                self._run.log(scalars, step=record.iteration)

    def evaluation(self, evaluation: Evaluation, *, time: float, samples: int) -> None:
        """Add the means of the validation or the test set, unless an earlier start has."""
        if evaluation.iteration > self._recorded.get(evaluation.kind, -1):
            scalars = evaluation_scalars(evaluation, self._logging)
            self._run.log(scalars, step=evaluation.iteration)

    def close(self) -> None:
        """Write pending values."""
        self._run.finish()


def _text(path: Path) -> str:
    try:
        return read_regular(path).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""
