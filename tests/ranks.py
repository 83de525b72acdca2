"""Ranks for tests: processes that join gloo once and then serve many tests.

`Ranks.run(n, function, *args)` calls `function(groups, *args)` on n ranks and returns the results
in rank order. The function must be importable (module level of a test file). Starting a process
with torch costs seconds, so one set of processes per world size serves the whole session. `groups`
belong to a purely data-parallel grid; `grid` returns the groups of other grids.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.limits import LIMIT

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

    import torch

    from megatron.parallel.groups import ProcessGroups

MOST_THREADS = 60
"""Maximum number of threads of a rank between two tests; each group has three."""


class Ranks:
    """Lazily started sets of rank processes, one per world size, each made by `start`."""

    def __init__(self, start: Callable[[int], Pool] | None = None) -> None:
        self._start = start or Spawned
        self._pools: dict[int, Pool] = {}

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return `function(groups, *args)` of each rank; raise the failure of any rank."""
        if world not in self._pools:
            self._pools[world] = self._start(world)
        try:
            return self._pools[world].run(function, args)
        except BaseException:
            # The ranks may be desynchronised: start new ones next time.
            self._pools.pop(world).close()
            raise

    def drop_groups(self) -> None:
        """Destroy the process groups that tests made, on all ranks.

        gloo polls each idle group a hundred times a second, which costs more than a core for all
        groups of a session. Ranks that keep too many threads are ended, and started again when
        needed.
        """
        for world in list(self._pools):
            if max(self.run(world, _drop_groups)) > MOST_THREADS:
                self._pools.pop(world).close()

    def drop_many_groups(self) -> None:
        """Destroy the process groups that tests made, if they are many."""
        if any(pool.threads() > MOST_THREADS for pool in self._pools.values()):
            self.drop_groups()

    def close(self) -> None:
        """End every process."""
        while self._pools:
            self._pools.popitem()[1].close()


class Pool(ABC):
    """Processes that serve calls, one behind each of `pipes`, in rank order."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.store = str(Path(self.folder.name) / "store")
        self.pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Return the result of `function` on each rank."""
        call = packed((function, args))
        for pipe in self.pipes:
            pipe.send_bytes(call)
        replies: list[tuple[bool, Any]] = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(LIMIT):
                raise TimeoutError(f"rank {rank} did not answer in {LIMIT} s")
            replies.append(pickle.loads(pipe.recv_bytes()))
        failures = [f"rank {i}:\n{text}" for i, (good, text) in enumerate(replies) if not good]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in replies]

    def threads(self) -> int:
        """Return the largest number of threads of a rank, 0 if it is not known."""
        return 0

    def close(self) -> None:
        """End the processes and remove their files."""
        self.end_processes()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()

    @abstractmethod
    def end_processes(self) -> None:
        """End the processes at once."""


PRELOADED = [
    "safetensors.torch", "pretrain_gpt", "megatron.training", "megatron.model.gpt",
    "megatron.checkpoint.checkpointer",
]  # fmt: skip
"""Modules that forks find imported. None of them starts a thread, which a fork would lack."""


def fork_server() -> ForkServerContext:
    """Return the context whose processes are forks of one that has imported `PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Spawned(Pool):
    """Processes that run `serve`, or `life(pipe, store, rank, world)`.

    Ranks that serve are forks of one process, which imported torch and the program for all of them.
    A `life` has its own imports to make before torch: its processes are spawned.
    """

    def __init__(self, world: int, *, life: Callable[..., None] | None = None) -> None:
        super().__init__()
        context = multiprocessing.get_context("spawn") if life else fork_server()
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            args = (theirs, self.store, rank, world)
            process = context.Process(target=life or serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)

    def threads(self) -> int:
        return max(len(os.listdir(f"/proc/{process.pid}/task")) for process in self._processes)

    def end_processes(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def grid(groups: ProcessGroups, *, tp: int = 1, pp: int = 1, inner: int = 1) -> ProcessGroups:
    """Return the groups of another grid on the same ranks, made once per test file. Collective."""
    return grid_of(groups.world.rank, groups.world.size, tp, pp, inner)


@cache
def grid_of(rank: int, size: int, tp: int, pp: int, inner: int = 1) -> ProcessGroups:
    """Return the same groups as `grid`, without existing groups."""
    from megatron.parallel.dims import ParallelDims
    from megatron.parallel.groups import ProcessGroups

    dims = ParallelDims.from_world(size, tp=tp, pp=pp, dp_inner=inner)
    return ProcessGroups.build(dims, rank=rank)


def lower_priority_of_event_loops() -> None:
    """Give gloo's event loops, one thread for each group, the lowest priority.

    An event loop polls without a pause while another thread holds the lock of a connection. Where
    ranks share cores, the loop would use up its time slice before that thread can go on. The
    program leaves the priority alone: beside compute a run gains little on shared cores, and over a
    slow link it loses overlap, as the loops then send late.
    """
    for task in Path("/proc/self/task").iterdir():
        # A thread may end at any time.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                os.setpriority(os.PRIO_PROCESS, int(task.name), 19)


def packed(value: object) -> bytes:
    """Pickle a value with its tensors' bytes; torch's own way with files is far slower."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.dispatch_table = dict(copyreg.dispatch_table)
    if (torch := sys.modules.get("torch")) is not None:
        pickler.dispatch_table[torch.Tensor] = _reduced
    pickler.dump(value)
    return file.getvalue()


def _reduced(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    import torch

    whole = tensor.detach().cpu().contiguous()
    return _tensor, (whole.view(-1).view(torch.uint8).numpy(), whole.dtype, whole.shape)


def _tensor(octets: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.from_numpy(octets).view(dtype).view(shape)


_FIRST_GROUPS: list[object] = []
"""The groups with which a rank serves."""


def _groups() -> list[Any]:
    import torch.distributed as dist

    return list(dist.distributed_c10d._world.pg_map)  # pyright: ignore[reportPrivateUsage]


def _drop_groups(groups: ProcessGroups) -> int:
    """Destroy the groups that tests made; return the number of threads left."""
    import gc

    import torch.distributed as dist

    grid_of.cache_clear()
    vars(groups).pop("second_dp", None)
    made = [group for group in _groups() if group not in _FIRST_GROUPS]
    for group in made:
        dist.destroy_process_group(group)
    if made:
        # Threads of a group end with its last reference, which may be in a cycle (an engine).
        del group, made
        gc.collect()
    return len(os.listdir("/proc/self/task"))


def serve(pipe: Connection, store: str, rank: int, world: int) -> None:
    """Join as a rank, then answer calls until the pipe closes."""
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    from megatron.parallel.dims import ParallelDims
    from megatron.parallel.groups import ProcessGroups

    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=world, pp=1), rank=rank)
    _FIRST_GROUPS.extend(_groups())
    while True:
        lower_priority_of_event_loops()
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            reply = packed((True, function(groups, *args)))
        except Exception:
            reply = packed((False, traceback.format_exc()))
        pipe.send_bytes(reply)
