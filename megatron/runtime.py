"""The device and the backend of this process, and the environment variables that they depend on."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron import mpi_world
from megatron.errors import ConfigError, PeerError
from megatron.launch import Launch

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from megatron.config import Config

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_LOADING = "CUDA_MODULE_LOADING"
_CUDA_VARIABLES = (
    _CONNECTIONS, _LOADING, "NCCL_RUNTIME_CONNECT", "TORCH_NCCL_HIGH_PRIORITY",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The started process: its launch, and the device its tensors live on."""

    launch: Launch
    device: torch.device
    backend: str

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes logs and other files that exist once."""
        return self.launch.rank == 0


def job_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Facts of the job for records, by allow-list, so that no secret can leak."""
    env = os.environ if environ is None else environ
    names = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "OMP_NUM_THREADS")
    return {name: env[name] for name in (*names, *_CUDA_VARIABLES) if name in env}


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
        # The first launch of a kernel that is loaded lazily may wait until the device is idle,
        # which the device is not while NCCL's kernel of a receive spins on it.
        env.setdefault(_LOADING, "EAGER")
        # A spinning receive also holds up the other streams of its hardware queue: 32 queues are
        # the most that CUDA has, 8 are its default.
        env.setdefault(_CONNECTIONS, "32")
        # NCCL would otherwise connect what an algorithm needs at its first use, in a step, where
        # the host waits for the other ranks (NCCL's default is 1).
        env.setdefault("NCCL_RUNTIME_CONNECT", "0")
    if config.parallel.tensor_model_parallel_size > 1:
        # A layer's collectives run beside a product that could fill the device first.
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
    """Whether a run must be able to send messages over MPI."""
    return config.parallel.pipeline_schedule == "message-driven"


def start(launch: Launch, config: Config) -> Runtime:
    """Choose device and backend and join the other ranks. Call once, before any tensor is made.

    MPI, where it is needed, comes first: it may say where the others are. Raises `ConfigError`
    where what was asked for is not here, `PeerError` where the ranks do not find each other within
    the timeout.
    """
    import torch

    device = _choose_device(launch, config)
    if device.type == "cuda":
        check_cuda_variables(config)
    backend = _choose_backend(device, config.parallel.distributed_backend)
    if "OMP_NUM_THREADS" not in os.environ and device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))
    if config.training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.training.seed)
    if launch.world_size > 1:
        timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
        if needs_mpi(config) or not (launch.master_addr and launch.master_port):
            launch = mpi_world.with_master(launch, seconds=timeout.total_seconds())
        _join_world(launch, backend, timeout)
    return Runtime(launch=launch, device=device, backend=backend)


def wait_for_all() -> None:
    """Leave no earlier than the others. For ranks that know of each other that all are alive:
    launchers end everybody with the first that leaves, even before rank 0 has said why."""
    if "torch" not in sys.modules:
        return  # nobody was joined yet, and to load it would take seconds
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # a barrier that is gloo's on every device


def stop() -> None:
    """Leave the world; the counterpart of `start`."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _choose_device(launch: Launch, config: Config) -> torch.device:
    import torch

    wanted = config.run.device
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not seen:
        raise ConfigError("--device cuda: no CUDA device is seen; use --device cpu")
    if wanted == "cpu" or not seen:
        return torch.device("cpu")
    bound = seen == 1 and launch.local_world_size > 1  # the launcher shows each rank its own
    if launch.local_rank >= seen and not bound:
        raise ConfigError(
            f"local rank {launch.local_rank}: only {seen} CUDA devices are seen; start at most "
            f"{seen} ranks on this node, or bind one device to each and check CUDA_VISIBLE_DEVICES"
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
    # Control messages are CPU tensors and go through gloo beside NCCL.
    return "cpu:gloo,cuda:nccl"


def _join_world(launch: Launch, backend: str, timeout: timedelta) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = launch.master_addr or "", launch.master_port or 0
    _check_address(address, port)
    if address in ("127.0.0.1", "localhost"):
        # gloo binds to what the host name resolves to, which need not exist on this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torchrun keeps a store of its own there, which ranks of this and of later starts share.
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = PrefixStore(
            f"sparsetron/{start}",
            TCPStore(
                address,
                port,
                launch.world_size,
                is_master=launch.rank == 0 and not is_hosted,
                timeout=timeout,
                wait_for_workers=False,
            ),
        )
        _await_ranks(store, launch, timeout)
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"MASTER_PORT={port}: in use on {address} by another program; choose another port"
            ) from None
        raise PeerError(
            f"rank {launch.rank} could not join {launch.world_size} ranks at {address}:{port} "
            f"within {timeout.total_seconds():g} s: {first_line}; check MASTER_ADDR and "
            "MASTER_PORT, and that rank 0 runs"
        ) from None


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
    """Wait for every rank to say that it is here; `PeerError` names those that do not."""
    keys = [f"here/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], "1")
    try:
        store.wait(keys, timeout)
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
