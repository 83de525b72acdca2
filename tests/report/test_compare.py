"""Comparison of runs, and tools/report.py around it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.report import compare, read_run
from megatron.report.facts import differing_settings
from tests.limits import LIMIT
from tests.program import WITHOUT_PICTURES
from tools.report import main

from .test_report import make_run

pytestmark = pytest.mark.push

LOSSES = [4.0, 3.0, math.nan, 2.0]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first", LOSSES)


def _other(tmp_path: Path, losses: list[float]) -> Path:
    return make_run(tmp_path / "other", losses)


def test_equal_runs_are_equal(first: Path, tmp_path: Path) -> None:
    found = compare(read_run(first), read_run(_other(tmp_path, LOSSES)))
    assert found.equal and found.max_difference == 0 and found.max_at is None
    assert found.describe() == "4 common steps, no loss differs"


def test_first_difference_and_the_largest(first: Path, tmp_path: Path) -> None:
    other = _other(tmp_path, [4.0, math.nextafter(3.0, 4.0), math.nan, 2.5])
    found = compare(read_run(first), read_run(other))
    assert not found.equal
    assert (found.first_difference, found.max_difference, found.max_at) == (2, 0.5, 4)
    assert "first differing step 2, max difference 0.5 at step 4" in found.describe()
    assert compare(read_run(first), read_run(other), tolerance=0.1).first_difference == 4
    assert compare(read_run(first), read_run(other), tolerance=0.5).equal


@pytest.mark.parametrize(
    ("losses", "equal"),
    [([4.0, 3.0, 1.0, 2.0], False), ([4.0, 3.0], False), ([], False), (LOSSES, True)],
)
def test_nan_against_a_number_and_missing_steps_differ(
    first: Path, tmp_path: Path, losses: list[float], equal: bool
) -> None:
    assert compare(read_run(first), read_run(_other(tmp_path, losses))).equal is equal


def test_runs_of_other_ranks_are_not_shown_as_equal(first: Path, tmp_path: Path) -> None:
    other = _other(tmp_path, LOSSES)
    for run, ranks in (first, 1), (other, 2):
        (run / "config.yaml").write_text("training:\n  seed: 7\n")
        facts = {"ranks": ranks, "nodes": 1, "threads": 1, "backend": "gloo", "network": "lo"}
        (run / "environment.json").write_text(json.dumps(facts))
    assert differing_settings([read_run(first), read_run(other)]) == [("ranks", "1", "2")]


def test_tool_writes_and_judges(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _other(tmp_path, [4.0, 3.5, math.nan, 2.0])
    assert main([str(first), str(first), "--assert-equal"]) == 0
    assert main([str(first), str(other)]) == 0
    assert "first differing step 2, max difference 0.5" in capsys.readouterr().out
    output = tmp_path / "new" / "folder"
    assert main([str(first), str(other), "--assert-equal", "--output", str(output)]) == 1
    page = (output / "comparison.html").read_text()
    assert "first differing step 2" in page and page.count("<svg") == 4
    assert (first / "report.html").is_file() and (other / "report.html").is_file()


def test_settings_that_differ_come_first(first: Path, tmp_path: Path) -> None:
    other = _other(tmp_path, LOSSES)
    (first / "config.yaml").write_text("optimizer:\n  lr: 0.1\n  adam_eps: 1.0e-08\n")
    (other / "config.yaml").write_text(
        "optimizer:\n  lr: 0.2\n  adam_eps: 1.0e-08\nradius:\n  radius_interval: 50\n"
    )
    assert main([str(first), str(other)]) == 0
    page = (first / "comparison.html").read_text()
    table = page[page.index("Settings that differ") : page.index("<h2>Runs</h2>")]
    assert '<td>lr</td><td class="number">0.1</td><td class="number">0.2</td>' in table
    assert '<td>radius interval</td><td class="number">-</td><td class="number">50</td>' in table
    assert "adam" not in table and page.index("<svg") > page.index("<h2>Runs</h2>")
    assert main([str(first), str(first)]) == 0
    assert "No setting differs." in (first / "comparison.html").read_text()


def test_tool_refuses_in_one_line(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    assert main([str(first), "--assert-equal"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "holds no metrics.jsonl" in lines[0] and "two" in lines[1]


def test_tool_runs_from_anywhere_without_torch(first: Path, tmp_path: Path) -> None:
    tool = Path(__file__).resolve().parents[2] / "tools" / "report.py"
    program = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tool), str(first)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(WITHOUT_PICTURES)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(first / "report.html")


def test_tool_tells_lines_it_cannot_read(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = first / "metrics.jsonl"
    with open(lines, "a", encoding="utf-8") as file:
        file.write("garbage\n{}\n")
    assert main([str(first)]) == 0
    assert capsys.readouterr().err == f"report.py: {lines}: 2 unreadable lines are left out\n"
    lines.write_text("garbage\nmore\n")
    assert main([str(first)]) == 2
    assert "none of its 2 lines can be read" in capsys.readouterr().err


def test_tool_writes_elsewhere(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(first.iterdir())
    elsewhere = tmp_path / "new" / "folder"
    assert main([str(first), "--output", str(elsewhere)]) == 0
    assert main([str(first), str(first), "--output", str(elsewhere)]) == 0
    assert sorted(first.iterdir()) == before
    assert {"report.html", "comparison.html"} <= {path.name for path in elsewhere.iterdir()}
    (first / "report.html").mkdir()
    capsys.readouterr()
    assert main([str(first)]) == 2
    error = capsys.readouterr().err
    assert "cannot be written (" in error and "--output" in error and error.count("\n") == 1
