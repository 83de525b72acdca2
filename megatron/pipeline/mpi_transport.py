"""Moves messages between pipeline stages over MPI, and tells which came: AxoNN's Algorithm 2.

    expect          posts 2 receives of each kind --> arrived? --> receive: posts the next
    send            begun when computed, kept until MPI is through with it
                    both move on while the rank computes or waits elsewhere (`mpi_progress`)

torch.distributed does not do: gloo's receives do not tell that they are done until they are waited
for, so nobody could take up whichever message came first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

from megatron.errors import PeerError
from megatron.mpi_world import duplicate, has_cuda
from megatron.parallel.groups import Edges, ProcessGroups
from megatron.pipeline.mpi_progress import MessageMover, Transfer
from megatron.pipeline.mpi_staging import Parcel, Staging, staging_for
from megatron.pipeline.schedule import POSTED, Kind, Message
from megatron.pipeline.transport import NoTransport, agree_on_shape

if TYPE_CHECKING:
    from megatron.pipeline.transport import ArrivalTransport

TAGS = 32768
"""MPI allows at least as many (MPI_TAG_UB is 32767 or more)."""


class MPITransport:
    """An `ArrivalTransport` over a communicator of its own, whose ranks are those of the world.

    A tag is a microbatch's number and its kind, and wraps around: fewer messages of one kind are
    on their way at a time than there are tags, and those of one tag come in order.
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
        self._posted: dict[Kind, deque[tuple[Message, Transfer]]] = {k: deque() for k in Kind}
        self._sent: dict[Kind, deque[tuple[Message, Transfer]]] = {kind: deque() for kind in Kind}
        self._unanswered = 0

    @property
    def outstanding(self) -> int:
        """Sends and receives under way."""
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

    def settle(self) -> None:
        for kind, sent in self._sent.items():
            while sent:
                self._finish_oldest(kind)

    def close(self) -> None:
        """Give the communicator back, at an orderly end on all ranks. Collective."""
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

    def _begin(self, message: Message, way: str, peer: int, parcel: Parcel) -> Transfer:
        memory = parcel.buffer
        address = MPI.buffer.fromaddress(memory.data_ptr(), memory.nbytes)
        tag = message.microbatch % (self._tags // 2) * 2 + (message.kind is Kind.BACKWARD)
        issue = self._comm.Isend if way == "send" else self._comm.Irecv
        transfer = Transfer(
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
    """The transport of this rank's pipeline, for messages of `shape` and `dtype`; it waits for one
    at most so many `seconds`. Collective over the world, and one at a time in a process; raises
    `ConfigError` where ranks would send different shapes."""
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
        # A thread's device is the first one until it says otherwise.
        progress=MessageMover(prepare=partial(torch.cuda.set_device, device)) if on_cuda else None,
    )
