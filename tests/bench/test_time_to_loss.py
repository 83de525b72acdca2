"""The page that puts losses of the convergence study against measured time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench.gradient_path.rows import GradientPathRow
from tools.bench.time_to_loss import run as time_to_loss
from tools.bench.time_to_loss.run import GROUPS, RESULTS, courses, runs_of, seconds_until

PLAN = {"steps": 1000, "tokens": 1024, "sequence": 128, "valid_tokens": 131072, "dtype": "bf16"}


def run(group: str, *, loss: float = 5.0, interval: int | None = None) -> dict[str, Any]:
    """A row of the study whose loss falls by 1 in 1000 steps to `loss`."""
    return {
        "name": f"{group}-seed1",
        "group": group,
        "seed": 1,
        "start": None if group == "dense" else 0.2,
        "interval": interval,
        "plan": PLAN,
        "valid_loss": loss + 0.1,
        "curve": [[step, loss + 1 - step / 1000] for step in range(10, 1001, 10)],
    }


def study() -> list[dict[str, Any]]:
    """Return all runs of the page; runs of sparse paths end 0.2 higher."""
    return [
        run(
            group,
            loss=5.0 if group == "dense" else 5.2,
            interval=25 if group.startswith(("radius", "rolling")) else None,
        )
        for group in GROUPS.values()
    ]


def step(method: str, median: float, resample: float | None = None) -> GradientPathRow:
    return GradientPathRow(
        method=method,
        median=median,
        least=median,
        predicted=median,
        blocked=0.0,
        bytes_sent=1.0,
        counted=None,
        resample=resample,
    )


def test_steps_are_dense_up_to_the_fork_and_every_interval_s_is_a_resample() -> None:
    sparse = run("radius_0.4", interval=25)
    row = step("radius-0.4", 1.0, resample=3.0)
    until = {i: seconds_until(i, sparse, row, 2.0) for i in (100, 200, 210, 225, 250)}
    assert until == {100: 200, 200: 400, 210: 410, 225: 424 + 3, 250: 448 + 6}
    assert seconds_until(250, run("topk_0.1"), step("topk-0.1", 1.0), 2.0) == 450
    assert seconds_until(250, run("dense"), step("dense", 2.0), 2.0) == 500


def test_a_run_is_compared_with_dense_at_the_time_when_it_is_over() -> None:
    rows = {name: step(name, 2.0 if name == "dense" else 0.75) for name in GROUPS}
    found = {course.method: course for course in courses(runs_of(study()), rows)}
    assert list(found) == list(GROUPS)
    dense, sparse = found["dense"], found["radius-0.4"]
    # 200 steps of 2 s and 800 of 0.75 s are as long as 500 dense steps.
    assert (dense.seconds, sparse.seconds) == (2000, 1000)
    assert sparse.loss == pytest.approx(5.2, abs=0.02) and sparse.step == 0.75
    assert sparse.dense_then == pytest.approx(5.51) and dense.dense_then == dense.loss


def test_a_run_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [row for row in study() if row["group"] != "topk_0.1"]
    with pytest.raises(time_to_loss.ConfigError, match="topk_0.1"):
        runs_of(missing)
    assert time_to_loss.main(["--rates", "none", "--rounds", "1"]) == 2
    assert "--rounds 1: must be at least 2" in capsys.readouterr().err


def test_the_study_that_is_here_has_all_of_them() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    assert set(runs_of(rows)) == set(GROUPS)


@pytest.mark.slow
def test_the_tool_measures_and_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "rows.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in study()), encoding="utf-8")
    flags = ["--smoke", "--rates", "none", "--rounds", "2", "--results", str(results)]
    assert time_to_loss.main([*flags, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page in capfd.readouterr().out
    assert "## 4 ranks, no limit" in page and all(f"| {name} |" in page for name in GROUPS)
    (found,) = json.loads((tmp_path / "results.json").read_text()).values()
    assert [len(row["points"]) for row in found] == [100] * len(GROUPS)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
