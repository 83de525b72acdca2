"""Rank processes with the played device for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.mpi_ranks import MPIJob
from tests.ranks import Ranks, Spawned
from tests.rehearsal.process import Rehearsal
from tests.rehearsal.ranks import life


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    process = Rehearsal(tmp_path_factory.mktemp("rehearsal") / "log")
    yield process
    process.close()


@pytest.fixture(scope="module")
def device_ranks() -> Iterator[Ranks]:
    """Start ranks with a device each, whose NCCL is played by gloo."""
    pool = Ranks(partial(Spawned, life=life))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def mpi_device_ranks(mpiexec: str) -> Iterator[Ranks]:
    """Start ranks like `device_ranks`, from a job of mpiexec."""
    pool = Ranks(partial(MPIJob, mpiexec, module="tests.rehearsal.ranks"))
    yield pool
    pool.close()
