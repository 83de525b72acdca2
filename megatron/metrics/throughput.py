"""Throughput of the steps of one start.

It covers the time per step, the time of a whole training, and FLOP/s (AxoNN, VI-D, Eq. 2 and 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.metrics.log_line import flop_rate, three_digits
from megatron.metrics.record import StepRecord
from megatron.model.flops import training_days

FLOPS_PER_TOKEN_OF_GPT3 = 6e8
"""FLOPs per token of GPT-3's smallest model, about 6 for each of 100 million parameters.

For smaller models the days for 300 billion tokens are not reported.
"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a sample.

    `flops_per_sample` counts three passes through each layer, or four if layers are `recomputed`
    (Eq. 3 of AxoNN). `seq_length` is the number of tokens of a sample; None unless the model is a
    language model, for which the time of 300 billion tokens is a useful figure.
    """

    flops_per_sample: float
    seq_length: int | None = None
    recomputed: bool = False


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Means over `steps` steps, including `skipped` steps without an update.

    `step_seconds` is the time of one step, `training_days` the time of 300 billion tokens (Eq. 2).
    `flops_per_second` is the rate of one rank (Eq. 3, without its fourth pass unless layers are
    recomputed), and `percent_of_peak` the same as a share of the rank's peak, if that is known.
    `training_days` and `flops_per_token` are None unless samples are sequences of tokens.
    """

    steps: int
    skipped: int
    step_seconds: float
    training_days: float | None
    flops_per_second: float
    percent_of_peak: float | None
    recomputed: bool
    flops_per_token: float | None

    def __str__(self) -> str:
        skipped = f", {self.skipped} of them skipped" if self.skipped else ""
        pace = (
            f"throughput: {three_digits(self.step_seconds)} s a step, the mean of {self.steps} "
            f"after the first of this start{skipped}"
        )
        peak = self.percent_of_peak
        if self.training_days is None:
            share = "" if peak is None else f", {peak:.1f}% of its peak"
            return f"{pace}; per rank {flop_rate(self.flops_per_second)}{share}"
        if not shows_papers_metrics(self.flops_per_token, peak):
            return f"{pace}; per rank {flop_rate(self.flops_per_second)}"
        share = "" if peak is None else f", {peak:.1f}% of its peak"
        counted = (
            "Eq. 3: 4 passes, with the recomputed forward"
            if self.recomputed
            else "Eq. 3 less the forward it recomputes: 3 passes"
        )
        return (
            f"{pace}; 300 billion tokens would take {three_digits(self.training_days)} days "
            f"(AxoNN, Eq. 2); per rank {flop_rate(self.flops_per_second)} ({counted}){share}"
        )


def shows_papers_metrics(flops_per_token: float | None, percent_of_peak: float | None) -> bool:
    """Return whether to report AxoNN's metrics (Eq. 2 and 3).

    The run must train a language model (`flops_per_token` is not None) that is as large as GPT-3's
    smallest, or have `--peak-tflops`.
    """
    if flops_per_token is None:
        return False
    return percent_of_peak is not None or flops_per_token >= FLOPS_PER_TOKEN_OF_GPT3


class Stopwatch:
    """The sums over the steps of one start, without the first step, which warms everything up."""

    def __init__(self) -> None:
        self._started = False
        self._steps = self._skipped = self._samples = 0
        self._seconds = 0.0
        self._world_size = 1

    def add(self, record: StepRecord) -> None:
        """Count one step; the first step of the start is ignored."""
        if not self._started:
            self._started = True
            return
        self._steps += 1
        self._skipped += record.skipped
        self._samples += record.global_batch_size
        self._seconds += record.step_seconds
        self._world_size = record.world_size

    def read(self, workload: Workload, *, peak_tflops: float | None) -> Throughput | None:
        """Return the means, or None if no step was timed. `peak_tflops` is the peak of one rank."""
        if not self._steps or self._seconds <= 0:
            return None
        length = workload.seq_length
        rate = workload.flops_per_sample * self._samples / self._seconds / self._world_size
        return Throughput(
            steps=self._steps,
            skipped=self._skipped,
            step_seconds=self._seconds / self._steps,
            # Totals over all steps, so that a batch that grows counts with its actual size.
            training_days=None
            if length is None
            else training_days(step_seconds=self._seconds, tokens_per_step=self._samples * length),
            flops_per_second=rate,
            percent_of_peak=None if peak_tflops is None else 100 * rate / (peak_tflops * 1e12),
            recomputed=workload.recomputed,
            flops_per_token=None if length is None else workload.flops_per_sample / length,
        )
