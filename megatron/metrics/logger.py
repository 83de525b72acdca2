"""Output of step records to metrics files, log, console and trackers."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from megatron.busy import busy
from megatron.metrics.log_line import (
    format_brief,
    format_brief_evaluation,
    format_evaluation,
    format_line,
    format_timers,
    scaled,
    timestamp,
)
from megatron.metrics.record import EVALUATION_KINDS, Evaluation, StepRecord, key_of, summarize
from megatron.metrics.throughput import Stopwatch, Throughput, Workload
from megatron.metrics.trackers import (
    TensorBoardTracker,
    TimedRecord,
    Tracker,
    WandbTracker,
    check_trackers,
)
from megatron.regular_file import open_regular

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
"""Columns in the line of every step, in order. `time` is its end, in seconds since 1970.

The loss has the task's own key, and the other means of the task follow it. `counted` and
`per_second` have the keys of the task's unit: "tokens" and "tokens_per_second".
"""
_LOSSES = ("lm_loss", "loss")

PHASE = "seconds/"
"""Prefix of the keys of timers (`--timing-log-level`)."""

MAX_LINE_BYTES = 1 << 20

Value = float | int | bool | str | None


def loss_key(values: Mapping[str, Any]) -> str | None:
    """Return the key of the loss in a line of metrics.jsonl; None if the line is of no step."""
    return next((key for key in _LOSSES if key in values), None)


def unit_of(values: Mapping[str, Any]) -> str:
    """Return the unit that the step of a line counts, such as "tokens", the default."""
    rates = (key.removesuffix(f"_{PER_SECOND}") for key in values if key.endswith(f"_{PER_SECOND}"))
    return next(rates, "tokens")


def columns_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the key that each of the `COLUMNS` has in the line of a step."""
    unit = unit_of(values)
    own = {LOSS: loss_key(values) or LOSS, COUNTED: unit, PER_SECOND: f"{unit}_{PER_SECOND}"}
    return {name: own.get(name, name) for name in COLUMNS}


class AppendFile:
    """A file that grows by whole lines; a failed write leaves no partial line.

    Lines that could not be written (disk full) stay in memory until the next write. The first write
    opens the file, so that the file can be cut before that. With `held`, lines wait for `release`.
    """

    def __init__(self, path: Path, *, held: bool = False) -> None:
        self._path = path
        self._held = held
        self._descriptor = -1
        self._size = 0
        self._waiting: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        """True if the file is empty or absent, and no line waits to be written."""
        size = self._size
        if self._descriptor < 0 and self._path.exists():
            size = self._path.stat().st_size
        return size == 0 and not self._waiting

    def write(self, text: str) -> None:
        """Append `text`, after the texts of earlier failed writes.

        Raises `OSError` if the write fails; the next call then writes `text` as well.
        """
        self._waiting.append(text.encode("utf-8", "backslashreplace"))
        if self._held:
            return
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

    def release(self) -> None:
        """Write the lines that were held, and all later ones at once. Raises as `write`."""
        if self._held:
            self._held = False
            self.write("")

    def close(self) -> None:
        """Close the file. A second call does nothing; a write opens the file again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self._descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._descriptor).st_size
        # A crash may have torn the last line, which the next one must not join.
        if self._size and os.pread(self._descriptor, 1, self._size - 1) != b"\n":
            self._waiting.insert(0, b"\n")


def step_values(record: StepRecord, *, time: float, steps: int = 1) -> dict[str, Value]:
    """Return the metrics of a step as a dictionary.

    The keys are `COLUMNS`, then bytes sent along other axes of the grid, the gradient path's own
    numbers, and timers if they were read. A timer's value is in seconds per step, the maximum over
    ranks of the mean over the `steps` since the last reading.
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
    """Return one line of metrics.jsonl, with its newline."""
    return json.dumps({k: _strict(v) for k, v in values.items()}, allow_nan=False) + "\n"


def _strict(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def cut_metrics(run_dir: str | Path, step: int) -> int:
    """Move the lines after `step` out of `metrics.jsonl`, for a run that resumes from `step`.

    The lines go to `metrics.jsonl.cut-N`, where N is the first free number, together with
    unreadable lines that a crash left at the end. A run that starts over (`step` 0) keeps no line,
    since it evaluates iteration 0 again. Call on one rank before `Metrics` is created. Returns the
    number of JSON lines moved. Raises `OSError`, and then leaves the files as they were.
    """
    run_dir = Path(run_dir)
    number = 1
    while (run_dir / f"{JSONL}.cut-{number}").exists():
        number += 1
    path = run_dir / JSONL
    if not path.exists():
        return 0
    kept, cut = path.with_name(path.name + ".tmp"), path.with_name(f"{path.name}.cut-{number}")
    moved, is_cut = 0, False
    kept.unlink(missing_ok=True)  # of a start that was killed
    try:
        with open(kept, "xb") as keep, open(cut, "xb") as away:
            for line in lines_of(path):
                values = parse_line(line)
                stays = values is not None and 0 < step >= int(values["iteration"] or 0)
                (keep if stays else away).write(line if line.endswith(b"\n") else line + b"\n")
                moved += not stays
            _synchronize(keep)
            _synchronize(away)
        if moved:
            os.replace(kept, path)
            is_cut = True
    finally:
        if not is_cut:
            kept.unlink(missing_ok=True)
            cut.unlink(missing_ok=True)
    return moved


def last_recorded(run_dir: Path) -> dict[str, int]:
    """Return the last "step", "valid" and "test" of all starts, also of lines that were cut."""
    last: dict[str, int] = {}
    for path in run_dir.glob(f"{JSONL}*"):
        for values in filter(None, map(parse_line, lines_of(path))):
            kinds = [kind for kind in EVALUATION_KINDS if f"{kind}_loss" in values]
            for kind in kinds or ["step"]:
                last[kind] = max(last.get(kind, 0), int(values["iteration"] or 0))
    return last


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; lines longer than `MAX_LINE_BYTES` come in parts."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line


def _synchronize(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


_MOST_ITERATIONS = 2**53
"""Largest number of a step; curves could not represent larger numbers exactly."""


def parse_line(line: bytes) -> dict[str, Value] | None:
    """Parse a line of metrics.jsonl; None if the line is torn or of another program."""
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

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_SECONDS_BETWEEN_REDRAWS = 0.2


def without_controls(text: str) -> str:
    """Return a text without terminal sequences and control characters but tabs and line ends."""
    return _CONTROLS.sub("", text)


class Console:
    """Output of text to log and console, and of the progress bar.

    A closed terminal or a full disk ends that output, not the run.
    """

    def __init__(
        self,
        log_path: Path,
        *,
        stream: TextIO,
        train_iters: int,
        start_iteration: int = 0,
        bar: bool | None = None,
        held: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log: AppendFile | None = AppendFile(log_path, held=held)
        self._stream: TextIO | None = stream
        self._is_terminal = stream.isatty()
        self._clock = clock
        self._total = train_iters
        self._start = start_iteration
        self._wants_bar = self._is_terminal if bar is None else bar
        self._bar: Any = None
        self._next_redraw = 0.0

    def log(self, text: str, *, brief: str | None = None, terminal: str | None = None) -> None:
        """Write `text` after the time; control characters are removed.

        `brief` and `terminal` are as for `line`.
        """
        time = f" [{timestamp(self._clock())}] "
        brief, terminal = (time + short if short else short for short in (brief, terminal))
        self.line(time + text, brief=brief, terminal=terminal)

    def line(self, text: str, *, brief: str | None = None, terminal: str | None = None) -> None:
        """Write `text` as it is, with control characters removed.

        The stream shows `brief` instead, if given, and nothing if it is empty; `terminal` is shown
        instead if the stream is a terminal.
        """
        text = without_controls(text) + "\n"
        if terminal is not None and self._is_terminal:
            brief = terminal
        if brief is None:
            self._show(text)
        elif brief:
            self._show(without_controls(brief) + "\n")
        self._to_log(lambda log: log.write(text))

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Show messages on the stream, and not in the log, while the body takes long."""
        return busy(what, lambda text: self._show(f" {without_controls(text)}\n"))

    def release(self) -> None:
        """Write the lines that were held to the log."""
        self._to_log(AppendFile.release)

    def _to_log(self, act: Callable[[AppendFile], None]) -> None:
        if self._log is None:
            return
        try:
            act(self._log)
        except OSError as error:
            self._log.close()
            self._log = None
            lost = f"{LOG} cannot be written any more ({error}); the run continues without it"
            self._show(f" {lost}\n")

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
        # ValueError: the stream was closed by another part of the program.
        except (OSError, ValueError):
            self._lose_terminal()

    def close(self) -> None:
        """Leave the bar as it stands and close the log. A second call does nothing."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._wants_bar = None, False
        if self._log is not None:
            self._log.close()
            self._log = None

    def _make_bar(self) -> Any:
        from tqdm import tqdm

        class Bar(tqdm):
            # tqdm's monitor thread would only redraw slow bars, and would outlive the run.
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
    """The metrics of the run, on the writing rank.

    `step` only stores a record. Formatting, files and trackers follow at each log interval, after
    10 s of training, at evaluations, at `flush` and at `close`. Trackers and files never end a run:
    a tracker that fails is turned off with one notice, and lines that a full disk refused are tried
    again. When a run resumes, call `cut_metrics` before.

    Args:
        start_iteration: The step from which the run goes on.
        start_samples: The samples that were consumed up to that step.
        only_evaluates: Whether the start trains no step (`--skip-train`).
        start: What this start runs on, such as its ranks: a line before that of its first step.
        formula: The operations that `StepRecord.flops` counts.
        summary: The configuration that trackers show.
        bar: Whether to show a progress bar; None: on a terminal.
        held: Whether log.txt and the trackers stay as they are until `begin`.

    Raises:
        ConfigError: A tracker's package is missing.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        logging: LoggingConfig,
        train_iters: int,
        start_iteration: int = 0,
        start_samples: int = 0,
        only_evaluates: bool = False,
        start: Mapping[str, Value] | None = None,
        name: str = "",
        formula: str = "",
        summary: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
        bar: bool | None = None,
        held: bool = False,
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
            held=held,
            clock=clock,
        )
        self._jsonl = AppendFile(self.run_dir / JSONL)
        self._pending: list[TimedRecord] = []
        self._pending_seconds = 0.0
        self._interval: list[StepRecord] = []
        self._first: TimedRecord | None = None
        self._stopwatch = Stopwatch()
        self._samples = start_samples
        self._write_failed = False
        self._closed = False
        self._trackers: list[Tracker] = []
        # A start without steps makes no point of an earlier one stale.
        stale = (0, 0) if only_evaluates else (start_iteration, start_samples)
        self._held: Callable[[], None] | None = partial(
            self._add_trackers,
            start=stale,
            begins=start_iteration == 0 and not only_evaluates,
            name=name,
            summary=summary or {},
        )
        self._start = {"iteration": start_iteration, **start} if start else None
        if not held:
            self.begin()
        self._announce_formula(formula)

    def begin(self) -> None:
        """Write what was held and open the trackers. A second call does nothing."""
        self.release()
        if self._held is not None:
            add_trackers, self._held = self._held, None
            add_trackers()

    def release(self) -> None:
        """Write what was held, without trackers, for a start that fails."""
        self._console.release()

    def log(self, text: str, *, brief: str | None = None) -> None:
        """Write `text` with the time to stdout and log.txt.

        stdout shows `brief` instead, if given, and nothing if `brief` is empty.
        """
        self._console.log(text, brief=brief)

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Show messages on stdout, and not in log.txt, while the body takes long."""
        return self._console.busy(what)

    def step(self, record: StepRecord) -> None:
        """Store one step. If it ends a log interval or the run, print the line and flush."""
        self._interval.append(record)
        timed = TimedRecord(self._clock(), record, len(self._interval))
        if self._first is None:
            self._first = timed
        self._pending.append(timed)
        self._stopwatch.add(record)
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
        short = format_brief_evaluation(evaluation)
        self._console.log(format_evaluation(evaluation), terminal=short)
        now = self._clock()
        self._guard(lambda tracker: tracker.evaluation(evaluation, time=now, samples=self._samples))

    def has_evaluation(self, iteration: int, kind: str) -> bool:
        """Return whether metrics.jsonl has this evaluation, from any start of the run."""
        return self._has_line(iteration, f"{kind}_loss")

    def has_step(self, iteration: int) -> bool:
        """Return whether metrics.jsonl has this step, from any start of the run."""
        return self._has_line(iteration, "step_seconds")

    def throughput(self, workload: Workload) -> Throughput | None:
        """Log and return the throughput of this start; None if fewer than two steps were run."""
        found = self._stopwatch.read(workload, peak_tflops=self._logging.peak_tflops)
        if found is not None:
            if self._interval:
                self._print_interval()
            self.log(str(found))
        return found

    def flush(self) -> None:
        """Write all steps so far.

        Call this method before a checkpoint is committed, so that its steps are in the files.
        """
        records, self._pending, self._pending_seconds = self._pending, [], 0.0
        if not records:
            return
        lines = [step_values(record, time=when, steps=steps) for when, record, steps in records]
        if self._start is not None:
            lines.insert(0, self._start)
            self._start = None
        self._append(self._jsonl, "".join(map(json_line, lines)))
        interval = self._logging.tensorboard_log_interval
        chosen = [timed for timed in records if timed.record.iteration % interval == 0]
        if chosen:
            self._guard(lambda tracker: tracker.steps(chosen))

    def close(self) -> None:
        """Print an unfinished interval and write everything. A second call does nothing."""
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

    def _has_line(self, iteration: int, key: str) -> bool:
        path = self.run_dir / JSONL
        if not path.exists():
            return False
        marks = (key.encode(), str(iteration).encode())
        lines = (line for line in lines_of(path) if all(mark in line for mark in marks))
        found = (parse_line(line) for line in lines)
        return any(v is not None and key in v and v["iteration"] == iteration for v in found)

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
        self._console.line(line, terminal=brief)

    def _seconds_left(self, last: StepRecord, *, now: float) -> float:
        # Wall-clock time includes evaluations and saves. The first step is excluded, since it warms
        # up.
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

    def _add_trackers(
        self, *, start: tuple[int, int], begins: bool, name: str, summary: Mapping[str, Any]
    ) -> None:
        logging, (start_iteration, start_samples) = self._logging, start
        makers: dict[str, Callable[[], Tracker]] = {}
        if logging.tensorboard_dir:
            makers["TensorBoard"] = lambda: TensorBoardTracker(
                logging, start_iteration=start_iteration, start_samples=start_samples
            )
        if logging.wandb_project:
            makers["wandb"] = lambda: WandbTracker(
                logging,
                name=name,
                run_dir=self.run_dir,
                summary=summary,
                begins=begins,
                recorded=lambda: last_recorded(self.run_dir),
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
    """`Metrics` of a rank that writes nothing: the same methods without effect."""

    def __init__(self) -> None:
        pass

    def begin(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def log(self, text: str, *, brief: str | None = None) -> None:
        """Ignore the text."""

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def step(self, record: StepRecord) -> None:
        """Ignore the record."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Drop the means."""

    def has_evaluation(self, iteration: int, kind: str) -> bool:
        """Return False: only the writing rank knows."""
        return False

    def has_step(self, iteration: int) -> bool:
        """Return False: only the writing rank knows."""
        return False

    def throughput(self, workload: Workload) -> Throughput | None:
        """Return None: only the writing rank measures."""
        return None

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
