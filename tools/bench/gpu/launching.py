"""Start of the ranks of a run on the GPUs of this machine, or of all ranks on one GPU.

NCCL refuses two ranks of a host on the same GPU. Where there are fewer GPUs than ranks, each rank
claims to be a host of its own (NCCL_HOSTID), so that NCCL connects the ranks by sockets as it
connects nodes. A GPU runs the processes that share it in turns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event

import torch

from megatron.launch import free_port

REPO = Path(__file__).resolve().parents[3]
_SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


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
    gpus = [] if on_cpu else _visible()
    port, shared = free_port(), gpus if len(gpus) < ranks else []
    program = [sys.executable, str(REPO / "pretrain_gpt.py"), *flags.split()]
    program += ["--device", "cpu"] * on_cpu
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= dict(environment or {}) | (_SOCKETS if shared else {})
    if by_mpi:
        common |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        as_a_host = ["sh", "-c", _as_a_host(shared), "sh"] if shared else []
        program = ["mpiexec", "-n", str(ranks), *as_a_host, *program]
    with log.open("w", encoding="utf-8") as file:
        return [
            subprocess.Popen(
                program,
                env=common if by_mpi else common | _variables(rank, ranks, shared),
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


def _visible() -> list[str]:
    """Return the GPUs that the user lets this process see, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def _as_a_host(shared: Sequence[str]) -> str:
    """Return a shell's line that starts a rank of mpiexec (Open MPI or MPICH) on a shared GPU."""
    gpu = f"$(echo {','.join(shared)} | cut -d, -f$((rank % {len(shared)} + 1)))"
    rank = "rank=$OMPI_COMM_WORLD_RANK$PMI_RANK"
    return f'{rank}; NCCL_HOSTID="host$rank" CUDA_VISIBLE_DEVICES={gpu} exec "$@"'


def _variables(rank: int, ranks: int, shared: Sequence[str]) -> dict[str, str]:
    """Return torchrun's variables of a rank; `shared` are the GPUs that ranks share, if any."""
    variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    if shared:
        return variables | {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NCCL_HOSTID": f"host{rank}",
            "CUDA_VISIBLE_DEVICES": shared[rank % len(shared)],
        }
    return variables | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
