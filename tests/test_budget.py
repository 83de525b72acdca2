"""Tests of the budget of CPU time, and of the recorded run that it holds to its limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import budget
from tests.budget import FILE_LIMIT, LONGER, LONGER_TESTS, SPINNING, SUM_LIMIT, TEST_LIMIT, Run

BURN = "import time\nwhile time.process_time() < 0.5: pass"


def test_the_recorded_run_is_below_twice_its_limits() -> None:
    over = [text for share, text in Run.recorded().shares() if share > 2]
    assert not over


def test_files_with_limits_of_their_own_exist() -> None:
    for name in {*LONGER, *LONGER_TESTS, *SPINNING}:
        assert (budget.REPO / name).is_file()


def test_seconds_of_processes_that_run_and_that_ended_count() -> None:
    before = budget.tree_seconds()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    ended = budget.tree_seconds()
    assert ended - before >= 0.45
    live = subprocess.Popen([sys.executable, "-c", f"{BURN}\ninput()"], stdin=subprocess.PIPE)
    while budget.tree_seconds() - ended < 0.45:
        assert live.poll() is None
    live.communicate(b"\n")


def run_of(folder: Path, *options: str, **files: budget.Took) -> int:
    (folder / budget.CALIBRATION).write_text(json.dumps({"cpu": 4.0, "wall": 5.0}))
    (folder / "main.json").write_text(json.dumps({"collection": 20.0, "files": files}))
    return budget.main([str(folder), *options])


@pytest.mark.parametrize(
    ("times", "code", "told"), [(0.9, 0, ""), (1.1, 0, "warning"), (2.1, 1, "over twice the limit")]
)
@pytest.mark.parametrize("limit", [SUM_LIMIT, FILE_LIMIT, TEST_LIMIT])
def test_above_a_limit_is_a_warning_and_above_twice_the_limit_an_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    limit: float,
    times: float,
    code: int,
    told: str,
) -> None:
    seconds = 4.0 * limit * times
    files = {"tests/x.py": (seconds, seconds if limit == TEST_LIMIT else 0.0, "test_x")}
    if limit == SUM_LIMIT:
        files = {f"tests/{n}.py": (seconds / 100, 0.0, "test_x") for n in range(100)}
    assert run_of(tmp_path, **files) == code
    out = capsys.readouterr().out
    assert told in out and ("calibrations of CPU time" in out) == bool(told)


def test_a_folder_without_parts_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert budget.main([str(tmp_path)]) == budget.main([]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}: holds no calibration.json")


def test_a_run_of_everything_has_no_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_of(tmp_path, "--all", **{"tests/x.py": (1e6, 1e6, "test_x")}) == 0
    assert "calibrations of CPU time" not in capsys.readouterr().out


def test_a_record_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "DURATIONS", tmp_path / "durations.json")
    run = Run(4.0, {"tests/a.py": (3.0, 2.0, "test_a[x-1]"), "tests/b/c.py": (1.0, 1.0, "test")})
    run.record()
    again = Run.recorded()
    assert again.calibration == 4.0
    assert {name: tuple(took) for name, took in again.files.items()} == run.files
