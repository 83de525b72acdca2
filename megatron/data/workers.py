"""Processes that apply a function to many tasks and hand the results back in the tasks' order.

Not `concurrent.futures`: its workers share locked queues, so one that is killed while it writes
leaves the others, and the caller, waiting for ever. Here each worker has a pipe of its own, and
whichever side goes first, the other reads the end of it.

    caller   task 0 -> worker 0, task 1 -> worker 1, task 2 -> worker 0, ...
    caller   result 0 <- worker 0, result 1 <- worker 1, ...
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

from megatron.errors import SparsetronError

Task = TypeVar("Task")
Result = TypeVar("Result")

_AHEAD = 3
"""Tasks a worker may hold: one at work, one waiting, one done and not fetched yet."""


class WorkerError(Exception):
    """A task failed with what is no error of ours, or its worker is gone; one line says which."""

    def __init__(self, task: object, reason: str, *, died: bool) -> None:
        super().__init__(reason)
        self.task = task
        self.reason = reason
        self.died = died


class Crew(Generic[Task, Result]):
    """`size` spawned workers, each started with its first task; a context manager.

    `work` and the tasks must be picklable. Leaving ends every worker, whatever it is doing. If
    this process dies, its workers end after the task at hand.
    """

    def __init__(self, work: Callable[[Task], Result], *, size: int) -> None:
        assert size >= 1, size
        self._work = work
        self._size = size
        self._workers: list[tuple[SpawnProcess, Connection]] = []

    def __enter__(self) -> Crew[Task, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._workers:
            connection.close()
            process.terminate()
        for process, _connection in self._workers:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._workers.clear()

    def map(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """Tasks with their results, in order; a few tasks per worker are read ahead.

        A SparsetronError of `work` is raised as it is, anything else as a WorkerError.
        """
        waiting: deque[tuple[int, Task]] = deque()
        for number, task in enumerate(tasks):
            if len(waiting) == self._size * _AHEAD:
                yield self._receive(*waiting.popleft())
            self._send(number, task)
            waiting.append((number, task))
        while waiting:
            yield self._receive(*waiting.popleft())

    def _send(self, number: int, task: Task) -> None:
        try:
            if len(self._workers) < self._size:
                self._start()
            self._workers[number % self._size][1].send(task)
        except OSError as error:
            raise WorkerError(task, "a worker process died", died=True) from error

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._work), daemon=True)
        try:
            process.start()
        finally:
            theirs.close()  # or the end of the worker would not be the end of the pipe
        self._workers.append((process, ours))

    def _receive(self, number: int, task: Task) -> tuple[Task, Result]:
        try:
            error, result = self._workers[number % self._size][1].recv()
        except (EOFError, OSError) as gone:
            raise WorkerError(task, "a worker process died", died=True) from gone
        if isinstance(error, SparsetronError):
            raise error
        if error is not None:
            raise WorkerError(task, error, died=False)
        return task, result


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    """A worker's life: tasks until the pipe ends, each answered by (error or None, result)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to answer
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end = object()

    def receive() -> None:
        # Apart from the work, so that the caller never waits to send while we wait to answer.
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    tasks.put(connection.recv())
        finally:
            tasks.put(end)

    threading.Thread(target=receive, daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while (task := tasks.get()) is not end:
            connection.send(_answer(work, task))


def _answer(work: Callable[[Any], Any], task: Any) -> tuple[SparsetronError | str | None, Any]:
    try:
        return None, work(task)
    except SparsetronError as error:
        return error, None
    except Exception as error:
        return describe_error(error), None


def describe_error(error: Exception) -> str:
    """Type and first line of the message."""
    return f"{type(error).__name__}: {error}".split("\n")[0]
