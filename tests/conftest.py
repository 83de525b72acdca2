"""Fixtures for all tests."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.budget import DURATIONS, Meter
from tests.mpi_ranks import MPIJob
from tests.ranks import Ranks
from tests.tiers import turns

REPO = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="Run the contract tests for every legal combination of path, wire, place of the "
        "optimizer states and number of ranks, not for a pairwise table of them.",
    )
    parser.addoption(
        "--cpu-seconds",
        type=Path,
        metavar="FILE",
        help="Write the CPU seconds of each file of tests to FILE (tests/budget.py).",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("--cpu-seconds")) is not None:
        config.pluginmanager.register(Meter(file))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave most cases of a law to `--push`; workers of xdist take the longest files first.

    A worker that begins a long file last would keep all others waiting.
    """
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        is_variant = getattr(params.get("case"), "is_variant", False)
        if params.get("world", 2) != 2 or is_variant:
            item.add_marker("push")
    for item in out_of_turn(items):
        item.add_marker("full")
    if hasattr(config, "workerinput") and DURATIONS.exists():
        files = json.loads(DURATIONS.read_text())["files"]
        items.sort(key=lambda item: -files.get(file_of(item), [0.0])[0])


def out_of_turn(items: Iterable[pytest.Item]) -> Iterator[pytest.Function]:
    """Yield the cases of tests with the mark `turns` that only `--all` runs."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("turns"):
            tests.setdefault(f"{file_of(item)}::{item.originalname}", []).append(item)
    for cases in tests.values():
        in_turn = turns([values_of(case) for case in cases])
        yield from (case for case, is_in_turn in zip(cases, in_turn, strict=True) if not is_in_turn)


def values_of(case: pytest.Function) -> list[object]:
    """Return the identity of the value of each parameter, as values need not be hashable.

    Names that one mark gives together are one parameter.
    """
    params = dict(case.callspec.params)
    together = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [each.split(",") if isinstance(each, str) else each for each in together]
    found = [tuple(id(params.pop(name.strip())) for name in group) for group in names]
    return [*found, *map(id, params.values())]


def file_of(item: pytest.Item) -> str:
    """Return the path of a test's file below the repository."""
    return item.nodeid.partition("::")[0]


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


@pytest.fixture(autouse=True)
def groups_of_tests(pools: list[Ranks]) -> Iterator[None]:
    """Drop the process groups that the tests of a file made as soon as they are many."""
    yield
    for pool in pools:
        pool.drop_many_groups()


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
