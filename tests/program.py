"""Programs for tests: entry scripts that start as forks of a process which has imported torch.

    tests --asks--> fork server --forks--> script, script, ...   each with pipes to the tests

A cold start takes three seconds of a processor to import what the fork server has imported once.
What a script finds is what a cold start gives it: arguments, environment, folder, search path,
signals, streams and exit code. Three things differ. Variables that libraries read when they are
imported come too late, except for OMP_NUM_THREADS; all forks hash strings alike; and matplotlib is
missing, since the pictures of a report take a second to draw. Whatever a test has to say of one of
the three, or of what a program imports, needs a cold start.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import TextIO

from tests.limits import LIMIT
from tests.ranks import fork_server

REPO = Path(__file__).resolve().parent.parent
WITHOUT_PICTURES = REPO / "tests" / "without_pictures"
"""Folder for PYTHONPATH in which matplotlib cannot be imported, for programs that start cold."""


class Program:
    """A program that runs, with the part of the interface of `subprocess.Popen` that tests use.

    `communicate` closes the streams and must be called.
    """

    def __init__(
        self, script: str, argv: Sequence[str], env: Mapping[str, str], cwd: str | Path
    ) -> None:
        self.args = [script, *argv]
        context = fork_server()
        ours, theirs = zip(*(context.Pipe(duplex=False) for _ in range(2)), strict=True)
        # The server gets the ends of the pipes for this fork alone and closes them at once: were
        # another fork to inherit them, they would not end with this one.
        given = (script, list(argv), dict(env), str(cwd), *theirs)
        self._process = context.Process(target=_live, args=given, daemon=True)
        self._process.start()
        for end in theirs:
            end.close()
        self.stdout, self.stderr = (_stream(end) for end in ours)
        self._texts = ["", ""]
        self._readers: list[Thread] = []

    @property
    def pid(self) -> int:
        """The identifier of the process."""
        pid = self._process.pid
        assert pid is not None, "started"
        return pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the program has ended.

        Raises `subprocess.TimeoutExpired` after `timeout` seconds.
        """
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the program to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the program."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of standard output and of standard error once the program has ended.

        Raises `subprocess.TimeoutExpired` after `timeout` seconds; a later call goes on.
        """
        if not self._readers:
            self._readers = [Thread(target=self._read, args=(n,), daemon=True) for n in range(2)]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return self._texts[0], self._texts[1]

    def _read(self, number: int) -> None:
        with (self.stdout, self.stderr)[number] as stream:
            self._texts[number] = stream.read()


def start(
    script: str | Path, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | Path
) -> Program:
    """Start a Python script with arguments, a whole environment and a folder."""
    return Program(str(script), argv, env, cwd)


def run(
    script: str | Path,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | Path,
    timeout: float = LIMIT,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script as `subprocess.run` does, with its output as text.

    Raises `subprocess.TimeoutExpired` after `timeout` seconds, and ends the program.
    """
    program = start(script, argv, env=env, cwd=cwd)
    try:
        stdout, stderr = program.communicate(timeout)
    except BaseException:
        program.kill()
        program.communicate()
        raise
    return subprocess.CompletedProcess(program.args, program.wait(), stdout, stderr)


def _stream(end: Connection) -> TextIO:
    """Take over the readable end of a pipe."""
    file = open(os.dup(end.fileno()), encoding="utf-8")
    end.close()
    return file


def _live(
    script: str,
    argv: list[str],
    env: dict[str, str],
    cwd: str,
    stdout: Connection,
    stderr: Connection,
) -> None:
    """Run a script in this fork, whose standard input is empty already."""
    for number, end in ((1, stdout), (2, stderr)):
        os.dup2(end.fileno(), number)
        end.close()
    # The first buffers blocks and the second buffers lines, as for a program that writes to pipes.
    errors = sys.stdout.errors  # which depends on the locale
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors=errors, closefd=False)
    sys.stderr = sys.__stderr__ = open(
        2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [script, *argv]
    sys.path[:] = [str(Path(script).parent), *_search_path(env.get("PYTHONPATH", ""))]
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    # The server ignores interrupts, and a shell may have made pytest ignore more.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if (threads := env.get("OMP_NUM_THREADS", "")).isdecimal() and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _search_path(variable: str) -> list[str]:
    """Return what PYTHONPATH names, and what pytest finds without the folders of tests."""
    found = [place for place in sys.path if place and not _is_ours(Path(place))]
    return [place for place in variable.split(os.pathsep) if place] + found


def _is_ours(place: Path) -> bool:
    """Return whether a folder belongs to the repository, and not to an environment in it."""
    return place.is_relative_to(REPO) and not place.is_relative_to(sys.prefix)
