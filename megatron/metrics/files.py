"""metrics.jsonl and metrics.csv: one line for each step in full precision, and their cutting.

A line is strict JSON, so numbers that JSON lacks are the strings "nan", "inf" and "-inf":
`float(value)` reads any of them. Evaluations are lines of their own in the JSON file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from megatron.metrics.record import StepRecord

JSONL = "metrics.jsonl"
CSV = "metrics.csv"
COLUMNS = (
    "iteration",
    "lm_loss",
    "lr",
    "grad_norm",
    "step_seconds",
    "tokens_per_second",
    "bytes_sent",
    "skipped",
    "peak_memory_bytes",
    "density",
    "consumed_samples",
    "tokens",
    "loss_scale",
    "flops",
    "wait_seconds",
    "num_zeros",
    "params_norm",
    "time",
)
"""Keys of a step's line, in order. `time` is when the step ended, in seconds since 1970."""

PHASE = "seconds/"
"""What the keys of timers begin with (`--timing-log-level`)."""

MAX_LINE_BYTES = 1 << 20

Value = float | int | bool | str | None


class AppendFile:
    """A file that grows by whole lines: a write that fails leaves nothing of itself behind.

    Lines that could not be written (disk full) stay in memory and go out with the next write. The
    file is opened by the first write, so that what is in it can still be cut before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._size = 0
        self._waiting: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written, by this run or one before."""
        size = self._size
        if self._descriptor < 0 and self._path.exists():
            size = self._path.stat().st_size
        return size == 0 and not self._waiting

    def write(self, text: str) -> None:
        """Append `text` and what an earlier failure left over; after an OSError call again."""
        self._waiting.append(text.encode("utf-8", "backslashreplace"))
        if self._descriptor < 0:
            self._open()
        data = memoryview(b"".join(self._waiting))
        done = 0
        try:
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += done
        self._waiting.clear()

    def close(self) -> None:
        """Close; a second call does nothing, a write opens again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        self._size = os.fstat(self._descriptor).st_size


def step_values(record: StepRecord, *, time: float, steps: int = 1) -> dict[str, Value]:
    """The line of a step as a dictionary: `COLUMNS`, then what went along other axes of the grid,
    what the gradient path tells of it, and where timers were read, the seconds a step of each: the
    slowest rank's mean over the `steps` since they were read before."""
    values = (
        record.iteration,
        record.lm_loss,
        record.lr,
        record.grad_norm,
        record.step_seconds,
        record.tokens_per_second,
        record.bytes_sent,
        bool(record.skipped),
        record.peak_memory_bytes,
        record.density,
        record.consumed_samples,
        record.tokens,
        record.loss_scale,
        record.flops,
        record.wait_seconds,
        record.num_zeros,
        record.params_norm,
        round(time, 3),
    )
    seconds = {f"{PHASE}{name}": max(s) / steps for name, s in record.timers.items() if s}
    columns = dict(zip(COLUMNS, values, strict=True))
    return {**columns, **record.axis_bytes, **record.path, **seconds}


def json_line(values: dict[str, Value]) -> str:
    """One line of metrics.jsonl, with its newline."""
    return json.dumps({k: _strict(v) for k, v in values.items()}, allow_nan=False) + "\n"


def csv_line(values: dict[str, Value]) -> str:
    """One line of metrics.csv, `COLUMNS` alone: empty where there is no value, 0 or 1 for yes and
    no."""
    return ",".join(_cell(values[name]) for name in COLUMNS) + "\n"


CSV_HEADER = ",".join(COLUMNS) + "\n"


def _strict(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _cell(value: Value) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def cut_metrics(run_dir: str | Path, step: int) -> int:
    """Move lines after `step` out of the metrics files of a run that resumes from `step`.

    They go to `metrics.jsonl.cut-N` and `metrics.csv.cut-N`, N being the first free number. Lines
    that cannot be read, as a crash leaves at the end, go with them. A run that starts over
    (`step` 0) keeps no line, since it evaluates iteration 0 again.

    Returns the number of JSON lines moved. Call on one rank before `Metrics` is made.
    """
    run_dir = Path(run_dir)
    number = 1
    while any((run_dir / f"{name}.cut-{number}").exists() for name in (JSONL, CSV)):
        number += 1
    moved = _cut(run_dir / JSONL, number=number, step=step, iteration_of=_json_iteration)
    _cut(run_dir / CSV, number=number, step=step, iteration_of=_csv_iteration)
    return moved


def _cut(path: Path, *, number: int, step: int, iteration_of: Callable[[bytes], int | None]) -> int:
    if not path.exists():
        return 0
    kept, cut = path.with_name(path.name + ".tmp"), path.with_name(f"{path.name}.cut-{number}")
    moved = 0
    with open(kept, "wb") as keep, open(cut, "wb") as away:
        for line in lines_of(path):
            iteration = iteration_of(line)
            stays = iteration is not None and (step > 0 or iteration < 0) and iteration <= step
            (keep if stays else away).write(line if line.endswith(b"\n") else line + b"\n")
            moved += not stays
        _synchronize(keep)
        _synchronize(away)
    if moved:
        os.replace(kept, path)
    else:
        kept.unlink()
        cut.unlink()
    return moved


def lines_of(path: Path) -> Iterator[bytes]:
    """Lines of a file that may hold anything: a longer one comes in parts of `MAX_LINE_BYTES`."""
    with open(path, "rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line


def _synchronize(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


_MOST_ITERATIONS = 2**53
"""Larger numbers are no step of a run, and curves could not hold them exactly."""


def parse_line(line: bytes) -> dict[str, Value] | None:
    """A line of metrics.jsonl, or None where it is torn or not ours."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    iteration = values.get("iteration")
    if type(iteration) is not int or not 0 <= iteration <= _MOST_ITERATIONS:
        return None
    return values


def _json_iteration(line: bytes) -> int | None:
    values = parse_line(line)
    return None if values is None else int(values["iteration"] or 0)


def _csv_iteration(line: bytes) -> int | None:
    if line == CSV_HEADER.encode():
        return -1
    cells = line.split(b",")
    whole = line.endswith(b"\n") and len(cells) == len(COLUMNS) and cells[0].isdigit()
    return int(cells[0]) if whole else None
