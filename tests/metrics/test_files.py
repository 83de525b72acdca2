"""metrics.jsonl: content, strictness, cutting, and a disk that fills up."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from megatron.metrics import cut_metrics
from megatron.metrics.logger import AppendFile, parse_line
from megatron.report import read_run, write_report

from .helpers import evaluated, lines_of, make_metrics, record

PROMISED = (
    "iteration lm_loss lr grad_norm step_seconds tokens_per_second bytes_sent skipped "
    "peak_memory_bytes density"
).split()


def _train(folder: Path, first: int, last: int, *, evaluate: tuple[int, ...] = ()) -> None:
    metrics, _ = make_metrics(folder, log_interval=3, start_iteration=first - 1)
    for i in range(first, last + 1):
        metrics.step(record(i, lm_loss=10 / i))
        if i in evaluate:
            metrics.evaluation(evaluated(i, "valid", 11 / i))
    metrics.close()


def test_one_line_for_each_step_in_full_precision(tmp_path: Path) -> None:
    _train(tmp_path, 1, 7)
    lines = lines_of(tmp_path)
    assert [line["iteration"] for line in lines] == list(range(1, 8))
    assert list(lines[0])[: len(PROMISED)] == PROMISED
    assert lines[2]["lm_loss"] == 10 / 3
    assert lines[2]["tokens_per_second"] == 2000.0
    assert lines[2]["skipped"] is False
    assert [line["lm_loss"] for line in lines] == [10 / i for i in range(1, 8)]


def test_each_start_that_trains_says_what_it_runs_on(tmp_path: Path) -> None:
    for first, ranks in (1, 4), (3, 2):
        metrics, _ = make_metrics(tmp_path, start_iteration=first - 1, start={"ranks": ranks})
        metrics.step(record(first))
        metrics.step(record(first + 1))
        metrics.close()
    make_metrics(tmp_path, start_iteration=4, start={"ranks": 1})[0].close()
    lines = lines_of(tmp_path)
    assert [lines[i] for i in (0, 3)] == [
        {"iteration": 0, "ranks": 4},
        {"iteration": 2, "ranks": 2},
    ]
    assert all("ranks" not in lines[i] for i in (1, 2, 4, 5)) and len(lines) == 6
    assert read_run(tmp_path).iterations == [1, 2, 3, 4]
    assert "<td>0: 4, 2: 2</td>" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_text_that_float_reads(tmp_path: Path, loss: float) -> None:
    metrics, _ = make_metrics(tmp_path)
    metrics.step(record(1, lm_loss=loss, grad_norm=None, skipped=True))
    metrics.evaluation(evaluated(1, "valid", loss))
    metrics.close()
    step, evaluation = lines_of(tmp_path)
    assert str(float(step["lm_loss"])) == str(loss) and step["grad_norm"] is None
    assert str(float(evaluation["valid_loss"])) == str(loss)
    assert set(evaluation) == {"iteration", "valid_loss"}


def test_nothing_is_lost_at_a_flush_before_a_checkpoint(tmp_path: Path) -> None:
    metrics, _ = make_metrics(tmp_path, log_interval=100)
    metrics.step(record(1))
    assert not (tmp_path / "metrics.jsonl").exists()
    metrics.flush()
    assert len(lines_of(tmp_path)) == 1
    metrics.flush()
    assert len(lines_of(tmp_path)) == 1
    metrics.step(record(2, step_seconds=60.0))
    assert len(lines_of(tmp_path)) == 2, "slow steps are written as they come"
    metrics.close()


def test_cut_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    _train(whole, 1, 12, evaluate=(3, 6, 9))
    _train(resumed, 1, 9, evaluate=(3, 6, 9))
    assert cut_metrics(resumed, 6) == 4  # steps 7, 8, 9 and the evaluation at 9
    _train(resumed, 7, 12, evaluate=(9,))
    name = "metrics.jsonl"
    assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    cut = lines_of(resumed, "metrics.jsonl.cut-1")
    assert [line["iteration"] for line in cut] == [7, 8, 9, 9]


def test_cuts_are_numbered_and_a_cut_of_nothing_leaves_no_file(tmp_path: Path) -> None:
    assert cut_metrics(tmp_path, 5) == 0
    _train(tmp_path, 1, 6)
    assert cut_metrics(tmp_path, 6) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.txt", "metrics.jsonl"]
    assert cut_metrics(tmp_path, 4) == 2
    assert cut_metrics(tmp_path, 2) == 2
    assert [line["iteration"] for line in lines_of(tmp_path)] == [1, 2]
    assert [line["iteration"] for line in lines_of(tmp_path, "metrics.jsonl.cut-2")] == [3, 4]


def test_a_full_disk_cuts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _train(tmp_path, 1, 6)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        cut_metrics(tmp_path, 4)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "torn", [b'{"iteration": 3, "lm_lo', b'{"iteration": 3, "lm_loss": 1.0}', b"\x00\xff\x00", b"["]
)
def test_torn_last_line_is_moved_too(tmp_path: Path, torn: bytes) -> None:
    _train(tmp_path, 1, 2)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(torn)
    assert cut_metrics(tmp_path, 5) == 1
    assert [line["iteration"] for line in lines_of(tmp_path)] == [1, 2]
    assert (tmp_path / "metrics.jsonl.cut-1").read_bytes() == torn + b"\n"
    _train(tmp_path, 3, 3)
    assert [line["iteration"] for line in lines_of(tmp_path)] == [1, 2, 3]


def test_start_over_keeps_no_line(tmp_path: Path) -> None:
    metrics, _ = make_metrics(tmp_path)
    metrics.evaluation(evaluated(0, "valid", 3.0))
    metrics.step(record(1))
    metrics.close()
    assert cut_metrics(tmp_path, 0) == 2
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_full_disk_loses_no_line_and_tears_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AppendFile(tmp_path / "x")
    file.write("one\n")
    real = os.write

    def half_then_full(descriptor: int, data: memoryview) -> int:
        if len(data) > 3:
            return real(descriptor, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(OSError, match="No space"):
        file.write("two\n")
    assert (tmp_path / "x").read_text() == "one\n"
    monkeypatch.undo()
    file.write("three\n")
    assert (tmp_path / "x").read_text() == "one\ntwo\nthree\n"
    file.close()
    file.close()


def test_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, stream = make_metrics(tmp_path, log_interval=1)
    real = AppendFile.write

    def full(self: AppendFile, text: str) -> None:
        if text.startswith(("{", "iteration", "1,", "2,")):
            self._waiting.append(text.encode())
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, text)

    monkeypatch.setattr(AppendFile, "write", full)
    metrics.step(record(1))
    metrics.step(record(2))
    monkeypatch.undo()
    assert stream.getvalue().count("metrics cannot be written") == 1
    metrics.step(record(3))
    metrics.close()
    assert [line["iteration"] for line in lines_of(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "is_ours"),
    [
        ('{"iteration": 3}', True),
        ('{"iteration": 0, "valid_loss": 1.5}', True),
        ('{"iteration": -1}', False),
        (f'{{"iteration": {10**400}}}', False),
        ('{"iteration": true}', False),
        ('{"iteration": "3"}', False),
        ("[3]", False),
    ],
)
def test_a_line_without_a_number_that_a_step_can_have_is_not_ours(text: str, is_ours: bool) -> None:
    assert (parse_line(text.encode() + b"\n") is not None) == is_ours
