"""`--profile`: records a range of steps by torch's profiler, or marks it for the CUDA profiler."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.config import Config


class Profiler:
    """A profiler of the steps after `--profile-step-start`, up to `--profile-step-end`.

    It runs on `--profile-ranks`, or on all ranks if these are none. With `--use-pytorch-profiler`,
    or without a GPU, it writes `profile/rank_N.json` (open it in Perfetto) and `rank_N.txt` (a
    table of times) into the run folder; otherwise it marks the steps with the CUDA profiler's start
    and stop, for `nsys profile -c cudaProfilerApi`.
    """

    def __init__(self, config: Config, *, rank: int, run_dir: Path, on_cuda: bool) -> None:
        logging = config.logging
        chosen = not logging.profile_ranks or rank in logging.profile_ranks
        self._wanted = logging.profile and chosen
        self._first, self._end = logging.profile_step_start, logging.profile_step_end
        self._stem = run_dir / "profile" / f"rank_{rank}"
        self._torch: torch.profiler.profile | None = None
        if self._wanted and (logging.use_pytorch_profiler or not on_cuda):
            self._torch = torch.profiler.profile()
        self._running = False

    def before_step(self, iteration: int) -> None:
        """Start profiling before the range's first step, or at once if the run resumes in it."""
        if not self._wanted or self._running or not self._first < iteration <= self._end:
            return
        self._running = True
        if self._torch is None:
            torch.cuda.profiler.start()
        else:
            self._torch.start()

    def after_step(self, iteration: int) -> None:
        """Stop profiling after the last step of the range."""
        if iteration >= self._end:
            self.close()

    def close(self) -> None:
        """Stop profiling, if it is on, and write the records."""
        if not self._running:
            return
        self._running = False
        if self._torch is None:
            torch.cuda.profiler.stop()
            return
        self._torch.stop()
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        self._torch.export_chrome_trace(str(self._stem.with_suffix(".json")))
        table = self._torch.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
        self._stem.with_suffix(".txt").write_text(table)
