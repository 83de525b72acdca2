"""A shell into which a reader types commands, one after another."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from select import select

PATIENCE = 10.0
"""Seconds in which processes may end by themselves."""


@dataclass(frozen=True)
class ShellAnswer:
    """The output and the exit code of a command."""

    code: int
    output: str


class Shell:
    """One bash process for all commands, so that an activated environment stays active."""

    def __init__(self, cwd: Path, *, notes: Path, environment: Mapping[str, str]) -> None:
        """Start the shell; `notes` is a folder for what is typed and printed."""
        self._notes, self._count = notes, 0
        told, tell = os.pipe()
        self._told = os.fdopen(told, "rb", buffering=0)
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            cwd=cwd,
            env=dict(environment),
            pass_fds=(tell,),
            start_new_session=True,
            text=True,
        )
        os.close(tell)  # so that the end of the shell is noticed
        self._tell = tell

    def run(self, command: str, *, limit: float) -> ShellAnswer:
        """Type a command; raise `TimeoutError` and end the shell after `limit` seconds."""
        if self._bash.poll() is not None:
            raise RuntimeError("the shell ended with an earlier command")
        self._count += 1
        typed = self._notes / f"{self._count}.sh"
        printed = typed.with_suffix(".out")
        typed.write_text(command + "\n", encoding="utf-8")
        assert self._bash.stdin is not None
        # A background process of the command would hold the command's own pipe open.
        self._bash.stdin.write(
            f"{{ . '{typed}'; }} </dev/null >'{printed}' 2>&1 {self._tell}>&-; "
            f"echo $? >&{self._tell}\n"
        )
        self._bash.stdin.flush()
        said = self._told.read(100) if select([self._told], [], [], limit)[0] else b""
        output = printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""
        if not said:
            self.close()
            raise TimeoutError(f"{command}\nno end after {limit:g} s:\n{output[-4000:]}")
        return ShellAnswer(int(said), output)

    def close(self) -> None:
        """End the shell and its processes; launchers get time to end the processes they started."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + PATIENCE
            for pid in self._session():
                with suppress(ProcessLookupError):
                    os.kill(pid, sign)
            while self._session() and time.monotonic() < deadline:
                self._bash.poll()
                time.sleep(0.05)
        self._bash.wait()
        self._told.close()
        assert self._bash.stdin is not None
        self._bash.stdin.close()

    def _session(self) -> list[int]:
        """Return the processes of the shell's session, including jobs with their own groups."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._bash.pid and state != "Z":
                    found.append(int(stat.parent.name))
        return found
