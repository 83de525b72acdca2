"""Records, and a `Metrics` whose clock and terminal a test holds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from megatron.config import LoggingConfig
from megatron.metrics import Evaluation, Metrics, StepRecord

NOON = 1_700_000_000.0


class Clock:
    """A clock that stands still until it is advanced."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


def record(iteration: int = 1, *, lm_loss: float = 5.0, **changes: Any) -> StepRecord:
    """A step of 0.5 s with 1000 tokens and 10^12 FLOPs on two ranks."""
    values: dict[str, Any] = {
        "iteration": iteration,
        "train_iters": 100,
        "consumed_samples": 8 * iteration,
        "means": {"lm loss": lm_loss},
        "lr": 1e-4,
        "grad_norm": 1.25,
        "step_seconds": 0.5,
        "counted": 1000,
        "bytes_sent": 3_100_000,
        "density": 1.0,
        "skipped": False,
        "loss_scale": 1.0,
        "global_batch_size": 8,
        "peak_memory_bytes": 2**30,
        "flops": 1e12,
        "world_size": 2,
    }
    return StepRecord(**{**values, **changes})


def evaluated(iteration: int, kind: str, loss: float) -> Evaluation:
    """An evaluation of a GPT."""
    return Evaluation(
        iteration=iteration, kind=kind, means={"lm loss": loss}, perplexity_of="lm loss"
    )


def make_metrics(
    folder: Path, *, clock: Clock | None = None, train_iters: int = 100, **options: Any
) -> tuple[Metrics, io.StringIO]:
    """A `Metrics` with a text buffer as terminal; options of `LoggingConfig` or `Metrics`."""
    known = {name: options.pop(name) for name in list(options) if name in _LOGGING}
    stream = options.pop("stream", None) or io.StringIO()
    metrics = Metrics(
        folder,
        logging=LoggingConfig(**known),
        train_iters=train_iters,
        stream=stream,
        clock=clock or Clock(),
        **options,
    )
    return metrics, stream


_LOGGING = set(LoggingConfig.__dataclass_fields__)


def lines_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of a metrics file, read by a strict JSON reader."""
    return [strict_json(line) for line in (folder / name).read_text().splitlines()]


def strict_json(text: str) -> Any:
    """Parse JSON and refuse what only Python writes (NaN, Infinity)."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)
