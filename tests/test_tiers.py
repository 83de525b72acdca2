"""Every test has one kind, and the lists of `tests/tiers.py` name files and tests that exist."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import pytest

from tests import tiers
from tests.conftest import REPO
from tests.ranks import Ranks
from tests.tiers import BY_THE_PROGRAM, LONGEST, SAMPLE, WHOLE_RUNS, starts_processes


@pytest.mark.parametrize("listed", [BY_THE_PROGRAM, SAMPLE, WHOLE_RUNS, LONGEST])
def test_what_is_listed_exists(listed: set[str] | tuple[str, ...]) -> None:
    for entry in listed:
        file, _, name = entry.partition("::")
        text = (REPO / file).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in text if name else "\ndef test_" in text, entry


def test_the_kind_of_this_test_is_unit_and_fast(request: pytest.FixtureRequest) -> None:
    marks = {mark.name for mark in request.node.iter_markers()}
    assert marks & {"unit", "ranks", "process", "slurm", "docs"} == {"unit"}
    assert "fast" in marks and "quiet" not in marks


def starts() -> None:
    subprocess.run([sys.executable, "--version"], check=True)


class Starter:
    def start(self) -> None:
        multiprocessing.Process(target=print).start()


def calls_starts() -> None:
    for _ in (lambda: starts(), 1):
        pass


def makes_a_starter() -> Starter:
    return Starter()


def uses_ranks(ranks: Ranks) -> None:
    ranks.run(2, print)


# In a tuple, as names of functions would make this file's test one of the kind process.
STARTING = (starts, calls_starts, makes_a_starter)


def test_a_process_is_seen_through_helpers_and_classes_of_the_tests() -> None:
    assert all(starts_processes(function) for function in STARTING)
    assert not starts_processes(uses_ranks) and not starts_processes(tiers.mark)
