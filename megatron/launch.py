"""The rank and the world size of this process, from the variables that its launcher sets.

torchrun, srun and mpiexec set different variables; a process that none of them started is the only
rank. Nothing here loads torch, so that a bad configuration is refused before torch is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.values import show
from megatron.errors import ConfigError

_MPI_VARIABLES = (
    # rank, size, local rank, local size
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip
LARGEST_PORT = 2**16 - 1
_MOST_DIGITS = 18
_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
START_RIGHT = (
    "start with the mpiexec of the MPI that mpi4py uses (LAUNCHER=mpiexec), or srun --mpi=pmi2 "
    "(where MPI was built for it: --mpi=pmix)"
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launcher told this process. `launcher` is torchrun, srun, mpiexec or none."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str | None = None
    master_port: int | None = None


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's variables; `ConfigError` names the variable that is missing or off."""
    env = os.environ if environ is None else environ
    _check_threads(env.get("OMP_NUM_THREADS", ""))
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    _check_agreement(env)
    if _is_slurm_task(env):
        return _from_slurm(env)
    for names in _MPI_VARIABLES:
        if names[0] in env:
            return _from_mpi(env, names)
    return Launch(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)


def _check_threads(text: str) -> None:
    """Refuse what OpenMP's libraries would wait for without end, or ignore."""
    if text and not re.fullmatch(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", text):
        raise ConfigError(
            f"OMP_NUM_THREADS={text!r}: must be a whole number, 1 or more; or unset it"
        )


def _check_agreement(env: Mapping[str, str]) -> None:
    """Refuse a process that one launcher calls another rank than the next does."""
    slurm = [_SLURM_VARIABLES] if _is_slurm_task(env) else []
    present = [names for names in (*slurm, *(n[:2] for n in _MPI_VARIABLES)) if names[0] in env]
    for names in present[1:]:
        for mine, other in zip(names, present[0], strict=True):
            if _integer(env, mine) != _integer(env, other):
                raise ConfigError(
                    f"{other}={env[other]} and {mine}={env[mine]}: launchers disagree; "
                    f"{START_RIGHT}"
                )


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    if not all(name in env for name in _SLURM_VARIABLES):
        return False
    # mpiexec inside an allocation has srun start its own proxies, one on each node, whose variables
    # reach the ranks: what the proxies say is then the truth.
    tasks, nodes = (
        _integer(env, "SLURM_STEP_NUM_TASKS"),
        _integer(env, "SLURM_STEP_NUM_NODES", default=1),
    )
    if tasks > nodes:
        return True
    return "OMPI_COMM_WORLD_SIZE" not in env and all(
        env.get(mpi, env[slurm]) == env[slurm]
        for mpi, slurm in zip(("PMI_RANK", "PMI_SIZE"), _SLURM_VARIABLES, strict=True)
    )


def _from_torchrun(env: Mapping[str, str]) -> Launch:
    world_size = _integer(env, "WORLD_SIZE")
    rank = _integer(env, "RANK")
    return _checked(
        Launch(
            launcher="torchrun",
            rank=rank,
            world_size=world_size,
            local_rank=_integer(env, "LOCAL_RANK", default=rank),
            local_world_size=_integer(env, "LOCAL_WORLD_SIZE", default=world_size),
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_integer(env, "MASTER_PORT", default=29500),
        )
    )


def _from_slurm(env: Mapping[str, str]) -> Launch:
    job = _integer(env, "SLURM_JOB_ID", default=0) + _integer(env, "SLURM_STEP_ID", default=0)
    return _checked(
        Launch(
            launcher="srun",
            rank=_integer(env, "SLURM_PROCID"),
            world_size=_integer(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_integer(env, "SLURM_LOCALID"),
            local_world_size=_tasks_on_node(env),
            master_addr=env.get("MASTER_ADDR") or _first_host(env),
            # Below the ephemeral range, and different for jobs that share a node.
            master_port=_integer(env, "MASTER_PORT", default=10000 + job % 20000),
        )
    )


def _from_mpi(env: Mapping[str, str], names: tuple[str, str, str, str]) -> Launch:
    rank, size, local_rank, local_size = names
    world_size = _integer(env, size)
    return _checked(
        Launch(
            launcher="mpiexec",
            rank=_integer(env, rank),
            world_size=world_size,
            local_rank=_integer(env, local_rank, default=_integer(env, rank)),
            local_world_size=_integer(env, local_size, default=world_size),
            master_addr=env.get("MASTER_ADDR"),
            master_port=_integer(env, "MASTER_PORT", default=0) or None,
        )
    )


def _integer(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name} is not set though other ranks' variables are; set it")
        return default
    # str.isdigit alone takes digits of every script, and int refuses some of them.
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise ConfigError(
            f"{name}={show(text)}: must be a non-negative integer of at most {_MOST_DIGITS} digits"
        )
    return int(text)


def _checked(launch: Launch) -> Launch:
    if launch.world_size < 1 or launch.rank >= launch.world_size:
        raise ConfigError(
            f"rank {launch.rank} with world size {launch.world_size} (from {launch.launcher}): "
            "ranks go from 0 to world size - 1"
        )
    if launch.master_port is not None and not 1 <= launch.master_port <= LARGEST_PORT:
        raise ConfigError(
            f"MASTER_PORT={launch.master_port}: must be from 1 to {LARGEST_PORT}; choose another"
        )
    return launch


def _tasks_on_node(env: Mapping[str, str]) -> int:
    """Tasks of this step on this node, from Slurm's run-length form such as `2(x3),1`."""
    node = _integer(env, "SLURM_NODEID", default=0)
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = part.partition("(x")
        if count.isdigit():
            counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[node] if node < len(counts) else 1


def _first_host(env: Mapping[str, str]) -> str:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    if env.get("SLURM_STEP_NUM_NODES", "1") == "1":
        return "127.0.0.1"
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"MASTER_ADDR: not set, and node list {nodes!r} cannot be expanded ({error}); set it"
        ) from None
    return answer.stdout.split()[0]
