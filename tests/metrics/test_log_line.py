"""The log line: field names and order, averages, figures against a known clock."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator

import pytest

from megatron.metrics.log_line import (
    byte_size,
    duration,
    flop_rate,
    format_evaluation,
    format_line,
    format_timers,
    memory_size,
    perplexity,
    scaled,
)
from megatron.metrics.record import StepRecord, summarize

from .helpers import NOON, evaluated, record


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def _line(records: list[StepRecord], **options) -> str:
    options = {"now": NOON, "seconds_left": 4500.0, **options}
    return format_line(records[-1], summarize(records), **options)


def test_golden_line() -> None:
    last = record(10, lm_loss=4.0, num_zeros=12, params_norm=33.5, density=0.1, wait_seconds=0.004)
    line = _line([record(9), last], throughput=True, peak_tflops=10.0)
    assert line == (
        " [2023-11-14 22:13:20] iteration       10/     100 | consumed samples:           80 | "
        "elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 1.00 | "
        "learning rate: 1.000000E-04 | global batch size:     8 | lm loss: 4.500000E+00 | "
        "loss scale: 1.0 | grad norm: 1.250 | num zeros: 12 | params norm: 33.500 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | tokens/s: 2000 | "
        "per rank TFLOP/s: 1.00 | MFU: 10.0% | sent per step: 3.10 MB | density: 0.55 | "
        "waited for gradients (ms): 4.0 | peak memory: 1.00 GiB | "
        "ETA: 1h 15m (2023-11-14 23:28) |"
    )


def test_fields_that_were_not_measured_are_absent() -> None:
    line = _line([record(grad_norm=None)])
    for name in ("grad norm", "num zeros", "params norm", "MFU", "density", "throughput per GPU"):
        assert name not in line


@pytest.mark.parametrize(("loss", "text"), [(math.nan, "NAN"), (math.inf, "INF"), (0.0, "0.0")])
def test_loss_is_printed_whatever_it_is(loss: float, text: str) -> None:
    line = _line([record(lm_loss=loss)])
    assert f"| lm loss: {text}" in line
    assert f"number of nan iterations:   {int(not math.isfinite(loss))} |" in line


def test_loss_is_the_mean_of_applied_steps() -> None:
    records = [record(1, lm_loss=2.0), record(2, lm_loss=math.nan, skipped=True)]
    records.append(record(3, lm_loss=4.0))
    interval = summarize(records)
    assert interval.means == {"lm loss": 3.0}
    assert (interval.skipped, interval.nan, interval.steps) == (1, 1, 3)


def test_loss_of_an_interval_without_applied_step_is_shown() -> None:
    records = [record(1, lm_loss=2.0, skipped=True), record(2, lm_loss=3.0, skipped=True)]
    assert summarize(records).means == {"lm loss": 2.5}


def test_rates_weigh_steps_by_their_time() -> None:
    # 4000 tokens and 4e12 FLOPs in 1 s + 3 s on 2 ranks, peak 2 TFLOP/s.
    records = [
        record(1, step_seconds=1.0, counted=2000, flops=2e12),
        record(2, step_seconds=3.0, counted=2000, flops=2e12),
    ]
    line = _line(records, peak_tflops=2.0)
    assert "elapsed time per iteration (ms): 2000.0 |" in line
    assert "tokens/s: 1000 |" in line
    assert "per rank GFLOP/s: 500 |" in line
    assert "MFU: 25.0% |" in line


def test_last_step_has_nothing_left() -> None:
    assert "ETA: done |" in _line([record(100)], seconds_left=0.0)


def test_other_tools_can_read_the_line() -> None:
    line = _line([record(10)])
    found = re.search(r"iteration\s+(\d+)/\s+(\d+).*lm loss: ([0-9.E+-]+) \|", line)
    assert found and (int(found[1]), int(found[2]), float(found[3])) == (10, 100, 5.0)


def test_timers_are_summed_over_the_interval_and_shown_per_step() -> None:
    records = [record(1, timers={"forward": (0.1, 0.3)}), record(2, timers={"forward": (0.1, 0.1)})]
    interval = summarize(records)
    text = format_timers(interval.timers, steps=interval.steps, option="minmax")
    assert text.splitlines()[0] == "(min, max) time across ranks (ms):"
    assert re.fullmatch(r"    forward \.+: \(100\.00, 200\.00\)", text.splitlines()[1])
    assert format_timers(interval.timers, steps=2, option="max").endswith(": 200.00")
    assert format_timers({"a": [0.5, 1.5]}, steps=1, option="max").endswith(": 1500.00")
    ranks = format_timers({"a": [0.5, 1.5]}, steps=1, option="all").splitlines()
    assert ranks[2:] == ["     rank  0: 500.00", "     rank  1: 1500.00"]


def test_evaluation_line() -> None:
    line = format_evaluation(evaluated(5, "valid", 2.0))
    assert line == (
        "validation loss at iteration 5 on validation set | lm loss value: 2.000000E+00 | "
        "lm loss PPL: 7.389056E+00 |"
    )
    assert "PPL: NAN" in format_evaluation(evaluated(5, "test", math.nan))
    assert perplexity(1e9) == math.exp(20)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (byte_size(512), "512 B"),
        (byte_size(3_100_000), "3.10 MB"),
        (byte_size(999_900), "1.00 MB"),
        (byte_size(124e9), "124 GB"),
        (memory_size(0), "0 B"),
        (memory_size(1536 * 2**20), "1.50 GiB"),
        (flop_rate(70e9), "GFLOP/s: 70.0"),
        (flop_rate(312e12), "TFLOP/s: 312"),
        (scaled(26_400).strip(), "26.4 k"),
        (duration(12), "12s"),
        (duration(249), "4m 09s"),
        (duration(7500), "2h 05m"),
        (duration(3 * 86400 + 4 * 3600), "3d 04h"),
        (duration(math.inf), "unknown"),
    ],
)
def test_numbers_as_people_read_them(text: str, wanted: str) -> None:
    assert text == wanted


def test_what_a_path_tells_now_and_then_is_in_the_line_of_its_interval() -> None:
    records = [record(8, density=0.1), record(9, path={"index_kept": 0.75}), record(10)]
    assert " | density: 0.7 | index kept: 0.75 | " in _line(records)
