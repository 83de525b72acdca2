"""The metrics of a run: step records on their way to files, console and trackers."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from megatron.metrics.log_line import (
    format_brief,
    format_brief_evaluation,
    format_evaluation,
    format_line,
    format_timers,
    scaled,
    timestamp,
)
from megatron.metrics.record import Evaluation, StepRecord, key_of, summarize
from megatron.metrics.throughput import Stopwatch, Throughput, Workload
from megatron.metrics.trackers import (
    TensorBoardTracker,
    TimedRecord,
    Tracker,
    WandbTracker,
    check_trackers,
)

if TYPE_CHECKING:
    from megatron.config import LoggingConfig


JSONL = "metrics.jsonl"
LOSS, COUNTED, PER_SECOND = "loss", "counted", "per_second"
"""Columns whose keys depend on the task: `loss_key`, `unit_of`."""
COLUMNS = (
    "iteration",
    LOSS,
    "lr",
    "grad_norm",
    "step_seconds",
    PER_SECOND,
    "bytes_sent",
    "skipped",
    "peak_memory_bytes",
    "density",
    "consumed_samples",
    COUNTED,
    "loss_scale",
    "flops",
    "wait_seconds",
    "num_zeros",
    "params_norm",
    "time",
)
"""What the line of every step has, in order. `time` is when the step ended, in seconds since 1970.

The loss has the task's own key, and the other means of the task follow it. What is counted and its
rate have the keys of the task's unit: "tokens" and "tokens_per_second".
"""
_LOSSES = ("lm_loss", "loss")

PHASE = "seconds/"
"""What the keys of timers begin with (`--timing-log-level`)."""

MAX_LINE_BYTES = 1 << 20

Value = float | int | bool | str | None


def loss_key(values: Mapping[str, Any]) -> str | None:
    """Return the key of the loss in a line of metrics.jsonl; None for a line of no step."""
    return next((key for key in _LOSSES if key in values), None)


def unit_of(values: Mapping[str, Any]) -> str:
    """Return what the step of a line counts: "tokens" or "images"."""
    rates = (key.removesuffix(f"_{PER_SECOND}") for key in values if key.endswith(f"_{PER_SECOND}"))
    return next(rates, "tokens")


def columns_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the key that each of the `COLUMNS` has in the line of a step."""
    unit = unit_of(values)
    own = {LOSS: loss_key(values) or LOSS, COUNTED: unit, PER_SECOND: f"{unit}_{PER_SECOND}"}
    return {name: own.get(name, name) for name in COLUMNS}


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
        """Return whether nothing was ever written, by this run or one before."""
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
    """The line of a step as a dictionary.

    `COLUMNS`, then what went along other axes of the grid, what the gradient path tells of it, and
    where timers were read, the seconds a step of each: the slowest rank's mean over the `steps`
    since they were read before.
    """
    columns: dict[str, Value] = {
        "iteration": record.iteration,
        **{key_of(name): mean for name, mean in record.means.items()},
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "step_seconds": record.step_seconds,
        f"{record.unit}_{PER_SECOND}": record.per_second,
        "bytes_sent": record.bytes_sent,
        "skipped": bool(record.skipped),
        "peak_memory_bytes": record.peak_memory_bytes,
        "density": record.density,
        "consumed_samples": record.consumed_samples,
        record.unit: record.counted,
        "loss_scale": record.loss_scale,
        "flops": record.flops,
        "wait_seconds": record.wait_seconds,
        "num_zeros": record.num_zeros,
        "params_norm": record.params_norm,
        "time": round(time, 3),
    }
    seconds = {f"{PHASE}{name}": max(s) / steps for name, s in record.timers.items() if s}
    return {**columns, **record.axis_bytes, **record.path, **seconds}


def json_line(values: dict[str, Value]) -> str:
    """One line of metrics.jsonl, with its newline."""
    return json.dumps({k: _strict(v) for k, v in values.items()}, allow_nan=False) + "\n"


def _strict(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def cut_metrics(run_dir: str | Path, step: int) -> int:
    """Move lines after `step` out of `metrics.jsonl` of a run that resumes from `step`.

    The lines go to `metrics.jsonl.cut-N`, N being the first free number. Lines
    that cannot be read, as a crash leaves at the end, go with them. A run that starts over
    (`step` 0) keeps no line, since it evaluates iteration 0 again.

    Returns the number of JSON lines moved. Call on one rank before `Metrics` is made.
    """
    run_dir = Path(run_dir)
    number = 1
    while (run_dir / f"{JSONL}.cut-{number}").exists():
        number += 1
    path = run_dir / JSONL
    if not path.exists():
        return 0
    kept, cut = path.with_name(path.name + ".tmp"), path.with_name(f"{path.name}.cut-{number}")
    moved = 0
    with open(kept, "wb") as keep, open(cut, "wb") as away:
        for line in lines_of(path):
            values = parse_line(line)
            stays = values is not None and 0 < step >= int(values["iteration"] or 0)
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


LOG = "log.txt"

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_SECONDS_BETWEEN_REDRAWS = 0.2


class Console:
    """The outputs of lines and of the progress bar.

    A terminal that goes away (closed pipe) or a disk that is full ends that output, not the run.
    """

    def __init__(
        self,
        log_path: Path,
        *,
        stream: TextIO,
        train_iters: int,
        start_iteration: int = 0,
        bar: bool | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log: AppendFile | None = AppendFile(log_path)
        self._stream: TextIO | None = stream
        self._is_terminal = stream.isatty()
        self._clock = clock
        self._total = train_iters
        self._start = start_iteration
        self._wants_bar = self._is_terminal if bar is None else bar
        self._bar: Any = None
        self._next_redraw = 0.0

    def log(self, text: str, *, brief: str | None = None) -> None:
        """Announce `text`, with the time before its first line and control characters dropped.

        `brief` is as for `line`.
        """
        time = f" [{timestamp(self._clock())}] "
        self.line(time + text, brief=time + brief if brief else brief)

    def line(self, text: str, *, brief: str | None = None) -> None:
        """Announce `text` as it is, save for control characters.

        A terminal shows `brief` in its place where there is one, and nothing where that is empty.
        """
        text = _CONTROL.sub("", text) + "\n"
        if brief is None or not self._is_terminal:
            self._show(text)
        elif brief:
            self._show(_CONTROL.sub("", brief) + "\n")
        if self._log is None:
            return
        try:
            self._log.write(text)
        except OSError as error:
            self._log.close()
            self._log = None
            self._show(f" {LOG} cannot be written any more ({error}); the run goes on without\n")

    def advance(self, record: StepRecord) -> None:
        """Move the bar to this step, at most five times a second."""
        if not self._wants_bar:
            return
        now = time.monotonic()
        if now < self._next_redraw and record.iteration < self._total:
            return
        self._next_redraw = now + _SECONDS_BETWEEN_REDRAWS
        try:
            if self._bar is None:
                self._bar = self._make_bar()
            rate = f"{scaled(record.per_second)}{record.unit}/s"
            self._bar.set_postfix_str(f"loss {record.loss:.4f}, {rate}", refresh=False)
            self._bar.update(record.iteration - self._bar.n)
        except (OSError, ValueError):  # ValueError: the stream was closed under us
            self._lose_terminal()

    def close(self) -> None:
        """Leave the bar as it stands and close the log; a second call does nothing."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._wants_bar = None, False
        if self._log is not None:
            self._log.close()
            self._log = None

    def _make_bar(self) -> Any:
        from tqdm import tqdm

        class Bar(tqdm):
            # A watcher thread would only redraw slow bars, and outlive the run.
            monitor_interval = 0

        return Bar(
            total=self._total,
            initial=self._start,
            file=self._stream,
            dynamic_ncols=True,
            mininterval=0,
            bar_format=_BAR_FORMAT,
        )

    def _show(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            if self._bar is None:
                self._stream.write(text)
                self._stream.flush()
            else:
                self._bar.write(text, file=self._stream, end="")
        except UnicodeEncodeError:
            self._show(text.encode("ascii", "backslashreplace").decode("ascii"))
        except (OSError, ValueError):
            self._lose_terminal()

    def _lose_terminal(self) -> None:
        self._stream, self._bar, self._wants_bar = None, None, False


SECONDS_BETWEEN_FLUSHES = 10.0
"""Seconds of training between flushes; a shorter log interval flushes earlier."""


class Metrics:
    """Everything the writing rank tells the world about a run.

    `step` only stores; formatting, files and trackers come at each log interval, after 10 s of
    training, at evaluations, at `flush` and at `close`. Trackers and files never end a run: one
    notice, and the tracker is off; lines that a full disk refused are tried again.

    `formula` says which operations `StepRecord.flops` counts; `summary` is what trackers show as
    the configuration. `bar` forces the progress bar on or off (None:
    on a terminal). Raises `ConfigError` where a tracker's package is missing. On resume call
    `cut_metrics` before.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        logging: LoggingConfig,
        train_iters: int,
        start_iteration: int = 0,
        world_size: int = 1,
        name: str = "",
        formula: str = "",
        summary: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
        bar: bool | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_trackers(logging)
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._logging = logging
        self._clock = clock
        self._console = Console(
            self.run_dir / LOG,
            stream=sys.stdout if stream is None else stream,
            train_iters=train_iters,
            start_iteration=start_iteration,
            bar=bar,
            clock=clock,
        )
        self._jsonl = AppendFile(self.run_dir / JSONL)
        self._pending: list[TimedRecord] = []
        self._pending_seconds = 0.0
        self._interval: list[StepRecord] = []
        self._timed_steps: dict[int, int] = {}
        self._first: TimedRecord | None = None
        self._stopwatch = Stopwatch()
        self._samples = 0
        self._write_failed = False
        self._closed = False
        self._trackers: list[Tracker] = []
        self._add_trackers(start_iteration=start_iteration, name=name, summary=summary or {})
        self._announce_formula(formula)

    def log(self, text: str, *, brief: str | None = None) -> None:
        """Announce `text` on stdout and in log.txt, with the time.

        Where stdout is a terminal it shows `brief` instead, if there is one, and nothing if that is
        empty.
        """
        self._console.log(text, brief=brief)

    def step(self, record: StepRecord) -> None:
        """Store one step; print the log line if it ends an interval or the run."""
        timed = TimedRecord(self._clock(), record)
        if self._first is None:
            self._first = timed
        self._pending.append(timed)
        self._interval.append(record)
        self._stopwatch.add(record)
        if record.timers:
            self._timed_steps[record.iteration] = len(self._interval)
        self._pending_seconds += record.step_seconds
        self._samples = record.consumed_samples
        self._console.advance(record)
        if (
            record.iteration % self._logging.log_interval == 0
            or record.iteration == record.train_iters
        ):
            self._print_interval()
            self.flush()
        elif self._pending_seconds >= SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record the means of the "valid" or the "test" set after some steps."""
        self.flush()
        line = {"iteration": evaluation.iteration, **evaluation.values}
        self._append(self._jsonl, json_line(line))
        self._console.log(format_evaluation(evaluation), brief=format_brief_evaluation(evaluation))
        now = self._clock()
        self._guard(lambda tracker: tracker.evaluation(evaluation, time=now, samples=self._samples))

    def has_evaluation(self, iteration: int, kind: str) -> bool:
        """Return whether metrics.jsonl holds this loss, from whichever start of the run."""
        path, key = self.run_dir / JSONL, f"{kind}_loss"
        if not path.exists():
            return False
        found = (parse_line(line) for line in lines_of(path) if key.encode() in line)
        return any(v is not None and key in v and v["iteration"] == iteration for v in found)

    def throughput(self, workload: Workload) -> Throughput | None:
        """Say what the steps of this start come to; None where there was but one, or none."""
        found = self._stopwatch.read(workload, peak_tflops=self._logging.peak_tflops)
        if found is not None:
            if self._interval:
                self._print_interval()
            self.log(str(found))
        return found

    def flush(self) -> None:
        """Write all steps so far. Call before a checkpoint commits, so that none is ever lost."""
        records, self._pending, self._pending_seconds = self._pending, [], 0.0
        if not records:
            return
        steps = self._timed_steps
        lines = [
            step_values(record, time=when, steps=steps.pop(record.iteration, 1))
            for when, record in records
        ]
        self._append(self._jsonl, "".join(map(json_line, lines)))
        interval = self._logging.tensorboard_log_interval
        chosen = [timed for timed in records if timed.record.iteration % interval == 0]
        if chosen:
            self._guard(lambda tracker: tracker.steps(chosen))

    def close(self) -> None:
        """Print an unfinished interval and write everything; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._interval:
            self._print_interval()
        self.flush()
        self._guard(lambda tracker: tracker.close())
        self._trackers.clear()
        self._jsonl.close()
        self._console.close()

    def _print_interval(self) -> None:
        interval, last = summarize(self._interval), self._interval[-1]
        self._interval = []
        now = self._clock()
        seconds_left = self._seconds_left(last, now=now)
        line = format_line(
            last,
            interval,
            now=now,
            seconds_left=seconds_left,
            throughput=self._logging.log_throughput,
            peak_tflops=self._logging.peak_tflops,
        )
        brief = format_brief(last, interval, seconds_left=seconds_left)
        if interval.timers:
            timers = "\n" + format_timers(
                interval.timers, steps=interval.steps, option=self._logging.timing_log_option
            )
            line, brief = line + timers, brief + timers
        self._console.line(line, brief=brief)

    def _seconds_left(self, last: StepRecord, *, now: float) -> float:
        # By the wall clock, so that evaluations and saves are in it; the first step, which warms
        # everything up, is not.
        assert self._first is not None
        done = last.iteration - self._first.record.iteration
        a_step = (now - self._first.time) / done if done else last.step_seconds
        return a_step * (last.train_iters - last.iteration)

    def _announce_formula(self, formula: str) -> None:
        if not formula:
            return
        peak = self._logging.peak_tflops
        against = f"; MFU is against a peak of {peak:g} TFLOP/s per rank" if peak else ""
        self.log(f"model FLOPs: {formula}{against}", brief="")

    def _add_trackers(self, *, start_iteration: int, name: str, summary: Mapping[str, Any]) -> None:
        logging = self._logging
        makers: dict[str, Callable[[], Tracker]] = {}
        if logging.tensorboard_dir:
            makers["TensorBoard"] = lambda: TensorBoardTracker(
                logging, start_iteration=start_iteration
            )
        if logging.wandb_project:
            makers["wandb"] = lambda: WandbTracker(
                logging, name=name, directory=self.run_dir, summary=summary
            )
        for tracker_name, make in makers.items():
            try:
                self._trackers.append(make())
            except Exception as error:
                self._drop(tracker_name, error)

    def _guard(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                self._drop(tracker.name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self.log(f"{name} failed ({type(error).__name__}: {error}); it is off for this run")

    def _append(self, file: AppendFile, text: str) -> None:
        try:
            file.write(text)
            self._write_failed = False
        except OSError as error:
            if not self._write_failed:
                self.log(f"metrics cannot be written ({error}); kept in memory and tried again")
            self._write_failed = True


class NullMetrics(Metrics):
    """`Metrics` of a rank that writes nothing: the same methods, no file, no line."""

    def __init__(self) -> None:
        pass

    def log(self, text: str, *, brief: str | None = None) -> None:
        """Drop the text."""

    def step(self, record: StepRecord) -> None:
        """Drop the record."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Drop the means."""

    def has_evaluation(self, iteration: int, kind: str) -> bool:
        """Another rank knows."""
        return False

    def throughput(self, workload: Workload) -> Throughput | None:
        """Another rank says it."""
        return None

    def flush(self) -> None:
        """Nothing is pending."""

    def close(self) -> None:
        """Nothing is open."""
