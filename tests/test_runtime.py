"""Ranks are found from torchrun, srun, mpiexec or nobody, and nonsense is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.errors import ConfigError
from megatron.runtime import Launch, detect_launch, job_environment

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0", "MASTER_PORT": "1234",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2", "MASTER_ADDR": "node0",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


def numbers(launch: Launch) -> tuple[str, int, int, int, int]:
    return (
        launch.launcher,
        launch.rank,
        launch.world_size,
        launch.local_rank,
        launch.local_world_size,
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("none", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 3, 8, 1, 2)),
        (SRUN, ("srun", 5, 7, 1, 3)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, ("srun", 5, 7, 1, 4)),
        (MPICH, ("mpiexec", 1, 4, 1, 4)),
        (OPENMPI, ("mpiexec", 2, 4, 0, 2)),
        ({**SRUN, **TORCHRUN}, ("torchrun", 3, 8, 1, 2)),
        # A batch script's own variables do not make it a task of a step.
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, ("none", 0, 1, 0, 1)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", **MPICH}, ("mpiexec", 1, 4, 1, 4)),
    ],
)
def test_launchers(environ: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    assert numbers(detect_launch(environ)) == expected


def test_srun_ranks_agree_on_a_meeting_place() -> None:
    launch = detect_launch(SRUN)
    assert (launch.master_addr, launch.master_port) == ("node0", 10079)
    alone = {k: v for k, v in SRUN.items() if k != "MASTER_ADDR"} | {"SLURM_STEP_NUM_NODES": "1"}
    assert detect_launch(alone).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "4"}, "RANK is not set"),
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': must be a non-negative integer"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "rank 4 with world size 4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 with world size 0"),
    ],
)
def test_nonsense_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_launch(environ)


def test_job_environment_is_an_allow_list() -> None:
    environ = {"SLURM_JOB_ID": "9", "WANDB_API_KEY": "canary", "OMP_NUM_THREADS": "2"}
    assert job_environment(environ) == {"SLURM_JOB_ID": "9", "OMP_NUM_THREADS": "2"}


def test_finding_the_rank_needs_no_torch() -> None:
    code = "import sys; from megatron.runtime import detect_launch; detect_launch(); "
    code += "print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "False", answer.stderr
