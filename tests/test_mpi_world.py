"""Ranks that mpiexec started meet where they are told, and end in order, some later than others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.limits import LIMIT
from tools.bench.common.netlab import find_mpiexec

pytestmark = pytest.mark.push

PROGRAM = """
import sys, time
from megatron.launch import leave_mpi, open_mpi

MPI = open_mpi()
rank, finalize = MPI.COMM_WORLD.rank, MPI.Finalize

def finalize_and_linger():
    finalize()
    time.sleep(0.5 * rank)
    print("leaves", rank)

MPI.Finalize = finalize_and_linger
leave_mpi(int(sys.argv[1]))
"""
MEETING = """
import sys
from pathlib import Path
from megatron.launch import detect_launch, leave_mpi, with_master

launch = with_master(detect_launch(), seconds=300)
# Lines of ranks that print at the same time may run into each other.
Path(sys.argv[1], str(launch.rank)).write_text(f"{launch.master_addr} {launch.master_port}")
leave_mpi(0)
"""


def mpi(program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program on three ranks."""
    pytest.importorskip("mpi4py", reason="the ranks talk over MPI")
    try:
        mpiexec = find_mpiexec()
    except ConfigError as error:
        pytest.skip(str(error))
    env = {name: text for name, text in os.environ.items() if not name.startswith("MASTER_")}
    command = [mpiexec, "-n", "3", sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=env | more, capture_output=True, text=True, timeout=LIMIT)


@pytest.mark.parametrize(
    ("given", "address", "port"),
    [
        ({}, "127.0.0.1", None),
        ({"MASTER_ADDR": "192.0.2.7"}, "192.0.2.7", None),
        ({"MASTER_PORT": "12345"}, "127.0.0.1", "12345"),
        ({"MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "12345"}, "192.0.2.7", "12345"),
    ],
)
def test_half_a_meeting_place_is_completed(
    given: dict[str, str], address: str, port: str | None, tmp_path: Path
) -> None:
    done = mpi(MEETING, str(tmp_path), **given)
    assert done.returncode == 0, done.stdout + done.stderr
    places = [told.read_text().split() for told in sorted(tmp_path.iterdir())]
    assert len(places) == 3 and all(place == places[0] for place in places)
    assert places[0][0] == address and port in (None, places[0][1])


@pytest.mark.parametrize("code", [0, 75])
def test_ranks_that_are_slow_to_leave_are_not_killed(code: int) -> None:
    done = mpi(PROGRAM, str(code))
    assert done.returncode == code, done.stdout + done.stderr
    if not code:  # mpiexec ends the others of a rank with another code
        assert sorted(done.stdout.split()) == sorted("leaves 0 leaves 1 leaves 2".split())
