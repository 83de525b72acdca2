"""Tests of AxoNN's metrics over the steps of this start, logged at the end of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.metrics import Workload
from megatron.metrics.throughput import Stopwatch, Throughput
from megatron.report import read_run
from megatron.report.facts import run_table
from megatron.status import Status, read_status, write_status

from .helpers import make_metrics, record

WORKLOAD = Workload(flops_per_sample=512 * 6e11, seq_length=512, recomputed=True)


def measured(*seconds: float, peak: float | None = None, **fields: Any) -> Throughput | None:
    watch = Stopwatch()
    for number, taken in enumerate(seconds, start=1):
        watch.add(record(number, step_seconds=taken, **fields))
    return watch.read(WORKLOAD, peak_tflops=peak)


def test_the_first_step_is_left_out() -> None:
    """The paper measures so: eleven batches, the mean of the last ten."""
    found = measured(90.0, *[4.0] * 5, *[6.0] * 5, peak=125.0, world_size=8, global_batch_size=16)
    assert found is not None
    assert (found.steps, found.skipped, found.step_seconds) == (10, 0, 5.0)
    assert found.training_days == pytest.approx(3e11 * 5.0 / (16 * 512) / 86400)
    assert found.flops_per_second == pytest.approx(6e11 * 16 * 512 / 5.0 / 8)
    assert found.percent_of_peak == pytest.approx(100 * found.flops_per_second / 125e12)


def test_a_growing_batch_counts_as_it_is() -> None:
    watch = Stopwatch()
    for number, (batch, seconds) in enumerate([(8, 9.0), (8, 1.0), (24, 3.0)]):
        watch.add(record(number, global_batch_size=batch, step_seconds=seconds, skipped=batch > 8))
    found = watch.read(WORKLOAD, peak_tflops=None)
    steady = measured(9.0, 1.0, 1.0)
    assert found is not None and steady is not None
    assert (found.steps, found.step_seconds, found.skipped) == (2, 2.0, 1)
    assert found.training_days == pytest.approx(steady.training_days)
    assert found.flops_per_second == pytest.approx(steady.flops_per_second)
    assert "of 2 after the first of this start, 1 of them skipped;" in str(found)


def test_one_step_says_nothing() -> None:
    assert measured() is None and measured(1.0) is None and measured(1.0, 0.0) is None


def test_it_is_said_after_the_last_line(tmp_path: Path) -> None:
    metrics, stream = make_metrics(tmp_path, log_interval=2, peak_tflops=1000.0)
    for number in (1, 2, 3):
        metrics.step(record(number))
    found = metrics.throughput(WORKLOAD)
    metrics.close()
    assert stream.getvalue().count("| lm loss: ") == 2
    # 8 samples of 512 tokens in 0.5 s, on two ranks.
    assert stream.getvalue().splitlines()[-1].partition("] ")[2] == (
        "throughput: 0.50 s a step, the mean of 2 after the first of this start; 300 billion "
        "tokens would take 424 days (AxoNN, Eq. 2); per rank TFLOP/s: 2458 (Eq. 3: 4 passes, "
        "with the recomputed forward), 245.8% of its peak"
    )
    assert found == measured(0.5, 0.5, 0.5, peak=1000.0)
    kept = dataclasses.replace(found, recomputed=False) if found is not None else None
    assert "(Eq. 3 less the forward it recomputes: 3 passes)" in str(kept)


def test_the_papers_metrics_are_those_of_large_models(tmp_path: Path) -> None:
    """GPT-3 trained models of 125 million parameters and more on 300 billion tokens."""
    metrics, _ = make_metrics(tmp_path)
    metrics.step(record(1))
    metrics.close()
    for flops, peak, told in ((8e6, None, False), (8e6, 0.1, True), (9e8, None, True)):
        watch = Stopwatch()
        for number in (1, 2, 3):
            watch.add(record(number))
        workload = dataclasses.replace(WORKLOAD, flops_per_sample=512 * flops)
        found = watch.read(workload, peak_tflops=peak)
        assert found is not None and found.training_days and found.training_days > 0
        assert ("300 billion tokens" in str(found)) == told
        assert "throughput: 0.50 s a step" in str(found) and "FLOP/s: " in str(found)
        write_status(tmp_path, Status(state="done", throughput=dataclasses.asdict(found)))
        assert ("300 billion tokens" in dict(run_table(read_run(tmp_path)))) == told


def test_status_and_report_show_it(tmp_path: Path) -> None:
    metrics, _ = make_metrics(tmp_path)
    metrics.step(record(1))
    metrics.close()
    found = measured(9.0, 0.5, 0.5, peak=1000.0)
    assert found is not None
    write_status(tmp_path, Status(state="done", throughput=dataclasses.asdict(found)))
    status = read_status(tmp_path)
    assert status is not None and Throughput(**status.throughput) == found  # pyright: ignore
    rows = dict(run_table(read_run(tmp_path)))
    assert rows["mean step"] == "0.50 s (2 of the last start)"
    assert rows["300 billion tokens"] == "424 days (AxoNN, Eq. 2)"
    counted = "2458 TFLOP/s, 245.8% of its peak (forward twice and backward; AxoNN, Eq. 3)"
    assert rows["rate of one rank"] == counted


@pytest.mark.parametrize("text", ["null", "[1]", '{"steps": "x", "training_days": null}', "7"])
def test_a_strange_status_does_not_stop_the_report(tmp_path: Path, text: str) -> None:
    metrics, _ = make_metrics(tmp_path)
    metrics.step(record(1))
    metrics.close()
    (tmp_path / "status.json").write_text(f'{{"state": "done", "throughput": {text}}}')
    assert "mean step" not in dict(run_table(read_run(tmp_path)))
