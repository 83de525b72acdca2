"""The metrics of a run: terminal, log, metrics files and trackers, written by one rank.

The trainer makes one `StepRecord` a step and hands it to `Metrics.step`, which only stores it; all
formatting happens at the log interval. Ranks that do not write hold a `NullMetrics`.
"""

from __future__ import annotations

from megatron.metrics.logger import Metrics, NullMetrics, cut_metrics
from megatron.metrics.record import EVALUATION_KINDS, Evaluation, Measures, StepRecord
from megatron.metrics.throughput import Throughput, Workload
from megatron.metrics.trackers import check_trackers

__all__ = [
    "EVALUATION_KINDS",
    "Evaluation",
    "Measures",
    "Metrics",
    "NullMetrics",
    "StepRecord",
    "Throughput",
    "Workload",
    "check_trackers",
    "cut_metrics",
]
