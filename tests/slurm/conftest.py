"""A Slurm for the tests beside this file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.slurm.harness import Cluster

DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slurm's daemons on this machine, four nodes; ended with the session."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in DAEMONS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("only root can start Slurm's daemons")
    slurm = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
