"""Keeps MPI's transfers moving, whatever its rank does.

MPI moves a large message only while both ends call the library. A rank that computes, or waits for
a peer in one of torch's collectives, does not; the peer may need that very message to get there. So
a thread asks about what is under way, about every millisecond and only while something is.

    begin --> waits until its memory is ready --> with MPI --> done (a receive: arrived as n-th)
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from mpi4py import MPI

from megatron.errors import PeerError
from megatron.mpi_world import LONGEST_PAUSE, poll
from megatron.pipeline.mpi_staging import Parcel

_CLOSING_SECONDS = 0.5


@dataclass(kw_only=True, eq=False)
class Transfer:
    """A message on its way. `line`: those of one line are handed to MPI in the order in which they
    were begun, by `issue`. `place`: that of its end among all that ended."""

    line: Hashable
    parcel: Parcel
    issue: Callable[[], MPI.Request]
    place: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether MPI is through with it."""
        return self.place is not None


@dataclass
class _State:
    """What the thread shares with those who begin transfers, under one lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    some: threading.Event = field(default_factory=threading.Event)
    """Whether there may be anything to ask about."""
    unready: list[Transfer] = field(default_factory=list)
    issued: list[Transfer] = field(default_factory=list)
    requests: list[MPI.Request] = field(default_factory=list)
    ended: int = 0
    error: Exception | None = None
    is_watched: bool = False
    is_closing: bool = False

    def sweep(self) -> None:
        """Hand MPI what is ready, and see what ended. Under the lock."""
        if self.error is not None:
            raise self.error
        try:
            self._issue()
            if self.requests:
                self._see(MPI.Request.Testsome(self.requests) or [])
        except MPI.Exception as error:
            self.error = PeerError(f"MPI: {' '.join(str(error).split())}")
            raise self.error from None
        except Exception as error:
            self.error = error
            raise

    def _issue(self) -> None:
        held: set[Hashable] = set()
        for transfer in list(self.unready):
            if transfer.line in held or not transfer.parcel.ready():
                held.add(transfer.line)
                continue
            self.requests.append(transfer.issue())
            self.issued.append(transfer)
            self.unready.remove(transfer)

    def _see(self, ended: list[int]) -> None:
        for index in sorted(ended):
            transfer = self.issued[index]
            transfer.parcel.landed()
            transfer.place = self.ended
            self.ended += 1
        for index in sorted(ended, reverse=True):
            del self.issued[index], self.requests[index]


class MessageMover:
    """The transfers of one rank; the only one in its process that calls MPI while it is open."""

    def __init__(
        self, *, with_thread: bool = True, prepare: Callable[[], None] = lambda: None
    ) -> None:
        """`prepare`: called first by the thread, such as to choose its device."""
        self._state = _State()
        self._thread: threading.Thread | None = None
        if with_thread:
            self._thread = threading.Thread(
                target=_keep_moving, args=(self._state, prepare), name="mpi progress", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _end, self._state, self._thread)

    @property
    def outstanding(self) -> int:
        """Transfers begun and not done."""
        return len(self._state.unready) + len(self._state.issued)

    def begin(self, transfer: Transfer) -> None:
        """Have a message move; returns at once."""
        state = self._state
        with state.lock:
            state.unready.append(transfer)
            state.sweep()
        state.some.set()

    def look(self) -> None:
        """See what happened meanwhile. Raises `PeerError` where MPI says that a peer is lost."""
        with self._state.lock:
            self._state.sweep()

    def wait(self, done: Callable[[], bool], *, seconds: float) -> bool:
        """Look until `done`; False if that is not so after `seconds`."""
        if done():
            return True

        def looked() -> bool:
            self.look()
            return done()

        self._state.is_watched = True
        try:
            return poll(looked, seconds=seconds)
        finally:
            self._state.is_watched = False

    def close(self) -> None:
        """End the thread, and cancel what is under way: nothing is, after an orderly end."""
        state = self._state
        if self._thread is not None:
            _end(state, self._thread)
        state.unready.clear()
        for request in state.requests:
            request.Cancel()
        poll(lambda: MPI.Request.Testall(state.requests), seconds=_CLOSING_SECONDS)
        state.requests.clear()
        state.issued.clear()


def _end(state: _State, thread: threading.Thread) -> None:
    state.is_closing = True
    state.some.set()
    if thread is not threading.current_thread():  # which the garbage collector may run in
        thread.join()


def _keep_moving(state: _State, prepare: Callable[[], None]) -> None:
    prepare()
    while state.some.wait():
        # Asked after `clear` too, which may come between the two lines of `_end`.
        if state.is_closing:
            return
        time.sleep(LONGEST_PAUSE)
        if state.is_watched:
            continue  # the main thread asks by itself
        with state.lock:
            if not state.issued and not state.unready:
                state.some.clear()
                if state.is_closing:
                    return
                continue
            try:
                state.sweep()
            except Exception:
                return  # kept; whoever looks next raises it
