"""progress.txt of `--log-progress`: a line for each start and each checkpoint, as Megatron-LM's.

It outlives restarts, so that the throughput of a whole chain of jobs can be read off its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from megatron.metrics.line import timestamp
from megatron.metrics.record import StepRecord

PROGRESS = "progress.txt"

_TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\t")
_SAVED = re.compile(
    r"Saved checkpoint\tIteration: (\d+)\t.*Floating-point operations: ([0-9.e+]+)\t"
    r"Tokens \(in billions\): ([0-9.]+)"
)


class Progress:
    """Appends to `folder/progress.txt`; counts go on from the last line at `start_iteration`."""

    def __init__(
        self,
        folder: Path,
        *,
        job_id: str,
        world_size: int,
        start_iteration: int,
        clock: Callable[[], float],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / PROGRESS
        self._prefix = f"Job ID: {job_id}\t# GPUs: {world_size}"
        self._world_size = world_size
        self._clock = clock
        self._job_start = clock()
        self._job_flops = 0.0
        self._first_start, self._past_flops, self._tokens = self._read_past(start_iteration)
        self._append("Starting job")

    def step(self, record: StepRecord) -> None:
        """Count the work of one step."""
        self._job_flops += record.flops
        self._tokens += record.tokens

    def saved(self, iteration: int) -> None:
        """Tell of a committed checkpoint, with the throughput of this job and of all so far."""
        now = self._clock()
        total = self._past_flops + self._job_flops
        job = self._rate(self._job_flops, now - self._job_start)
        cumulative = self._rate(total, now - self._first_start)
        self._append(
            f"Saved checkpoint\tIteration: {iteration}\t"
            f"Job throughput: {job:.3g} TFLOP/s/GPU\t"
            f"Cumulative throughput: {cumulative:.3g} TFLOP/s/GPU\t"
            f"Floating-point operations: {total:.6e}\t"
            f"Tokens (in billions): {self._tokens / 1e9:.6f}"
        )

    def _rate(self, flops: float, seconds: float) -> float:
        return flops / seconds / 1e12 / self._world_size if seconds > 0 else 0.0

    def _append(self, text: str) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{timestamp(self._clock())}\t{self._prefix}\t{text}\n")

    def _read_past(self, start_iteration: int) -> tuple[float, float, float]:
        first, flops, tokens = self._job_start, 0.0, 0.0
        if start_iteration == 0 or not self._path.exists():
            return first, flops, tokens
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        times = [m[1] for line in lines if (m := _TIME.match(line))]
        if times:
            first = datetime.strptime(times[0], "%Y-%m-%d %H:%M:%S").timestamp()
        for line in lines:
            if (saved := _SAVED.search(line)) and int(saved[1]) <= start_iteration:
                flops, tokens = float(saved[2]), float(saved[3]) * 1e9
        return first, flops, tokens
