"""Requests of people and launchers to save or to leave: signals, and files in the run folder.

Handlers only note the signal; ranks agree at the next step boundary, where the engine's vote
carries the largest request of any rank.

    RUN/SAVE, SIGTERM, SIGUSR1, SIGINT, RUN/STOP --> pending() --> vote --> save, go on or leave
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from types import FrameType

SIGTERM_SECONDS = 1.0
"""A launcher that saw a rank fail sends SIGTERM to the others, who may not know of it yet."""


class ExitRequest(IntEnum):
    """A request of a rank after a step; the largest request of all ranks counts."""

    NONE = 0
    SAVE = 1
    DURATION = 2
    STOP = 3
    SIGUSR1 = 4
    SIGINT = 5
    SIGTERM = 6

    @property
    def leaves(self) -> bool:
        """Return whether it ends the run."""
        return self > ExitRequest.SAVE

    @property
    def left(self) -> str:
        """The text of status.json for a run that left for this request."""
        return "exit-duration" if self is ExitRequest.DURATION else self.name


_SIGNALS = {
    signal.SIGUSR1: ExitRequest.SIGUSR1,
    signal.SIGINT: ExitRequest.SIGINT,
    signal.SIGTERM: ExitRequest.SIGTERM,
}


class ExitSignals:
    """Requests to save or leave that reached this rank.

    `folder`: the run folder, on the rank that looks for files; None on others.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._save = folder / "SAVE" if folder else None
        self._stop = folder / "STOP" if folder else None
        self._noted = ExitRequest.NONE
        self._sigterm_at = -SIGTERM_SECONDS

    def install(self, *numbers: signal.Signals) -> None:
        """Take over these signals, or all, for good: a rank that is failing has to tell why.

        Main thread only.
        """
        for number in numbers or _SIGNALS:
            signal.signal(number, self._note)

    def pending(self) -> ExitRequest:
        """The most urgent request that reached this rank so far."""
        if self._noted is ExitRequest.NONE and self._stop is not None and self._save is not None:
            if self._stop.exists():
                self._noted = ExitRequest.STOP
            elif self._save.exists():
                return ExitRequest.SAVE
        return self._noted

    def saved(self) -> None:
        """A checkpoint was committed after the request: RUN/SAVE is obeyed."""
        _remove(self._save)

    def left(self) -> None:
        """The run leaves: RUN/STOP is obeyed, and the same command goes on."""
        _remove(self._stop)

    def wait_out_sigterm(self) -> None:
        """Wait until a second after a SIGTERM.

        By then the failure of a peer that caused the signal has shown.
        """
        time.sleep(max(0.0, self._sigterm_at + SIGTERM_SECONDS - time.monotonic()))

    def _note(self, number: int, frame: FrameType | None) -> None:
        request = _SIGNALS[signal.Signals(number)]
        if request is ExitRequest.SIGTERM:
            self._sigterm_at = time.monotonic()
        self._noted = max(self._noted, request)


def _remove(path: Path | None) -> None:
    if path is not None:
        with suppress(OSError):
            path.unlink()
