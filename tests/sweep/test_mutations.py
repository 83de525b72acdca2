"""Damaged files are refused with one line and the exit code of their class, or change nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.sweep.asking import SweepCase, Tally, Worker
from tests.sweep.mutations import TARGETS, mutations, remove_outputs
from tests.sweep.samples import Samples

SEED = 1
pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does"),
    pytest.mark.push,
]


def test_no_damaged_file_is_answered_wrongly(
    samples: Samples,
    worker: Worker,
    record_property: Callable[[str, object], None],
    request: pytest.FixtureRequest,
) -> None:
    """On push every second mutation."""
    tally, every = Tally(), 1 if request.config.getoption("--all") else 2
    for target in TARGETS:
        argv = target.argv(samples)
        good = SweepCase(kind="all good", command=target.command, argv=argv, codes=(0,))
        tally.ask(worker, good)
        remove_outputs(samples)
    for case in islice(mutations(samples, seed=SEED), None, None, every):
        tally.ask(worker, case)
    record_property("counts", tally.table("mutations of files"))
    tally.check(least=5 * len(TARGETS) // every)
