"""Requests to save or to leave: signals, and files in the run folder.

Signal handlers only record the signal. Ranks agree at the next step boundary, where the engine's
vote carries the largest request of any rank.

    RUN/SAVE, SIGTERM, SIGUSR1, SIGINT, RUN/STOP --> pending() --> vote --> save, go on or leave
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import NoReturn

SIGTERM_SECONDS = 1.0
"""Seconds to wait after SIGTERM, for the report of a failure.

A launcher that saw a rank fail sends SIGTERM to the other ranks, which may not know of it yet.
"""


class ExitRequest(IntEnum):
    """A rank's request after a step; the largest request of all ranks counts."""

    NONE = 0
    SAVE = 1
    DURATION = 2
    STOP = 3
    SIGUSR1 = 4
    SIGINT = 5
    SIGTERM = 6

    @property
    def leaves(self) -> bool:
        """True if the request ends the run."""
        return self > ExitRequest.SAVE

    @property
    def left(self) -> str:
        """Name of the request in status.json."""
        return "exit-duration" if self is ExitRequest.DURATION else self.name


_SIGNALS = {
    signal.SIGUSR1: ExitRequest.SIGUSR1,
    signal.SIGINT: ExitRequest.SIGINT,
    signal.SIGTERM: ExitRequest.SIGTERM,
}


class ExitSignals:
    """The requests to save or leave that reached this rank.

    Args:
        folder: The run folder, on the rank that looks for the files; None on other ranks.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._save = folder / "SAVE" if folder else None
        self._stop = folder / "STOP" if folder else None
        self._noted = ExitRequest.NONE
        self._sigterm_at = -SIGTERM_SECONDS

    def install(self, *numbers: signal.Signals) -> None:
        """Handle these signals, or all, for the rest of the process.

        The handlers are never removed, so that a failing rank can still report. Main thread only.
        """
        for number in numbers or _SIGNALS:
            signal.signal(number, self._note)

    def pending(self) -> ExitRequest:
        """Return the most urgent request that has reached this rank.

        A signal or RUN/STOP stays in effect; RUN/SAVE counts as long as the file exists.
        """
        if self._noted is ExitRequest.NONE and self._stop is not None and self._save is not None:
            if self._stop.exists():
                self._noted = ExitRequest.STOP
            elif self._save.exists():
                return ExitRequest.SAVE
        return self._noted

    def saved(self) -> None:
        """Remove RUN/SAVE, after a checkpoint was committed."""
        _remove(self._save)

    def left(self) -> None:
        """Remove RUN/STOP, so that the same command resumes the run."""
        _remove(self._stop)

    def wait_out_sigterm(self) -> None:
        """Wait until one second has passed since the last SIGTERM.

        If the signal was caused by the failure of a peer, the failure is known by then.
        """
        time.sleep(max(0.0, self._sigterm_at + SIGTERM_SECONDS - time.monotonic()))

    def _note(self, number: int, frame: FrameType | None) -> None:
        request = _SIGNALS[signal.Signals(number)]
        if request is ExitRequest.SIGTERM:
            self._sigterm_at = time.monotonic()
        self._noted = max(self._noted, request)


def leave_at_once(leave: Callable[[], NoReturn]) -> None:
    """Call `leave` at SIGTERM and SIGUSR1, in a thread, until other handlers are installed.

    A process that starts waits for other ranks in native code, where no handler of Python runs.
    Main thread only.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)

    def handler(number: int, frame: FrameType | None) -> None:
        pass  # the thread leaves, once

    def watch() -> None:
        while number := os.read(ours, 1):
            if signal.getsignal(number[0]) is handler:
                leave()

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handler)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    Thread(target=watch, daemon=True).start()


@contextmanager
def ended_by_requests() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 end the process in the body, which may keep the interpreter's lock.

    Main thread only.
    """
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    handlers = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def _remove(path: Path | None) -> None:
    if path is not None:
        with suppress(OSError):
            path.unlink()
