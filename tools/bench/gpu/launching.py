"""Start of the ranks of a run on the GPUs of this machine, or of all ranks on one GPU.

NCCL refuses two ranks of a host on the same GPU. Where there are fewer GPUs than ranks, each rank
claims to be a host of its own (NCCL_HOSTID), so that NCCL connects the ranks by sockets as it
connects nodes. A GPU runs the processes that share it in turns.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event

import torch

REPO = Path(__file__).resolve().parents[3]
_SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}
_AS_A_HOST = (
    'rank=$OMPI_COMM_WORLD_RANK$PMI_RANK; NCCL_HOSTID="host$rank" '
    'CUDA_VISIBLE_DEVICES=$((rank % $0)) exec "$@"'
)
"""Starts a rank of mpiexec (Open MPI or MPICH) as a host of its own; $0 is the number of GPUs."""


def start(
    flags: str,
    ranks: int,
    log: Path,
    *,
    on_cpu: bool,
    by_mpi: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start `pretrain_gpt.py` with these flags on every rank, or mpiexec with all of them.

    Both streams go to `log`. Raises OSError if a program is not there.
    """
    gpus = 0 if on_cpu else torch.cuda.device_count()
    port, shared = _free_port(), 0 < gpus < ranks
    program = [sys.executable, str(REPO / "pretrain_gpt.py"), *flags.split()]
    program += ["--device", "cpu"] * on_cpu
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= dict(environment or {}) | (_SOCKETS if shared else {})
    if by_mpi:
        common |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        as_a_host = ["sh", "-c", _AS_A_HOST, str(gpus)] * shared
        program = ["mpiexec", "-n", str(ranks), *as_a_host, *program]
    with log.open("w", encoding="utf-8") as file:
        return [
            subprocess.Popen(
                program,
                env=common if by_mpi else common | _variables(rank, ranks, gpus if shared else 0),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group, so that ranks of mpiexec can be killed, too
            )
            for rank in range(1 if by_mpi else ranks)
        ]


def wait(
    ranks: Sequence[subprocess.Popen[bytes]],
    metrics: Path,
    limit: float,
    stopping: Event | None = None,
) -> list[int] | None:
    """Return the processes' exit codes, or None if `metrics` did not grow for `limit` seconds.

    Also returns None once `stopping` is set.
    """
    size, end = 0, time.monotonic() + limit
    while any(process.poll() is None for process in ranks):
        if stopping is not None and stopping.is_set():
            return None
        grown = metrics.stat().st_size if metrics.exists() else 0
        if grown > size:
            size, end = grown, time.monotonic() + limit
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
    return [process.returncode for process in ranks]


def kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes that still run, with all that they started."""
    for process in ranks:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _variables(rank: int, ranks: int, shared: int) -> dict[str, str]:
    """Return torchrun's variables of a rank; ranks share so many GPUs, or none."""
    variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    if shared:
        return variables | {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NCCL_HOSTID": f"host{rank}",
            "CUDA_VISIBLE_DEVICES": str(rank % shared),
        }
    return variables | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
