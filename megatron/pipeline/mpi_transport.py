"""Pipeline messages over MPI: the progress thread and the transport."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

from megatron.errors import PeerError
from megatron.launch import LONGEST_PAUSE, duplicate, has_cuda, poll
from megatron.parallel.groups import Edges, ProcessGroups
from megatron.pipeline.mpi_staging import MessageBuffer, Staging, staging_for
from megatron.pipeline.schedule import POSTED, Kind, Message
from megatron.pipeline.transport import NoTransport, agree_on_shape

if TYPE_CHECKING:
    from megatron.pipeline.transport import ArrivalTransport


_ABANDONED: list[MPITransfer] = []
"""Transfers that a failure left unfinished: MPI may use their memory until the process ends."""
CALLS = 16
"""Calls of MPI in a row before a thread pauses, for `LONGEST_PAUSE` at most.

A call may move one segment of a message: over TCP, UCX receives 64 KB in a call, so that 16 calls
per millisecond receive up to 8 Gbit/s, and one call 0.5. A call that finds nothing takes about a
microsecond.
"""


@dataclass(kw_only=True, eq=False)
class MPITransfer:
    """A send or receive, issued to MPI in order of `begin` among the transfers of its `line`.

    `place` is the position of the transfer in the order of completion.
    """

    line: Hashable
    parcel: MessageBuffer
    issue: Callable[[], MPI.Request]
    place: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether MPI has completed the transfer."""
        return self.place is not None


@dataclass
class _State:
    """The state that the progress thread shares with callers of `MessageMover`.

    `sweep` changes it under `lock`.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    some: threading.Event = field(default_factory=threading.Event)
    """Set if there may be transfers to poll."""
    unready: list[MPITransfer] = field(default_factory=list)
    issued: list[MPITransfer] = field(default_factory=list)
    requests: list[MPI.Request] = field(default_factory=list)
    ended: int = 0
    calls: int = CALLS
    error: Exception | None = None
    is_watched: bool = False
    is_closing: bool = False

    def sweep(self, *, calls: int) -> None:
        """Issue ready transfers, then poll issued ones up to `calls` times, under the lock.

        Raises `PeerError` if MPI reports an error; every later call raises the same error.
        """
        if self.error is not None:
            raise self.error
        try:
            self._issue()
            for _ in range(calls):
                if not self.requests:
                    break
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
    """The transfers of one rank; while open, it alone calls MPI in the process."""

    def __init__(
        self, *, with_thread: bool = True, prepare: Callable[[], None] = lambda: None
    ) -> None:
        """Start the thread, which first calls `prepare`, for example to choose its device."""
        self._state = _State()
        self._thread: threading.Thread | None = None
        if with_thread:
            self._thread = threading.Thread(
                target=_keep_moving, args=(self._state, prepare), name="mpi progress", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _end, self._state, self._thread)

    def set_calls(self, calls: int) -> None:
        """Let the thread and waits call MPI `calls` times before a pause, in place of `CALLS`."""
        self._state.calls = calls

    @property
    def outstanding(self) -> int:
        """Number of transfers that are not done."""
        return len(self._state.unready) + len(self._state.issued)

    def begin(self, transfer: MPITransfer) -> None:
        """Begin a transfer; returns at once."""
        state = self._state
        with state.lock:
            state.unready.append(transfer)
            state.sweep(calls=1)
        state.some.set()

    def look(self) -> None:
        """Poll all transfers. Raises `PeerError` if MPI reports an error."""
        state = self._state
        with state.lock:
            state.sweep(calls=state.calls)

    def wait(self, done: Callable[[], bool], *, seconds: float) -> bool:
        """Poll until `done()`, and return whether it became true within `seconds`.

        Raises `PeerError` if MPI reports an error.
        """
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
        """Stop the thread. Only a failure leaves transfers unfinished, which are not cancelled.

        MPI 4.0 deprecates cancelling a send, MPICH over UCX crashes on it, and a receive whose
        sender has begun cannot be cancelled.
        """
        state = self._state
        if self._thread is not None:
            _end(state, self._thread)
        _ABANDONED.extend(state.issued)
        state.unready.clear()
        state.requests.clear()
        state.issued.clear()


def _end(state: _State, thread: threading.Thread) -> None:
    state.is_closing = True
    state.some.set()
    if thread is not threading.current_thread():  # the garbage collector may run in the thread
        thread.join()


def _keep_moving(state: _State, prepare: Callable[[], None]) -> None:
    prepare()
    while state.some.wait():
        # Also checked after `clear`, which may run between the two lines of `_end`.
        if state.is_closing:
            return
        time.sleep(LONGEST_PAUSE)
        if state.is_watched:
            continue  # the main thread polls
        with state.lock:
            if not state.issued and not state.unready:
                state.some.clear()
                if state.is_closing:
                    return
                continue
            try:
                state.sweep(calls=state.calls)
            except Exception:
                return  # the next `sweep` raises the saved error


TAGS = 32768
"""Number of tags that every MPI allows (MPI_TAG_UB is 32767 or more)."""


class MPITransport:
    """An `ArrivalTransport` over its own MPI communicator, whose ranks are the ranks of the world.

    A tag is a microbatch's number and its kind, and wraps around: fewer messages of a kind are in
    flight than there are tags, and messages of one tag stay in order.
    """

    def __init__(
        self,
        edges: Edges,
        comm: MPI.Intracomm,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        staging: Staging,
        seconds: float,
        tags: int = TAGS,
        progress: MessageMover | None = None,
    ) -> None:
        self._incoming = {Kind.FORWARD: edges.activations_in, Kind.BACKWARD: edges.gradients_in}
        self._outgoing = {Kind.FORWARD: edges.activations_out, Kind.BACKWARD: edges.gradients_out}
        self._comm, self._staging = comm, staging
        self._shape, self._dtype = shape, dtype
        self._seconds, self._tags = seconds, tags
        self._progress = progress or MessageMover()
        self._expected: dict[Kind, deque[Message]] = {kind: deque() for kind in Kind}
        self._posted: dict[Kind, deque[tuple[Message, MPITransfer]]] = {k: deque() for k in Kind}
        self._sent: dict[Kind, deque[tuple[Message, MPITransfer]]] = {
            kind: deque() for kind in Kind
        }
        self._unanswered = 0

    @property
    def outstanding(self) -> int:
        """Number of sends and receives in progress."""
        return self._progress.outstanding

    def expect(self, messages: Sequence[Message], *, unanswered: int) -> None:
        for kind in Kind:
            assert not self._expected[kind] and not self._posted[kind], "the last batch is not over"
        for message in messages:
            self._expected[message.kind].append(message)
        self._unanswered = unanswered
        for kind in Kind:
            self._post(kind)

    def arrived(self, *, wait: bool) -> Sequence[Message]:
        self._progress.look()
        if wait and not self._here():
            assert any(self._posted.values()), "no message is expected that one could wait for"
            if not self._progress.wait(lambda: bool(self._here()), seconds=self._seconds):
                heads = [posted[0][0] for posted in self._posted.values() if posted]
                missing = " and ".join(f"{self._sender(m)} did not send {m}" for m in heads)
                raise PeerError(f"{missing} over MPI within {self._seconds:g} s")
        return self._here()

    def receive(self, message: Message) -> torch.Tensor:
        posted, transfer = self._posted[message.kind].popleft()
        assert posted == message, f"{posted} comes first of its kind, {message} is asked for"
        self._post(message.kind)
        if not self._progress.wait(lambda: transfer.is_done, seconds=self._seconds):
            raise PeerError(
                f"{self._sender(message)} did not send {message} over MPI within "
                f"{self._seconds:g} s"
            )
        return transfer.parcel.take()

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        assert tensor.shape == self._shape and tensor.dtype == self._dtype, "as was agreed on"
        edge, sent = self._outgoing[message.kind], self._sent[message.kind]
        edge.calls.note(str(message), tensor)
        edge.traffic.add(tensor.nbytes)
        parcel = self._staging.outgoing(tensor.contiguous())
        sent.append((message, self._begin(message, "send", edge.ranks[1], parcel)))
        while sent and (sent[0][1].is_done or len(sent) > max(1, self._unanswered)):
            self._finish_oldest(message.kind)

    def wait_for_sends(self) -> None:
        for kind, sent in self._sent.items():
            while sent:
                self._finish_oldest(kind)

    def close(self) -> None:
        """Stop the progress thread and free the communicator, after `settle`. Collective."""
        self._progress.close()
        self._comm.Free()

    def _post(self, kind: Kind) -> None:
        expected, posted, edge = self._expected[kind], self._posted[kind], self._incoming[kind]
        while expected and len(posted) < POSTED:
            message = expected.popleft()
            parcel = self._staging.incoming(self._shape, self._dtype)
            edge.calls.note(str(message), parcel.buffer)
            transfer = self._begin(message, "receive", edge.ranks[0], parcel)
            posted.append((message, transfer))

    def _begin(self, message: Message, way: str, peer: int, parcel: MessageBuffer) -> MPITransfer:
        memory = parcel.buffer
        address = MPI.buffer.fromaddress(memory.data_ptr(), memory.nbytes)
        tag = message.microbatch % (self._tags // 2) * 2 + (message.kind is Kind.BACKWARD)
        issue = self._comm.Isend if way == "send" else self._comm.Irecv
        transfer = MPITransfer(
            line=(way, message.kind),
            parcel=parcel,
            issue=partial(issue, [address, MPI.BYTE], peer, tag),
        )
        self._progress.begin(transfer)
        return transfer

    def _here(self) -> list[Message]:
        heads = [posted[0] for posted in self._posted.values() if posted]
        came = [(transfer.place, head) for head, transfer in heads if transfer.place is not None]
        return [message for _, message in sorted(came, key=lambda each: each[0])]

    def _finish_oldest(self, kind: Kind) -> None:
        message, transfer = self._sent[kind][0]
        if not self._progress.wait(lambda: transfer.is_done, seconds=self._seconds):
            raise PeerError(
                f"rank {self._outgoing[kind].ranks[1]} did not take {message} over MPI within "
                f"{self._seconds:g} s"
            )
        self._sent[kind].popleft()

    def _sender(self, message: Message) -> str:
        return f"rank {self._incoming[message.kind].ranks[0]}"


def open_mpi_transport(
    groups: ProcessGroups,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    tags: int = TAGS,
) -> ArrivalTransport | NoTransport:
    """Return the transport of this rank's pipeline for messages of `shape` and `dtype`.

    Collective over the world; at most one transport may be open per process. A wait for a message
    times out after `seconds`. Raises `ConfigError` if ranks would send different shapes or dtypes.
    """
    if groups.edges is None:
        return NoTransport()
    world = MPI.COMM_WORLD
    assert (world.rank, world.size) == (groups.world.rank, groups.world.size), "checked at start"
    agree_on_shape(groups.pp, f"{list(shape)} {dtype}")
    on_cuda = device.type == "cuda"
    return MPITransport(
        groups.edges,
        duplicate(world, seconds=seconds),
        shape=shape,
        dtype=dtype,
        staging=staging_for(device, mpi_has_cuda=on_cuda and has_cuda()),
        seconds=seconds,
        tags=tags,
        # A new thread's current device is device 0.
        progress=MessageMover(prepare=partial(torch.cuda.set_device, device)) if on_cuda else None,
    )
