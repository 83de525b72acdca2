"""Damaged files are refused with one line and the exit code of their class, or change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep.asking import Case, Tally, Worker
from tests.sweep.mutations import TARGETS, mutations, remove_outputs
from tests.sweep.samples import Samples

SEED = 1
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does"),
]


def test_no_mutation_of_a_file_is_answered_wrongly(
    samples: Samples, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Tally()
    for target in TARGETS:
        good = Case(kind="all good", command=target.command, argv=target.argv(samples), codes=(0,))
        tally.ask(worker, good)
        remove_outputs(samples)
    for case in mutations(samples, seed=SEED):
        tally.ask(worker, case)
    with capsys.disabled():
        print(f"\n{tally.table('mutations')}")
    assert tally.total >= 1000
    problems = tally.problems
    assert not problems, "\n".join([f"{len(problems)} wrong answers:", *problems])
