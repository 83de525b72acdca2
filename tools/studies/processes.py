"""Processes that are waited for, several at a time, and can all be told to end."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

STOPPED = 130
"""Exit code of a command that is not started any more."""


class Processes:
    """Runs commands, each to its end in the calling thread, and can ask all of them to leave."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[Any]] = set()
        self._lock = threading.RLock()  # a second signal may come while one is handled
        self.stopping = False

    def wait_for(self, command: Sequence[str], **options: Any) -> int:
        """Run a command with these options of `Popen`; return its exit code, or `STOPPED`."""
        with self._lock:
            if self.stopping:
                return STOPPED
            # Ctrl-C reaches the process once, from `stop`.
            process = subprocess.Popen(command, start_new_session=True, **options)
            self._running.add(process)
        code = process.wait()
        with self._lock:
            self._running.discard(process)
        return code

    def stop(self) -> None:
        """Ask every process to save and leave, and start no other."""
        with self._lock:
            self.stopping = True
            for process in self._running:
                process.send_signal(signal.SIGTERM)
