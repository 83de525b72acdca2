"""A thread that ends a rank which no longer makes progress, and a C++ terminate handler.

The handler exits with code 6 where gloo would abort the process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from megatron.errors import PeerError
from megatron.fault_tolerance.flight_recorder import write_dump
from megatron.fault_tolerance.heartbeat import FOLDER, Heartbeat, RankStatus, is_gone, sightings
from megatron.fault_tolerance.root_cause import RootCause, gone_text
from megatron.status import STATUS, Status


def before_abort(tell: Callable[[], object]) -> None:
    """Call `tell` before C++ ends this process, and end the process with exit code 6.

    The handler stays installed for the rest of the process. Does nothing without GNU's C++ library.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        libc = ctypes.CDLL(None)
    except (OSError, AttributeError):
        return
    function = ctypes.CFUNCTYPE(None)
    # The previous handler prints the exception and raises SIGABRT, whose number is, by luck, the
    # exit code that _exit must be called with.
    assert PeerError.exit_code == signal.SIGABRT

    def terminate() -> None:
        libc.signal(signal.SIGABRT, ctypes.cast(libc._exit, ctypes.c_void_p))
        try:
            tell()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        before()

    handler = function(terminate)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
    set_terminate.argtypes, set_terminate.restype = [function], function
    before = set_terminate(handler)


TICK = 0.5
SLACK = 3.5
"""Seconds in addition to the collectives' timeout, so that waiting ranks report first."""
GRACE = 2.0
"""Seconds in which the main thread may leave by itself once a failure is known."""
LEAVING_SECONDS = 9.0
"""Seconds that the main thread may spend in phase "leaving"."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
_MAY_TAKE_LONG = ("start", "save", "done")


class Watchdog(threading.Thread):
    """The watchdog of one rank.

    `limit` is the number of seconds that a phase may take. Call `watch` on the main thread, which
    receives the signals.
    """

    def __init__(self, heartbeat: Heartbeat, causes: RootCause, *, limit: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._heartbeat, self._causes, self._limit = heartbeat, causes, limit
        self._ended = threading.Event()
        self._continued = 0.0
        """Time at which a suspended process was found to run again."""
        self._interrupts = 0
        self._known_since: float | None = None
        self._status_seen: tuple[int, int] | None = None
        self._neighbour: RankStatus | None = None
        self._signals, self._wakeup = socket.socketpair()
        self._signals.setblocking(False)
        self._wakeup.setblocking(False)

    def watch(self) -> Callable[[], None]:
        """Start the thread, and return a function that stops it."""
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self.start()
        timer = threading.Thread(target=self._arm_timer, name="watchdog timer", daemon=True)
        timer.start()

        def end() -> None:
            self._ended.set()
            signal.set_wakeup_fd(before)
            with suppress(OSError):
                self._wakeup.send(b"\0")
            self.join()
            timer.join()
            self._signals.close()
            self._wakeup.close()

        return end

    def run(self) -> None:
        """Check signals, the main thread, status.json and the next rank every `TICK` seconds."""
        last = time.monotonic()
        # Unlike `select.select`, it takes descriptors from 1024 on, which many connections lead to.
        signals = select.poll()
        signals.register(self._signals, select.POLLIN)
        while not self._ended.is_set():
            if self._causes.world_size == 1 and time.monotonic() - last > SLACK:
                self._continued = time.monotonic()
            last = time.monotonic()
            self._heartbeat.alive()
            self._look_at_interrupts()
            self._look_at_main_thread()
            self._look_at_status()
            self._look_at_neighbour()
            signals.poll(1000 * TICK)

    def _arm_timer(self) -> None:
        """Set the timer of faulthandler again and again, unless the main thread hangs.

        The timer runs in C and ends the process even if the interpreter runs no thread any more, or
        if the watchdog itself waits for a disk. This thread uses no disk, so that a slow one does
        not end a rank whose main thread makes progress.
        """
        # The timer goes on while a process is suspended, which a rank without peers may be.
        if self._causes.world_size == 1:
            return
        while True:
            if not self._is_late(*self._phase_and_seconds()):
                faulthandler.dump_traceback_later(self._limit + 2 * SLACK, exit=True)
            if self._ended.wait(TICK):
                break
        faulthandler.cancel_dump_traceback_later()

    def _phase_and_seconds(self) -> tuple[str, float]:
        """Return the phase of the main thread, and for how long it has run in this phase."""
        phase = self._heartbeat.phase
        return phase, min(self._heartbeat.seconds(), time.monotonic() - self._continued)

    def _is_late(self, phase: str, seconds: float) -> bool:
        """Return whether the main thread may not be in this phase for so long."""
        if phase in _MAY_TAKE_LONG:
            return False
        return seconds > (LEAVING_SECONDS if phase == "leaving" else self._limit + SLACK)

    def _look_at_interrupts(self) -> None:
        with suppress(BlockingIOError):
            self._interrupts += self._signals.recv(4096).count(signal.SIGINT)
        if self._interrupts > 1:
            status = self._mine("interrupted twice: left at once, nothing was saved")
            self._causes.tell(replace(status, exit_code=EXIT_INTERRUPTED))
            os._exit(EXIT_INTERRUPTED)

    def _look_at_main_thread(self) -> None:
        phase, seconds = self._phase_and_seconds()
        if not self._is_late(phase, seconds):
            return
        if phase == "leaving":
            self._end()
        mine = self._mine(
            f"hangs: in this phase for {seconds:.0f} s{self._heartbeat.last_call}, its stacks are "
            "on stderr; if that is how long it takes, raise --distributed-timeout-minutes"
        )
        self._causes.tell(self._causes.parted() or mine)
        self._end()

    def _look_at_status(self) -> None:
        with suppress(OSError):
            stat = (self._causes.run_dir / STATUS).stat()
            if (stat.st_mtime_ns, stat.st_ino) != self._status_seen:
                self._status_seen = (stat.st_mtime_ns, stat.st_ino)
                if self._causes.known() is not None and self._known_since is None:
                    self._known_since = time.monotonic()
        if self._known_since is not None and time.monotonic() - self._known_since > GRACE:
            if self._heartbeat.phase not in ("leaving", "done"):
                self._end()

    def _look_at_neighbour(self) -> None:
        if self._causes.world_size == 1 or self._heartbeat.phase in ("leaving", "done"):
            return
        if self._neighbour is None:
            rank = (self._causes.rank + 1) % self._causes.world_size
            folder = self._causes.run_dir / FOLDER
            seen = sightings(folder, attempt=self._causes.attempt, ranks=[rank])
            # A process in another container may not be visible, and is then not judged.
            self._neighbour = seen[0] if seen and not is_gone(seen[0]) else None
        elif is_gone(self._neighbour) and self._causes.known() is None:
            folder = self._causes.run_dir / FOLDER
            for last in sightings(
                folder, attempt=self._causes.attempt, ranks=[self._neighbour.rank]
            ):
                if last.phase not in ("leaving", "done"):
                    here = f"seen by rank {self._causes.rank} in {self._heartbeat.phase}"
                    gone = self._causes.of(last, gone_text(last, here), lost=True)
                    self._causes.tell(self._causes.parted() or gone)

    def _mine(self, reason: str) -> Status:
        return Status(
            state="failed",
            exit_code=PeerError.exit_code,
            reason=reason,
            rank=self._causes.rank,
            node=self._causes.node_of(self._causes.rank),
            iteration=self._heartbeat.step,
            phase=self._heartbeat.phase,
        )

    def _end(self) -> None:
        code = PeerError.exit_code
        if self._heartbeat.phase == "leaving":
            known = self._causes.known()
            if known is not None and known.rank == self._causes.rank and known.exit_code:
                code = known.exit_code  # of the error that this rank reported
        else:
            print(
                f"rank {self._causes.rank}: stacks at step {self._heartbeat.step}, "
                f"{self._heartbeat.phase}:",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            write_dump(self._causes.run_dir, self._causes.rank)
        os._exit(code)
