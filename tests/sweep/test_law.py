"""The law that the sweep holds answers to finds what it is there for, and its worker survives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.sweep.asking import Answer, SweepCase, Worker, wrong

CASE = SweepCase(kind="x", command="status", argv=("x",), codes=(2,), names="--lr")


def found(err: str, code: int | None = 2, out: str = "") -> str:
    return wrong(CASE, Answer(code=code, out=out, err=err, why="hung"))


def test_one_line_is_right() -> None:
    assert found("--lr: nan is not finite\n") == ""
    assert found("usage: x [-h]\n         [--lr X]\nx: error: --lr: no number\n") == ""


@pytest.mark.parametrize(
    ("err", "code", "what"),
    [
        ("Traceback (most recent call last):\n  ...\nKeyError: 'a'\n", 1, "traceback"),
        ("thread '<unnamed>' panicked at src/lib.rs\n", 2, "traceback"),
        ("--lr: nan\n", 1, "exit code 1"),
        ("--lr: nan\n", 0, "accepted"),
        ("", 2, "0 lines"),
        ("--lr: nan\nand more\n", 2, "2 lines"),
        ("--lr: \x1b[31m\n", 2, "not a line to print"),
        ("--lr" * 5000, 2, "not a line to print"),
        ("--tr: nan\n", 2, "does not name --lr"),
        ("", None, "hung"),
    ],
)
def test_everything_else_is_wrong(err: str, code: int | None, what: str) -> None:
    assert what in found(err, code)


@pytest.mark.push
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    try:
        case = SweepCase(kind="x", command="status", argv=(str(tmp_path),), codes=(2,))
        assert wrong(case, worker.ask(case)) == ""
        assert worker._process is not None
        worker._process.kill()
        assert "ended with -9" in worker.ask(case).why
        assert wrong(case, worker.ask(case)) == ""
    finally:
        worker.close()
