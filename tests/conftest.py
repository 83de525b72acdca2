"""Fixtures that every test may use."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.mpi_ranks import MPIJob
from tests.ranks import Ranks

REPO = Path(__file__).resolve().parent.parent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as `counts`, whichever process they ran in."""
    reports = (one for each in terminalreporter.stats.values() for one in each)
    for report in reports:
        if isinstance(report, pytest.TestReport) and report.when == "call":
            for name, value in report.user_properties:
                if name == "counts":
                    terminalreporter.write_line(str(value))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random tensors are the same whatever ran before; tests without torch stay without it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real text and vocabularies, if this machine has one."""
    folder = Path(os.environ.get("SPARSETRON_SHARED_DATA", REPO.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no shared data beside the repository")
    return folder


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(shared_ranks: Ranks) -> Ranks:
    """Rank processes shared by all tests of the session."""
    return shared_ranks


@pytest.fixture(autouse=True, scope="module")
def groups_of_a_file(shared_ranks: Ranks) -> Iterator[None]:
    """Process groups that its tests make end with a file."""
    yield
    shared_ranks.drop_groups()


@pytest.fixture(scope="session")
def mpiexec() -> str:
    """Path of the mpiexec of the MPI that mpi4py finds."""
    pytest.importorskip("mpi4py", reason="needs the extra mpi")
    # That of the environment, whose MPI is the one that mpi4py finds.
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("mpi4py is here, mpiexec is not")
    return found


@pytest.fixture(scope="module")
def mpi_ranks(mpiexec: str) -> Iterator[Ranks]:
    """As `ranks`, but of one mpiexec job for each world size: MPI's ranks are those of torch."""
    pool = Ranks(partial(MPIJob, mpiexec))
    yield pool
    pool.close()
