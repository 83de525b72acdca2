"""Tests that data which turn out to be bad in the middle of a run end it with exit code 3."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.starting import start_ranks
from tests.training.test_prefetch import OFF, damage
from tests.training.test_resume import write_data

pytestmark = [pytest.mark.push, pytest.mark.waits]


def test_the_step_that_needs_a_bad_token_is_named(tmp_path: Path) -> None:
    """The thread that reads ahead finds the token a step earlier; the run ends as without it."""
    prefix = write_data(tmp_path / "text_document")
    damage(prefix)
    flags = f"--mock-data false --train-data-path {prefix} --vocab-size 96 --train-iters 12"
    started = [
        start_ranks(1, tmp_path / name, f"{flags} {more}")
        for name, more in (("on", ""), ("off", OFF))
    ]
    on, off = (run.finish() for run in started)
    assert on.codes == off.codes == [3], (on.all_stderr, off.all_stderr)
    keys = ("state", "exit_code", "rank", "iteration", "phase", "reason")
    assert [on.status[key] for key in keys] == [off.status[key] for key in keys]
    assert on.stderr == off.stderr
    assert on.status["phase"] == "data" and on.status["iteration"] > 1
    assert "token id 4321 in document" in on.all_stderr
