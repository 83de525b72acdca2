"""`Metrics`: takes one record a step and fans it out, at the log interval, to everything else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megatron.metrics.console import LOG, Console
from megatron.metrics.files import (
    CSV,
    CSV_HEADER,
    JSONL,
    AppendFile,
    csv_line,
    json_line,
    lines_of,
    parse_line,
    step_values,
)
from megatron.metrics.line import (
    format_brief,
    format_brief_evaluation,
    format_evaluation,
    format_line,
    format_timers,
)
from megatron.metrics.progress import Progress
from megatron.metrics.record import EVALUATION_KINDS, StepRecord, summarize
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

SECONDS_BETWEEN_FLUSHES = 10.0
"""Of training time; a shorter log interval flushes earlier."""


class Metrics:
    """Everything the writing rank tells the world about a run.

    `step` only stores; formatting, files and trackers come at each log interval, after 10 s of
    training, at evaluations, at `flush` and at `close`. Trackers and files never end a run: one
    notice, and the tracker is off; lines that a full disk refused are tried again.

    `formula` says which operations `StepRecord.flops` counts; `summary` is what trackers show as
    the configuration; `progress_dir` holds progress.txt (the run folder by default). `bar` forces
    the progress bar on or off (None: on a terminal). Raises `ConfigError` where a tracker's package
    is missing. On resume call `cut_metrics` before.
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
        progress_dir: str | Path | None = None,
        job_id: str = "",
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
        self._csv = AppendFile(self.run_dir / CSV)
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
        self._progress: Progress | None = None
        if logging.log_progress:
            self._progress = Progress(
                Path(progress_dir or run_dir),
                job_id=job_id,
                world_size=world_size,
                start_iteration=start_iteration,
                clock=clock,
            )
        self._announce_formula(formula)

    def say(self, text: str, *, brief: str | None = None) -> None:
        """Announce `text` on stdout and in log.txt, with the time. Where stdout is a terminal it
        shows `brief` instead, if there is one, and nothing if that is empty."""
        self._console.say(text, brief=brief)

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
        if self._progress is not None:
            self._progress.step(record)
        self._console.advance(record)
        if (
            record.iteration % self._logging.log_interval == 0
            or record.iteration == record.train_iters
        ):
            self._print_interval()
            self.flush()
        elif self._pending_seconds >= SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def evaluation(self, iteration: int, kind: str, loss: float) -> None:
        """Record the loss of the "valid" or the "test" set after `iteration` steps."""
        assert kind in EVALUATION_KINDS, kind
        self.flush()
        self._append(self._jsonl, json_line({"iteration": iteration, f"{kind}_loss": loss}))
        self._console.say(
            format_evaluation(iteration=iteration, kind=kind, loss=loss),
            brief=format_brief_evaluation(iteration=iteration, kind=kind, loss=loss),
        )
        now = self._clock()
        self._guard(
            lambda tracker: tracker.evaluation(
                time=now, iteration=iteration, samples=self._samples, kind=kind, loss=loss
            )
        )

    def has_evaluation(self, iteration: int, kind: str) -> bool:
        """Whether metrics.jsonl holds this loss, from whichever start of the run."""
        path, key = self.run_dir / JSONL, f"{kind}_loss"
        if not path.exists():
            return False
        found = (parse_line(line) for line in lines_of(path) if key.encode() in line)
        return any(v is not None and key in v and v["iteration"] == iteration for v in found)

    def saved(self, iteration: int) -> None:
        """Tell progress.txt that the checkpoint of `iteration` is committed."""
        if self._progress is not None:
            try:
                self._progress.saved(iteration)
            except OSError as error:
                self._progress = None
                self.say(f"progress.txt: {error}; --log-progress is off from here on")

    def throughput(self, workload: Workload) -> Throughput | None:
        """Say what the steps of this start come to; None where there was but one, or none."""
        found = self._stopwatch.read(workload, peak_tflops=self._logging.peak_tflops)
        if found is not None:
            if self._interval:
                self._print_interval()
            self.say(str(found))
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
        header = CSV_HEADER if self._csv.is_empty else ""
        self._append(self._csv, header + "".join(map(csv_line, lines)))
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
        self._csv.close()
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
        self.say(f"model FLOPs: {formula}{against}", brief="")

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
        self.say(f"{name} failed ({type(error).__name__}: {error}); it is off for this run")

    def _append(self, file: AppendFile, text: str) -> None:
        try:
            file.write(text)
            self._write_failed = False
        except OSError as error:
            if not self._write_failed:
                self.say(f"metrics cannot be written ({error}); kept in memory and tried again")
            self._write_failed = True


class NullMetrics(Metrics):
    """`Metrics` of a rank that writes nothing: the same methods, no file, no line."""

    def __init__(self) -> None:
        pass

    def say(self, text: str, *, brief: str | None = None) -> None:
        """Drop the text."""

    def step(self, record: StepRecord) -> None:
        """Drop the record."""

    def evaluation(self, iteration: int, kind: str, loss: float) -> None:
        """Drop the loss."""

    def has_evaluation(self, iteration: int, kind: str) -> bool:
        """Another rank knows."""
        return False

    def saved(self, iteration: int) -> None:
        """Nothing to tell."""

    def throughput(self, workload: Workload) -> Throughput | None:
        """Another rank says it."""
        return None

    def flush(self) -> None:
        """Nothing is pending."""

    def close(self) -> None:
        """Nothing is open."""
