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
SAVE = "{ declare -p; declare -f; printf 'cd %q\\n' \"$PWD\"; }"
"""Prints variables, functions and folder of a shell as commands that set them in a new one."""


class ShellLost(Exception):
    """A command ended its shell, or did not end in time."""


@dataclass(frozen=True)
class ShellAnswer:
    """The output and the exit code of a command."""

    code: int
    output: str


class Shell:
    """One bash process for all commands, so that an activated environment stays active.

    After a command that ended the process, or did not end, the next command gets a new process,
    with the folder, the variables and the functions that the last complete command left.
    """

    def __init__(self, cwd: Path, *, notes: Path, environment: Mapping[str, str]) -> None:
        """Start the shell; `notes` is a folder for what is typed and printed."""
        self._cwd, self._environment = cwd, dict(environment)
        self._notes, self._count = notes, 0
        self._state = notes / "state"
        self._is_open = False
        self._open()

    def run(self, command: str, *, limit: float) -> ShellAnswer:
        """Type a command and wait for its end for `limit` seconds; raise `ShellLost` after them.

        The command's processes are then ended.
        """
        if not self._is_open:
            self._open()
        self._count += 1
        typed = self._notes / f"{self._count}.sh"
        printed = typed.with_suffix(".out")
        typed.write_text(command + "\n", encoding="utf-8")
        # A background process of the command would hold the command's own pipe open.
        self._type(
            f"{{ . '{typed}'; }} </dev/null >'{printed}' 2>&1 {self._tell}>&-; _code=$?; "
            f"{SAVE} >'{self._state}.new'; mv '{self._state}.new' '{self._state}'; "
            f"echo $_code >&{self._tell}"
        )
        ready = select([self._told], [], [], limit)[0]
        said = self._told.read(100) if ready else b""
        output = printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""
        if not said:
            self.close()
            why = "the shell ended" if ready else f"no end after {limit:g} s"
            raise ShellLost(f"{command}\n{why}:\n{output[-4000:]}")
        return ShellAnswer(int(said), output)

    def close(self) -> None:
        """End the shell and its processes; launchers get time to end the processes they started."""
        if not self._is_open:
            return
        self._is_open = False
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
        with suppress(BrokenPipeError):
            self._bash.stdin.close()

    def _open(self) -> None:
        told, tell = os.pipe()
        self._told = os.fdopen(told, "rb", buffering=0)
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            cwd=self._cwd,
            env=self._environment,
            pass_fds=(tell,),
            start_new_session=True,
            text=True,
        )
        os.close(tell)  # so that the end of the shell is noticed
        self._tell = tell
        self._is_open = True
        if self._state.exists():
            # Variables that bash does not let anybody set are refused one by one.
            self._type(f". '{self._state}' 2>/dev/null")

    def _type(self, line: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(line + "\n")
        self._bash.stdin.flush()

    def _session(self) -> list[int]:
        """Return the processes of the shell's session, including jobs with their own groups."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._bash.pid and state != "Z":
                    found.append(int(stat.parent.name))
        return found
