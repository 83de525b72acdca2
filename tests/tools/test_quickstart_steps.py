"""Tests of how long the quickstart trains: bounded, within three minutes, and then kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.metrics.helpers import make_metrics, record
from tools.quickstart_steps import (
    LEAST_STEPS,
    MOST_STEPS,
    ROUNDED_TO,
    SECONDS,
    affordable_steps,
    evaluation_interval,
    main,
    radius_interval,
)

REPO = Path(__file__).resolve().parents[2]


def make_run(folder: Path, seconds: list[float], **settings: int) -> Path:
    metrics, _ = make_metrics(folder)
    for i, taken in enumerate(seconds, start=1):
        metrics.step(record(i, step_seconds=taken))
    metrics.close()
    (folder / "config.yaml").write_text(yaml.safe_dump({"training": settings}))
    return folder


def chosen(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> list[int]:
    assert main(list(map(str, arguments))) == 0
    return [int(word) for word in capsys.readouterr().out.split()]


@given(st.floats(min_value=1e-5, max_value=100))
def test_two_runs_fit_where_that_is_enough_to_learn(pace: float) -> None:
    steps = affordable_steps(pace)
    assert LEAST_STEPS <= steps <= MOST_STEPS and steps % ROUNDED_TO == 0
    assert 2 * steps * pace <= SECONDS or steps == LEAST_STEPS
    assert 2 * (steps + ROUNDED_TO) * pace > SECONDS or steps == MOST_STEPS
    assert steps % evaluation_interval(steps) == 0, "the last step is evaluated"


@given(st.integers(min_value=1, max_value=10**9))
def test_intervals_fit_any_run(steps: int) -> None:
    assert 1 <= radius_interval(steps) <= steps
    assert 1 <= evaluation_interval(steps) <= steps


def test_the_most_are_those_of_the_configuration() -> None:
    config = yaml.safe_load((REPO / "configs" / "gpt_tiny.yaml").read_text(encoding="utf-8"))
    assert config["training"]["train_iters"] == MOST_STEPS


def test_the_number_is_measured_once_and_then_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(capsys, tmp_path / "new")[0] == 0, "it has to be measured"
    timed = make_run(tmp_path / "timed", [9.0, 9.0, 0.1, 0.1, 0.5, 0.1])
    assert chosen(capsys, tmp_path / "new", "--timed", timed) == [800, 100, 25, 160]
    make_run(tmp_path / "runs" / "dense", [0.1], train_iters=700)
    make_run(tmp_path / "runs" / "radius", [0.1], radius_interval=2)
    assert chosen(capsys, tmp_path / "runs") == [700, 100, 2, 0]
    assert chosen(capsys, tmp_path / "runs", "--timed", timed)[0] == 700
    assert chosen(capsys, tmp_path / "runs", "--steps", "2000") == [2000, 250, 2, 0]


def test_what_tells_no_pace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed = make_run(tmp_path / "timed", [1.0, 1.0])
    assert main([str(tmp_path), "--timed", str(timed)]) == 2
    assert main([str(tmp_path), "--timed", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 2
