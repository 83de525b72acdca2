"""Start of a process: launcher, device, backend, process group and MPI.

`detect_launch` reads the variables of torchrun, srun or mpiexec. `start` chooses the device and
joins the ranks. This module imports no torch when it is loaded, so that a wrong flag is refused
quickly.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import faulthandler
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from megatron.config.fields import show
from megatron.errors import ConfigError, PeerError, missing_extra
from megatron.status import replace_text

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store

    from megatron.config import Config


_MPI_VARIABLES = (
    # rank, size, local rank, local size
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip
LARGEST_PORT = 2**16 - 1
LOOPBACK = ("127.0.0.1", "localhost")
_MOST_DIGITS = 18
_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
START_RIGHT = (
    "start with the mpiexec of the MPI that mpi4py uses (LAUNCHER=mpiexec), or srun --mpi=pmi2 "
    "(where MPI was built for it: --mpi=pmix)"
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The rank and the world size that the launcher gave this process.

    `launcher` is torchrun, srun, mpiexec or none. `began` is the time on the monotonic clock
    at which the process detected its launch.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str | None = None
    master_port: int | None = None
    began: float = field(default_factory=time.monotonic, compare=False)


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Return the launch by the launcher's variables; one rank without a launcher.

    Raises `ConfigError` naming a variable that is missing, malformed or contradicts another, or an
    OMP_NUM_THREADS that OpenMP libraries do not accept.
    """
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
    """Raise `ConfigError` for values that make OpenMP libraries hang, or that they ignore."""
    if text and not re.fullmatch(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", text):
        raise ConfigError(
            f"OMP_NUM_THREADS={text!r}: must be a whole number, 1 or more; or unset it"
        )


def _check_agreement(env: Mapping[str, str]) -> None:
    """Raise `ConfigError` if two launchers give this process different ranks."""
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
    # Inside an allocation mpiexec starts one proxy per node by srun, and the ranks inherit the
    # proxies' Slurm variables; in that case the variables of mpiexec are right.
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
    job, step = (_integer(env, name, default=0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _checked(
        Launch(
            launcher="srun",
            rank=_integer(env, "SLURM_PROCID"),
            world_size=_integer(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_integer(env, "SLURM_LOCALID"),
            local_world_size=_tasks_on_node(env),
            master_addr=env.get("MASTER_ADDR") or _first_host(env),
            # Different for steps and jobs of successive numbers, which may share a node.
            master_port=_integer(env, "MASTER_PORT", default=PORTS[(64 * job + step) % len(PORTS)]),
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
    # str.isdigit accepts digits of every script, and int refuses some of them.
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
    is_local = launch.local_rank < launch.local_world_size <= launch.world_size
    if launch.launcher == "torchrun" and not is_local:
        raise ConfigError(
            f"local rank {launch.local_rank} of {launch.local_world_size} on this node, of "
            f"{launch.world_size} in all (from {launch.launcher}): local ranks go from 0 to the "
            "ranks of the node - 1"
        )
    if launch.master_port is not None and not 1 <= launch.master_port <= LARGEST_PORT:
        raise ConfigError(
            f"MASTER_PORT={launch.master_port}: must be from 1 to {LARGEST_PORT}; choose another"
        )
    return launch


def _tasks_on_node(env: Mapping[str, str]) -> int:
    """Return the tasks of this step on this node, from Slurm's form such as `2(x3),1`."""
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


FIRST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3
"""Shortest and longest pause between two polls, in seconds."""
LATE = 1 / 16
"""Pause between two polls, as a share of the time waited so far, within these bounds."""
_ADDRESS_BYTES = 300
PORTS = range(10000, 30000)
"""Where a port is chosen from. The kernel takes the ports of outgoing connections, and those of
programs that ask for any port, from higher numbers, so that it does not take a port of these
between its choice and its use."""
_START_SECONDS, _LEAVE_SECONDS = 300.0, 60.0


def poll(done: Callable[[], bool], *, seconds: float) -> bool:
    """Poll `done` until it returns True; return False after `seconds`.

    Pauses grow, so that ranks that share a core do not take it from each other.
    """
    began = time.monotonic()
    while not done():
        waited = time.monotonic() - began
        if waited >= seconds:
            return done()
        time.sleep(min(max(FIRST_PAUSE, LATE * waited), LONGEST_PAUSE))
    return True


def require_mpi(launch: Launch, *, seconds: float = _START_SECONDS) -> None:
    """Start MPI within `seconds`; raise `ConfigError` unless the launcher gave MPI all ranks.

    All ranks reach the same result. Imports no torch.
    """
    if launch.launcher in ("none", "torchrun"):
        how = "torchrun" if launch.launcher == "torchrun" else "no launcher"
        raise ConfigError(
            f"--pipeline-schedule message-driven: started by {how}, but its messages travel over "
            f"MPI; start with mpiexec -n {max(2, launch.world_size)} (LAUNCHER=mpiexec) or "
            "srun --mpi=pmi2"
        )
    world = open_mpi(seconds=seconds).COMM_WORLD
    if world.Get_size() != launch.world_size:
        check_world(launch, rank=world.Get_rank(), size=world.Get_size())


@contextmanager
def _ends_within(seconds: float) -> Iterator[None]:
    """End this process with exit code 1 and its stack on stderr if the body takes too long.

    The timer runs in C: while MPI waits for a lost rank it holds the interpreter's lock, so a
    Python thread could not end the process. Only one such timer may run at a time.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def open_mpi(*, instead_of: str = "", seconds: float = _START_SECONDS) -> ModuleType:
    """Return mpi4py's module. Its first import starts MPI.

    The process ends with exit code 1 if the start takes longer than `seconds`, at most 300.
    `instead_of` names alternatives for the error message. Raises `ConfigError` if mpi4py or an MPI
    library is not installed, or if MPI lets only one thread call it.
    """
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None:
        with _ends_within(min(seconds, _START_SECONDS)):
            MPI = _import_mpi(instead_of)
    check_threads(MPI.Query_thread(), MPI.THREAD_SERIALIZED, MPI.Get_library_version())
    return MPI


def _import_mpi(instead_of: str) -> ModuleType:
    try:
        import mpi4py

        # One thread moves messages while the main thread computes; a lock serialises their MPI
        # calls.
        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise missing_extra(f"mpi4py{instead_of}", "mpi") from None
    except (ImportError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"mpi4py: finds no MPI library ({said}); load your system's, or run: "
            "pip install 'sparsetron[mpi]'"
        ) from None
    return MPI


def check_threads(granted: int, needed: int, library: str) -> None:
    """Raise `ConfigError` for an MPI library in which a second thread may not make calls."""
    if granted < needed:
        name = library.splitlines()[0].strip() if library else "MPI"
        raise ConfigError(
            f"MPI: {name} grants thread level {granted}, a run needs {needed} "
            "(MPI_THREAD_SERIALIZED); use an MPI that was built with threads, such as that of: "
            "pip install 'sparsetron[mpi]'"
        )


def check_world(launch: Launch, *, rank: int, size: int) -> None:
    """Raise `ConfigError` if MPI's rank or size is not the launcher's: messages go by MPI rank."""
    if (rank, size) != (launch.rank, launch.world_size):
        raise ConfigError(
            f"MPI sees rank {rank} of {size}, {launch.launcher}'s variables say "
            f"{launch.rank} of {launch.world_size}; {START_RIGHT}"
        )


def with_master(launch: Launch, *, seconds: float) -> Launch:
    """Return the launch with a rendezvous address and port, chosen by rank 0 where it has none.

    A launch that lacks one of them gets both as they are on rank 0. Collective over MPI's world.
    Raises `ConfigError` if that world differs from the launcher's, `PeerError` if the address does
    not arrive in time.
    """
    needs_place = not (launch.master_addr and launch.master_port)
    instead_of = " (or MASTER_ADDR and MASTER_PORT)" if needs_place else ""
    MPI = open_mpi(instead_of=instead_of, seconds=seconds)
    world = MPI.COMM_WORLD
    check_world(launch, rank=world.Get_rank(), size=world.Get_size())
    if not needs_place:
        return launch
    text = bytearray(_free_place(launch).encode().ljust(_ADDRESS_BYTES))
    request = world.Ibcast([text, MPI.BYTE], root=0)
    if not poll(request.Test, seconds=seconds):
        raise PeerError(
            f"rank {launch.rank} heard nothing of rank 0 over MPI within {seconds:g} s; check "
            "that rank 0 runs"
        )
    address, port = text.decode().rsplit(maxsplit=1)
    return dataclasses.replace(launch, master_addr=address, master_port=int(port))


def leave_mpi(code: int) -> None:
    """Leave MPI and end the process with the code; return if MPI was not started.

    Called by all ranks at the end of a successful run. A failed rank must not call it: it would
    wait for ranks that are gone.

    MPICH reports an orderly end to mpiexec in a handler of C's exit(). A rank that left by _exit()
    would count as lost, and mpiexec would kill the ranks that are still leaving.
    """
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        with _ends_within(_LEAVE_SECONDS):
            MPI.Finalize()
            sys.stdout.flush()
            sys.stderr.flush()
            # PyDLL keeps the interpreter's lock, so no Python thread runs while C's exit handlers
            # do.
            ctypes.PyDLL(None).exit(code)


def has_cuda(mpi: ModuleType | None = None) -> bool:
    """Return whether the MPI library reports that it reads and writes CUDA memory directly."""
    file = (mpi or open_mpi()).__file__
    assert file is not None, "it is an extension module"
    # Symbols of the MPI library are looked up through the extension module that is linked to it.
    library = ctypes.CDLL(file)
    flag = ctypes.c_int(0)
    try:  # MPICH's query; kind 0 is CUDA
        library.MPIX_GPU_query_support(ctypes.c_int(0), ctypes.byref(flag))
    except AttributeError:
        pass
    else:
        return bool(flag.value)
    try:  # Open MPI's query
        return bool(library.MPIX_Query_cuda_support())
    except AttributeError:
        return False


def duplicate(world: MPI.Intracomm, *, seconds: float) -> MPI.Intracomm:
    """Return a communicator of the same ranks with messages of its own. Collective over `world`.

    Raises `PeerError` if the ranks do not meet within `seconds`.
    """
    comm, request = world.Idup()
    if not poll(request.Test, seconds=seconds):
        raise PeerError(
            f"rank {world.Get_rank()} made no communicator with its peers over MPI within "
            f"{seconds:g} s; check that all ranks run"
        )
    return comm


def _free_place(launch: Launch) -> str:
    import socket

    alone = launch.world_size == launch.local_world_size
    address = launch.master_addr or ("127.0.0.1" if alone else socket.getfqdn())
    return f"{address} {launch.master_port or free_port()}"


def free_port() -> int:
    """Return one of `PORTS` that is free on this host.

    Raises:
        ConfigError: None of a hundred ports drawn from them could be bound.
    """
    import random
    import socket

    # A generator of its own leaves that of the run alone.
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise ConfigError(f"no free port was found from {PORTS[0]} to {PORTS[-1]}; set MASTER_PORT")


_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_LOADING = "CUDA_MODULE_LOADING"
_CUDA_VARIABLES = (
    _CONNECTIONS, _LOADING, "NCCL_RUNTIME_CONNECT", "TORCH_NCCL_HIGH_PRIORITY",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The started process: its launch, and the device of its tensors."""

    launch: Launch
    device: torch.device
    backend: str

    @property
    def is_writer(self) -> bool:
        """True on the rank that writes logs and other files that exist once per run."""
        return self.launch.rank == 0

    def facts(self) -> dict[str, int | str]:
        """Return what the ranks run on, for records: losses and times depend on it."""
        import torch

        world, of_a_node = self.launch.world_size, self.launch.local_world_size
        return {
            "ranks": world,
            "nodes": math.ceil(world / of_a_node),
            "threads": torch.get_num_threads(),
            "backend": self.backend,
            "network": _network(self.backend) if world > 1 else "none",
        }


def _network(backend: str) -> str:
    """Return the interface, or else the address, over which the backend talks to other ranks."""
    import socket

    variable = "NCCL_SOCKET_IFNAME" if "nccl" in backend else "GLOO_SOCKET_IFNAME"
    if named := os.environ.get(variable):
        return named
    if "nccl" in backend:
        return "chosen by NCCL"
    # gloo takes the address of the host's name.
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if _address_of(name) == address), address)
    return "lo"


_ASK_FOR_ADDRESS, _BYTES_OF_REQUEST = 0x8915, 40
"""SIOCGIFADDR of Linux, and the size of its `struct ifreq`."""


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface, "" if it has none."""
    import fcntl
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        request = interface.encode().ljust(_BYTES_OF_REQUEST, b"\0")
        answer = fcntl.ioctl(asking.fileno(), _ASK_FOR_ADDRESS, request)
        return socket.inet_ntoa(answer[20:24])
    return ""


def job_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return facts about the job for records, from an allow-list, so that no secret can leak."""
    env = os.environ if environ is None else environ
    names = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "OMP_NUM_THREADS")
    return {name: env[name] for name in (*names, *_CUDA_VARIABLES) if name in env}


def job_has_one_node(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process belongs to a Slurm job of a single node."""
    env = os.environ if environ is None else environ
    return env.get("SLURM_JOB_NUM_NODES") == "1"


def tell_launcher(code: int, reason: str, environ: Mapping[str, str] | None = None) -> None:
    """Leave the exit code and a reason for `scripts/launch.sh`, whose file LAUNCH_REPORT names.

    torchrun and srun lose the codes of ranks, and a start that was refused has no status.json.
    """
    env = os.environ if environ is None else environ
    if code and (report := env.get("LAUNCH_REPORT")):
        # Ranks on other nodes do not have the file, and must not make one.
        with suppress(OSError):
            file = os.open(report, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(file, f"{code} {reason}\n".encode(errors="replace"))
            finally:
                os.close(file)


def set_cuda_variables(config: Config, environ: MutableMapping[str, str] | None = None) -> None:
    """Set the variables of CUDA and NCCL that the grid needs, unless the user has set them.

    Call before anything loads CUDA, MPI included: CUDA reads its variables once. Every launcher
    starts ranks that come through here, while a variable that a launcher's shell exports need not
    reach the ranks on other nodes (Open MPI's mpiexec passes on few of them).
    """
    env = os.environ if environ is None else environ
    if config.run.device == "cpu":
        return
    if config.parallel.pipeline_model_parallel_size > 1:
        # With lazy loading, the first launch of a kernel may wait until the device is idle, which
        # never happens while NCCL's receive kernel spins on it.
        env.setdefault(_LOADING, "EAGER")
        # A spinning receive also blocks the other streams of its hardware queue. CUDA has at most
        # 32 queues and uses 8 by default.
        env.setdefault(_CONNECTIONS, "32")
        # By default NCCL connects an algorithm at its first use, during a step, and the host then
        # waits for the other ranks.
        env.setdefault("NCCL_RUNTIME_CONNECT", "0")
    if config.parallel.tensor_model_parallel_size > 1:
        # Otherwise a product that starts first could fill the device and delay a layer's
        # collectives.
        env.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")


def cuda_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of CUDA and NCCL that `set_cuda_variables` knows and that are set."""
    env = os.environ if environ is None else environ
    return {name: env[name] for name in _CUDA_VARIABLES if name in env}


def check_cuda_variables(config: Config, environ: Mapping[str, str] | None = None) -> str | None:
    """Check CUDA_DEVICE_MAX_CONNECTIONS and CUDA_MODULE_LOADING for a run on CUDA.

    Returns:
        A sentence for the log if the run keeps the user's single hardware queue, else None.

    Raises:
        ConfigError: Interleaved pipeline stages would share a single hardware queue, or load
            kernels late.
    """
    env = os.environ if environ is None else environ
    parallel = config.parallel
    layers = parallel.num_layers_per_virtual_pipeline_stage
    if layers is not None and env.get(_LOADING, "").strip().upper() == "LAZY":
        raise ConfigError(
            f"{_LOADING}={env[_LOADING]} with num_layers_per_virtual_pipeline_stage {layers}: a "
            "kernel that is loaded at its first launch may wait for a receive whose sender waits "
            "for this rank; unset the variable (the run then sets EAGER), or drop "
            "--num-layers-per-virtual-pipeline-stage"
        )
    if env.get(_CONNECTIONS, "").strip() != "1" or parallel.model_parallel_size == 1:
        return None
    if layers is not None:
        raise ConfigError(
            f"{_CONNECTIONS}=1 with num_layers_per_virtual_pipeline_stage {layers}: all streams "
            "share one hardware queue, in which a message that waits for its receiver can hold up "
            "what the receiver waits for; unset the variable (the run then sets 32), or drop "
            "--num-layers-per-virtual-pipeline-stage"
        )
    return (
        f"{_CONNECTIONS}=1 is kept: Megatron-LM orders its kernels by a single hardware queue; "
        "this program orders them by streams and their priorities, and a single queue only makes "
        "collectives and messages wait for unrelated kernels; unset the variable"
    )


def finds_compiler(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether Triton would find a C compiler: what CC names, else gcc or clang."""
    env = os.environ if environ is None else environ
    named = env.get("CC")
    return any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"]))


def needs_mpi(config: Config) -> bool:
    """Return whether the run sends messages over MPI."""
    return config.parallel.pipeline_schedule == "message-driven"


def start(launch: Launch, config: Config) -> Runtime:
    """Choose device and backend and join the other ranks. Call once, before any tensor is made.

    MPI, where it is needed, is joined first, since it may provide the rendezvous address. Raises
    `ConfigError` if a requested device or backend is not available, `PeerError` if the ranks do not
    meet within the timeout.
    """
    import torch

    device = _choose_device(launch, config)
    if device.type == "cuda":
        check_cuda_variables(config)
    backend = _choose_backend(device, config.parallel.distributed_backend)
    if "OMP_NUM_THREADS" not in os.environ and device.type == "cpu":
        share = max(1, (os.cpu_count() or 1) // launch.local_world_size)
        if hasattr(os, "sched_getaffinity"):  # a scheduler may give fewer cores than there are
            share = min(share, len(os.sched_getaffinity(0)))
        torch.set_num_threads(share)
    # torch's defaults round operands of fp32 convolutions, unlike those of products, to TF32.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if config.training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.training.seed)
    if launch.world_size > 1:
        timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
        if needs_mpi(config) or not (launch.master_addr and launch.master_port):
            launch = with_master(launch, seconds=timeout.total_seconds())
        _join_world(launch, backend, timeout)
    return Runtime(launch=launch, device=device, backend=backend)


def wait_for_all() -> None:
    """Wait for all ranks before this process ends.

    Only for errors that every rank raises (`SparsetronError.shared`), since a lost rank would be
    waited for. Launchers end all ranks when the first one ends, possibly before rank 0 has printed
    the reason.
    """
    if "torch" not in sys.modules:
        return  # this process has joined no group, and importing torch takes seconds
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # the barrier uses gloo on every device


def stop() -> None:
    """Leave the process group; the counterpart of `start`."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def gpu_devices() -> list[Path]:
    """Return the device files of this machine's NVIDIA GPUs, which need no driver that works."""
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def unused_gpus(environ: Mapping[str, str] | None = None) -> str | None:
    """Return why torch sees none of this machine's GPUs, or None if nothing is wrong.

    Nothing is wrong if torch sees a GPU, if the machine has none, or if CUDA_VISIBLE_DEVICES hides
    them on purpose. A build of torch that does not fit the driver sees no GPU, and without this
    check the run would train on the CPU without a word.
    """
    import torch

    env = os.environ if environ is None else environ
    hidden = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")
    if hidden or not gpu_devices() or torch.cuda.is_available():
        return None
    built = torch.version.cuda
    cause = (
        f"torch {torch.__version__} is built for CUDA {built}, for which the driver may be too "
        "old, or the job has asked for no GPU"
        if built
        else f"torch {torch.__version__} is built without CUDA"
    )
    return (
        f"this machine has NVIDIA GPUs, and torch sees none: {cause}; install the torch that fits "
        "the driver (docs/slurm.md), or give --device cpu; --device cuda refuses to train on CPUs"
    )


def _choose_device(launch: Launch, config: Config) -> torch.device:
    import torch

    wanted = config.run.device
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not seen:
        raise ConfigError("--device cuda: no CUDA device is seen; use --device cpu")
    if wanted == "cpu" or not seen:
        return torch.device("cpu")
    # These launchers may show each rank a device of its own; torchrun shows every rank the same.
    bound = seen == 1 and launch.local_world_size > 1 and launch.launcher in ("srun", "mpiexec")
    if launch.local_rank >= seen and not bound:
        raise ConfigError(
            f"local rank {launch.local_rank}: only {seen} CUDA devices are seen; start at most "
            f"{seen} ranks on this node, or bind one device to each (srun, mpiexec) and check "
            "CUDA_VISIBLE_DEVICES"
        )
    index = 0 if bound else launch.local_rank
    torch.cuda.set_device(index)
    if config.precision.bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(f"--bf16: {torch.cuda.get_device_name()} has no bf16; use --fp16")
    return torch.device("cuda", index)


def _choose_backend(device: torch.device, wanted: str | None) -> str:
    if device.type == "cpu":
        if wanted == "nccl":
            raise ConfigError("--distributed-backend nccl: tensors are on the CPU; use gloo")
        return "gloo"
    if wanted == "gloo":
        raise ConfigError("--distributed-backend gloo: tensors are on CUDA; use nccl")
    # Control messages are CPU tensors and need gloo in addition to NCCL.
    return "cpu:gloo,cuda:nccl"


_RECONNECT_SECONDS = 0.1
LAZY_GLOO_RANKS = 512
"""Ranks from which gloo connects two ranks at their first message.

At the start it would connect every rank to every other, after each has read from the store a list
of addresses of each: bytes that grow with the cube of the ranks, and a socket for each peer.
"""


def _join_world(launch: Launch, backend: str, timeout: timedelta) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = launch.master_addr or "", launch.master_port or 0
    _check_address(address, port)
    if address in LOOPBACK:
        # gloo binds to the address of the host name, which may not exist on this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if launch.world_size >= LAZY_GLOO_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # torchrun keeps its own store at this address, shared by ranks of this and of later starts.
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Ranks of another job that has the same port must not be taken for ranks of this one.
    job = os.environ.get("SLURM_JOB_ID", "") if launch.launcher == "srun" else ""
    is_master = launch.rank == 0 and not is_hosted
    # Not for what a rank may start, which would take this run's ranks for its own.
    meeting = os.environ.pop("LAUNCH_MEETING", None) if launch.launcher == "torchrun" else None
    listener = None
    try:
        if is_master and address in LOOPBACK:
            listener, port = _listen_on_loopback(0 if meeting else port)
            if meeting:
                replace_text(Path(meeting), str(port))
        if not is_master:
            if meeting:
                port = _port_of_rank_0(Path(meeting), timeout.total_seconds())
            _reach(address, port, timeout.total_seconds())
        store = PrefixStore(
            f"sparsetron/{job}/{start}",
            TCPStore(
                address,
                port,
                launch.world_size,
                is_master=is_master,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener,
            ),
        )
        _await_ranks(store, dataclasses.replace(launch, master_port=port), timeout)
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
    except (RuntimeError, ValueError, OSError) as error:
        first_line = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ConfigError(
                f"MASTER_PORT={port}: in use on {address} by another program; choose another port"
            ) from None
        raise PeerError(
            f"rank {launch.rank} could not join {launch.world_size} ranks at {address}:{port} "
            f"within {timeout.total_seconds():g} s: {first_line}; check MASTER_ADDR and "
            "MASTER_PORT, and that rank 0 runs"
        ) from None


def _reach(address: str, port: int, seconds: float) -> None:
    """Wait until rank 0, or the agent of torchrun, listens. Raises `OSError`.

    On a timeout of its own, torch would print pages of C++ frames.
    """
    import socket

    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=seconds).close()
            return
        except OSError:
            if time.monotonic() >= end:
                raise
        time.sleep(_RECONNECT_SECONDS)


def _listen_on_loopback(port: int) -> tuple[int, int]:
    """Return a socket for the store of ranks of one machine, and its port: one that is free for 0.

    The store would listen on every interface, and answers anybody who reaches it.
    """
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        port = listener.getsockname()[1]
        return listener.detach(), port


def _port_of_rank_0(meeting: Path, seconds: float) -> int:
    """Return the port that rank 0 wrote into the file `meeting`. Raises `OSError` after `seconds`.

    A port chosen by the launcher could be taken before rank 0, which imports torch first, listens.
    """
    end = time.monotonic() + seconds
    while not meeting.exists():
        if time.monotonic() >= end:
            raise TimeoutError(f"rank 0 wrote no port into {meeting}")
        time.sleep(_RECONNECT_SECONDS)
    return int(meeting.read_text())


def _check_address(address: str, port: int) -> None:
    import socket

    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={address}: cannot be resolved on {socket.gethostname()} ({error}); give "
            "the name or address of rank 0's machine"
        ) from None


def _await_ranks(store: Store, launch: Launch, timeout: timedelta) -> None:
    """Wait until every rank has arrived; `PeerError` names missing ranks."""
    keys = [f"here/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], "1")
    # Ranks wait for one key, since the keys of all ranks, asked for by each, are many.
    if store.add("here", 1) == launch.world_size:
        store.set("here/all", "1")
    try:
        store.wait(["here/all"], timeout)
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        named = ", ".join(map(str, missing[:8])) + (", ..." if missing[8:] else "")
        raise PeerError(
            f"{launch.world_size - len(missing)} of {launch.world_size} ranks joined at "
            f"{launch.master_addr}:{launch.master_port} within {timeout.total_seconds():g} s; "
            f"missing: rank {named}"
        ) from None
