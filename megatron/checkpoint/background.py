"""A save that is written while training goes on.

The saving thread runs the very same `save_checkpoint` as a save that is waited for, so the bytes
are the same; it gathers over a group of its own, so none of its collectives can meet one of
training's. There is one save at a time, so one copy of the state in memory at most.

Nothing here imports torch or numpy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs one piece of work at a time in a thread of its own."""

    def __init__(self) -> None:
        self._future: Future[T] | None = None

    @property
    def pending(self) -> bool:
        """Whether some work was started whose result nobody has taken."""
        return self._future is not None

    @property
    def finished(self) -> bool:
        """Whether the pending work has ended, well or not."""
        assert self._future is not None, "nothing is pending"
        return self._future.done()

    def start(self, work: Callable[[], T]) -> None:
        """Run `work`. The result of the work before it must have been taken."""
        assert self._future is None, "one at a time"
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._future = future
        # A daemon: a run whose peers are gone must be able to leave in the middle of a save.
        threading.Thread(target=run, name="save-checkpoint", daemon=True).start()

    def take(self) -> T:
        """Wait for the work to end; return its result, or raise what it raised."""
        assert self._future is not None, "nothing is pending"
        try:
            return self._future.result()
        finally:
            self._future = None
