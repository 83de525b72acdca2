"""Tests of when MPI may touch memory, with streams that a test advances by hand."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.pipeline import mpi_transport
from megatron.pipeline.mpi_staging import (
    DirectStaging,
    HostStaging,
    MessageBuffer,
    PinnedStaging,
    staging_for,
)
from megatron.pipeline.mpi_transport import MessageMover, MPITransfer

HERE = torch.device("cpu")


@dataclass
class Place:
    """An event that a test triggers."""

    happened: bool = False

    def query(self) -> bool:
        return self.happened


@dataclass
class ByHand:
    """Streams whose copies are made on request and are done when a test says so."""

    marks: list[Place] = field(default_factory=list)
    copies: list[Place] = field(default_factory=list)
    used: list[tuple[torch.Tensor, object]] = field(default_factory=list)

    def mark(self) -> Place:
        self.marks.append(Place())
        return self.marks[-1]

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Place]:
        return self.to_device(tensor)

    def to_device(self, pinned: torch.Tensor) -> tuple[torch.Tensor, Place]:
        self.copies.append(Place())
        return pinned.clone(), self.copies[-1]

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def use(self, tensor: torch.Tensor, copied: object) -> None:
        self.used.append((tensor, copied))


def write(parcel: MessageBuffer, number: float) -> None:
    """Write a message into a buffer, as MPI does."""
    parcel.buffer.fill_(number)
    parcel.landed()


def test_host_memory_is_ready_at_once_and_is_the_tensor() -> None:
    staging, sent = staging_for(HERE, mpi_has_cuda=False), torch.ones(3)
    assert isinstance(staging, HostStaging)
    out = staging.outgoing(sent)
    assert out.ready() and out.buffer is sent
    came = staging.incoming((3,), torch.bfloat16)
    assert came.ready() and came.buffer.dtype == torch.bfloat16
    write(came, 2)
    assert came.take() is came.buffer


def test_a_device_that_mpi_knows_is_touched_when_its_stream_is_there() -> None:
    """A receive waits too: until then the memory may belong to another tensor."""
    streams = ByHand()
    staging, sent = DirectStaging(streams, HERE), torch.ones(3)
    out, came = staging.outgoing(sent), staging.incoming((3,), torch.float32)
    assert out.buffer is sent and not out.ready() and not came.ready()
    streams.marks[0].happened = True
    assert out.ready() and not came.ready()
    streams.marks[1].happened = True
    assert came.ready()
    write(came, 2)
    assert came.take() is came.buffer and not streams.copies


def test_a_send_from_a_device_waits_for_its_copy_in_host_memory() -> None:
    streams, sent = ByHand(), torch.ones(3)
    out = PinnedStaging(streams).outgoing(sent)
    assert out.buffer is not sent and torch.equal(out.buffer, sent)
    assert not out.ready()
    streams.copies[0].happened = True
    assert out.ready()


def test_a_receive_goes_back_to_the_device_when_it_came() -> None:
    """The copy begins on arrival; the compute stream waits for it when it takes the tensor."""
    streams = ByHand()
    came = PinnedStaging(streams).incoming((3,), torch.float32)
    assert came.ready() and not streams.copies
    write(came, 5)
    assert len(streams.copies) == 1 and not streams.used
    taken = came.take()
    assert taken is not came.buffer and taken.tolist() == [5, 5, 5]
    ((used, copied),) = streams.used
    assert used is taken and copied is streams.copies[0]


class PlayedRequests:
    """MPI's calls on requests, each of which is done after a number of calls; none is cancelled."""

    def __init__(self, *calls: int) -> None:
        self.left = list(calls)

    def Testsome(self, requests: list[int]) -> list[int]:
        for request in requests:
            self.left[request] -= 1
        return [place for place, request in enumerate(requests) if not self.left[request]]

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> tuple[MessageMover, list[MPITransfer]]:
        played = SimpleNamespace(Request=self, Exception=OSError)
        monkeypatch.setattr(mpi_transport, "MPI", played)
        mover, numbers = MessageMover(with_thread=False), range(len(self.left))
        issues: list[Any] = [lambda number=number: number for number in numbers]
        transfers = [
            MPITransfer(line=n, parcel=MessageBuffer(buffer=torch.ones(1)), issue=issues[n])
            for n in numbers
        ]
        for transfer in transfers:
            mover.begin(transfer)
        return mover, transfers


def test_a_look_moves_several_segments_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI may move one segment in a call; with a pause after each, links would idle."""
    requests = PlayedRequests(10, 10_000)
    mover, transfers = requests.begin(monkeypatch)
    assert not any(transfer.is_done for transfer in transfers), "to begin takes no time"
    mover.look()
    assert [transfer.is_done for transfer in transfers] == [True, False]
    assert requests.left[1] == 10_000 - 1 - mpi_transport.CALLS
    mover.set_calls(3)
    mover.look()
    assert requests.left[1] == 10_000 - 4 - mpi_transport.CALLS


def test_memory_of_what_a_failure_left_unfinished_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cancelled, so that MPI may still read or write it."""
    mover, transfers = PlayedRequests(1, 10_000).begin(monkeypatch)
    done, unfinished = (weakref.ref(transfer.parcel.buffer) for transfer in transfers)
    mover.close()
    assert mover.outstanding == 0
    del mover, transfers
    gc.collect()
    assert done() is None and unfinished() is not None
