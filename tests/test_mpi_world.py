"""Ranks that mpiexec started end in order, though some take longer to leave than others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.errors import ConfigError
from tools.bench.common.netlab import find_mpiexec

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


@pytest.mark.parametrize("code", [0, 75])
def test_ranks_that_are_slow_to_leave_are_not_killed(code: int) -> None:
    pytest.importorskip("mpi4py", reason="the ranks talk over MPI")
    try:
        mpiexec = find_mpiexec()
    except ConfigError as error:
        pytest.skip(str(error))
    command = [mpiexec, "-n", "3", sys.executable, "-c", PROGRAM, str(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    if not code:  # mpiexec ends the others of a rank with another code
        assert sorted(done.stdout.split()) == sorted("leaves 0 leaves 1 leaves 2".split())
