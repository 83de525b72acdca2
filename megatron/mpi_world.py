"""MPI as a run's second way to talk: started before torch joins the ranks, left when all is well.

Nothing here blocks inside the MPI library, which would wait for a lost rank for ever, and with all
of a core's time: waiting is asking again and again, with pauses.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from megatron.errors import ConfigError, PeerError, missing_extra
from megatron.launch import START_RIGHT

if TYPE_CHECKING:
    from mpi4py import MPI

    from megatron.launch import Launch

FIRST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3
"""Seconds between two questions, at first and at most."""
LATE = 1 / 16
"""What a pause may add to the time waited, as a part of that."""
_ADDRESS_BYTES = 300
_START_SECONDS, _LEAVE_SECONDS = 300.0, 60.0


def poll(done: Callable[[], bool], *, seconds: float) -> bool:
    """Ask until it is done; False if it is not after so many seconds. Others may have the core in
    between, ever longer, so that ranks that share it do not steal it from each other."""
    began = time.monotonic()
    while not done():
        waited = time.monotonic() - began
        if waited >= seconds:
            return done()
        time.sleep(min(max(FIRST_PAUSE, LATE * waited), LONGEST_PAUSE))
    return True


def require_mpi(launch: Launch, *, seconds: float = _START_SECONDS) -> None:
    """Refuse a start that MPI is needed for and that brought the ranks none, which all of them find
    alike; starts it otherwise, within `seconds`. Needs no torch."""
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
    """End this process, with its stack on stderr and exit code 1, where MPI does not return: it
    waits for a rank that is gone with the interpreter's lock, so that no thread of Python's could.
    Nothing else may be watched like this meanwhile."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def open_mpi(*, instead_of: str = "", seconds: float = _START_SECONDS) -> ModuleType:
    """mpi4py's module, which starts MPI when it is first imported and may take `seconds` for that.
    `instead_of`: other things that would do. Raises `ConfigError` where it is not installed or
    lets one thread alone call it."""
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None:
        with _ends_within(min(seconds, _START_SECONDS)):
            MPI = _import_mpi(instead_of)
    check_threads(MPI.Query_thread(), MPI.THREAD_SERIALIZED, MPI.Get_library_version())
    return MPI


def _import_mpi(instead_of: str) -> ModuleType:
    try:
        import mpi4py

        # A thread moves messages while the main thread computes; a lock keeps their calls apart.
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
    """Refuse a library that does not let a second thread call it."""
    if granted < needed:
        name = library.splitlines()[0].strip() if library else "MPI"
        raise ConfigError(
            f"MPI: {name} grants thread level {granted}, a run needs {needed} "
            "(MPI_THREAD_SERIALIZED); use an MPI that was built with threads, such as that of: "
            "pip install 'sparsetron[mpi]'"
        )


def check_world(launch: Launch, *, rank: int, size: int) -> None:
    """Refuse a world of MPI's that is another than the launcher's: ranks are addressed by it."""
    if (rank, size) != (launch.rank, launch.world_size):
        raise ConfigError(
            f"MPI sees rank {rank} of {size}, {launch.launcher}'s variables say "
            f"{launch.rank} of {launch.world_size}; {START_RIGHT}"
        )


def with_master(launch: Launch, *, seconds: float) -> Launch:
    """The launch with a place to meet, which rank 0 chooses unless the launcher did. Collective
    over MPI's world. Raises `ConfigError` where that is not the launcher's, `PeerError` where the
    place is not heard of in time."""
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
    address, port = text.decode().split()
    return dataclasses.replace(launch, master_addr=address, master_port=int(port))


def leave_mpi(code: int) -> None:
    """Leave MPI, if it was started, and end the process with the code: all ranks do, at the end of
    a run that ended well. One that failed must not, since it would wait for peers that are gone.

    MPICH tells mpiexec of an orderly end when C's exit() runs its handlers. A rank that left by
    _exit() would count as lost, and mpiexec would kill the ranks that are still on their way out.
    """
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        with _ends_within(_LEAVE_SECONDS):
            MPI.Finalize()
            sys.stdout.flush()
            sys.stderr.flush()
            # PyDLL keeps the interpreter's lock: no Python thread runs beside the handlers of C.
            ctypes.PyDLL(None).exit(code)


def has_cuda(mpi: ModuleType | None = None) -> bool:
    """Whether the library says that it reads and writes a CUDA device's memory itself."""
    file = (mpi or open_mpi()).__file__
    assert file is not None, "it is an extension module"
    # Symbols of the MPI library are found through the module that is linked against it.
    library = ctypes.CDLL(file)
    flag = ctypes.c_int(0)
    try:  # MPICH's; 0 is CUDA
        library.MPIX_GPU_query_support(ctypes.c_int(0), ctypes.byref(flag))
    except AttributeError:
        pass
    else:
        return bool(flag.value)
    try:  # Open MPI's
        return bool(library.MPIX_Query_cuda_support())
    except AttributeError:
        return False


def duplicate(world: MPI.Intracomm, *, seconds: float) -> MPI.Intracomm:
    """A communicator of the same ranks whose messages meet no others. Collective."""
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
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{'127.0.0.1' if alone else socket.getfqdn()} {probe.getsockname()[1]}"
