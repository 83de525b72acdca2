"""Ranks for tests of what travels over MPI: one `mpiexec` job that serves many tests.

    pytest --starts--> mpiexec --starts--> rank, rank, ...   each dials back to pytest, twice:
                                           one line for what to do, one that tells when pytest ends

As in `tests.ranks`, whose `Ranks` hands out the work; MPI's ranks are those of torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from tests.limits import LIMIT
from tests.ranks import Pool, serve

REPO = Path(__file__).resolve().parent.parent


class MPIJob(Pool):
    """A job of `world` ranks under `mpiexec`, each of which runs the `main` of `module`."""

    def __init__(self, mpiexec: str, world: int, *, module: str = "tests.mpi_ranks") -> None:
        super().__init__()
        address = str(Path(self.folder.name) / "socket")
        self._lifelines: list[Connection] = []
        self._output = tempfile.TemporaryFile(dir=self.folder.name)
        command = [mpiexec, "-n", str(world), sys.executable, "-m", module]
        with Listener(address, "AF_UNIX", backlog=2 * world) as listener:
            self._job = subprocess.Popen(
                [*command, address, self.store],
                cwd=REPO,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
            # Nobody dials where the job cannot start: then its end is what ends the waiting.
            over = threading.Timer(LIMIT, self._job.kill)
            over.start()
            threading.Thread(target=self._dial_when_over, args=(address,), daemon=True).start()
            try:
                self._answer(listener, world)
            except BaseException:
                self.end_processes()
                raise
            finally:
                over.cancel()

    def end_processes(self) -> None:
        for line in self._lifelines:
            line.close()
        try:
            self._job.wait(5)
        except subprocess.TimeoutExpired:
            self._job.terminate()
            self._job.wait(30)
        self._output.close()

    def _answer(self, listener: Listener, world: int) -> None:
        pipes: dict[int, Connection] = {}
        while len(pipes) < world or len(self._lifelines) < world:
            line = listener.accept()
            what, rank = line.recv()
            if what == "over":
                self._output.seek(0)
                raise RuntimeError(f"mpiexec ended: {self._output.read().decode()}")
            if what == "work":
                pipes[rank] = line
            else:
                self._lifelines.append(line)
        self.pipes = [pipes[rank] for rank in range(world)]

    def _dial_when_over(self, address: str) -> None:
        self._job.wait()
        try:
            with Client(address, "AF_UNIX") as line:
                line.send(("over", -1))
        except OSError:
            pass  # it had started, and nobody listens any more


def _dial(address: str, what: str, rank: int) -> Connection:
    line = Client(address, "AF_UNIX")
    line.send((what, rank))
    return line


def _leave_with(line: Connection) -> None:
    """End this rank when pytest is gone, even while a test runs on it."""
    try:
        line.recv()
    except (EOFError, OSError):
        os._exit(1)


def main(address: str, store: str) -> None:
    """Life of a rank."""
    from megatron.launch import open_mpi

    world = open_mpi().COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    lifeline = _dial(address, "life", rank)
    threading.Thread(target=_leave_with, args=(lifeline,), daemon=True).start()
    serve(_dial(address, "work", rank), store, rank, size)


if __name__ == "__main__":
    main(*sys.argv[1:])
