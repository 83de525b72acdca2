"""The check of a pipeline over two GPUs notices a run that fails, hangs or learns otherwise."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from megatron.report import read_run
from tools.bench.gpu import pipeline as gpu_pipeline
from tools.bench.gpu.pipeline import CASES, QueueCase, main, problem


@pytest.mark.full
def test_two_ranks_get_through_with_the_losses_of_one(tmp_path: Path) -> None:
    alone, pipeline = CASES[:2]
    assert problem(alone, tmp_path / "alone", None, smoke=True) == ""
    first = read_run(tmp_path / "alone")
    assert problem(pipeline, tmp_path / "two", first, smoke=True) == ""
    other = QueueCase("another rate", 1, "--lr 0.5")
    assert "first differing step" in problem(other, tmp_path / "other", first, smoke=True)


@pytest.mark.push
def test_a_run_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = problem(QueueCase("wrong", 1, "--num-layers 0"), tmp_path / "run", None, smoke=True)
    assert found == "failed with exit codes [2]" and "--num-layers" in capsys.readouterr().err


@pytest.mark.push
def test_a_run_that_stands_still_is_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[subprocess.Popen[bytes]],
) -> None:
    monkeypatch.setattr(gpu_pipeline, "SECONDS", 0.2)
    assert "stands still" in problem(CASES[1], tmp_path / "run", None, smoke=True)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_a_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2 and "no CUDA device" in capsys.readouterr().err
