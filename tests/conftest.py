"""Fixtures for all tests."""

from __future__ import annotations

import multiprocessing.process
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import tiers
from tests.mpi_ranks import MPIJob
from tests.ranks import Ranks

REPO = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="Run the contract tests for every legal combination of path, wire, place of the "
        "optimizer states and number of ranks, not for a pairwise table of them.",
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    tiers.mark(items, config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as `counts`, whichever process ran the tests."""
    reports = (one for each in terminalreporter.stats.values() for one in each)
    for report in reports:
        if isinstance(report, pytest.TestReport) and report.when == "call":
            for name, value in report.user_properties:
                if name == "counts":
                    terminalreporter.write_line(str(value))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch before each test, unless nothing has imported torch."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def kind_is_right(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test that is marked `unit` but starts a Python process.

    On a GPU, Triton starts a compiler whose paths may hold "python".
    """
    marks = {mark.name for mark in request.node.iter_markers()}
    if "unit" not in marks or "gpu" in marks:
        yield
        return
    started = []
    popen, start = subprocess.Popen.__init__, multiprocessing.process.BaseProcess.start

    def noted(self: Any, args: Any, *rest: Any, **more: Any) -> None:
        words = [args] if isinstance(args, str | os.PathLike) else args
        started.extend(str(word) for word in words if "python" in Path(word).name)
        popen(self, args, *rest, **more)

    def noted_start(self: Any) -> None:
        started.append(str(self))
        start(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", noted_start)
    yield
    assert not started, f"starts {started[0]}: name the test in BY_THE_PROGRAM of tests/tiers.py"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real text and vocabularies, if this machine has one."""
    folder = Path(os.environ.get("SPARSETRON_SHARED_DATA", REPO.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no shared data beside the repository")
    return folder


@pytest.fixture(scope="session")
def pools() -> Iterator[list[Ranks]]:
    """Collect the rank processes that the tests of the session share."""
    found: list[Ranks] = []
    yield found
    for pool in found:
        pool.close()


@pytest.fixture(scope="session")
def ranks(pools: list[Ranks]) -> Ranks:
    """Return the rank processes that all tests of the session share."""
    pools.append(Ranks())
    return pools[-1]


@pytest.fixture(autouse=True, scope="module")
def groups_of_a_file(pools: list[Ranks]) -> Iterator[None]:
    """Drop the process groups that the tests of a file made when the file ends."""
    yield
    for pool in pools:
        pool.drop_groups()


@pytest.fixture(scope="session")
def mpiexec() -> str:
    """Return the path of the mpiexec of the MPI library that mpi4py finds."""
    pytest.importorskip("mpi4py", reason="needs the extra mpi")
    # The environment's mpiexec belongs to the MPI library that mpi4py finds.
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("mpi4py is here, mpiexec is not")
    return found


@pytest.fixture(scope="session")
def mpi_ranks(mpiexec: str, pools: list[Ranks]) -> Ranks:
    """Return rank processes of one mpiexec job per world size; MPI ranks equal torch ranks."""
    pools.append(Ranks(partial(MPIJob, mpiexec)))
    return pools[-1]
