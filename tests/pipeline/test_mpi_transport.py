"""Tests of messages over MPI: order, delay, number of bytes, and failures."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.errors import ConfigError, PeerError
from megatron.launch import poll
from megatron.parallel.groups import ProcessGroups
from megatron.pipeline.schedule import Kind, Message
from megatron.pipeline.transport import NoTransport
from tests.limits import LIMIT
from tests.ranks import Ranks, grid

pytestmark = pytest.mark.push

LARGE = 1 << 20
"""Floats of a message that MPI hands over only while both ends call MPI."""
SECONDS = LIMIT / 2
"""Seconds that a rank waits, less than `Ranks` waits for the rank."""


def forward(microbatch: int) -> Message:
    return Message(Kind.FORWARD, microbatch, 0)


def backward(microbatch: int) -> Message:
    return Message(Kind.BACKWARD, microbatch, 0)


def transport_on(groups: ProcessGroups, *, size: int = 4, **more: Any):
    """Return the transport of this rank in a pipeline of all ranks."""
    from megatron.pipeline.mpi_transport import MPITransport, open_mpi_transport

    pipeline = grid(groups, pp=groups.world.size)
    made = open_mpi_transport(
        pipeline,
        shape=(size,),
        dtype=torch.float32,
        device=torch.device("cpu"),
        seconds=SECONDS,
        **more,
    )
    assert isinstance(made, MPITransport)
    return made


def filled(number: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(number))


def comes_within(transport: Any, message: Message, seconds: float = SECONDS) -> bool:
    """Return whether a message arrives in time, as a message-driven stage sees it."""
    return poll(lambda: message in transport.arrived(wait=False), seconds=seconds)


def either_kind_first(groups: ProcessGroups) -> Any:
    """Let the second of four stages receive a gradient first, then an activation."""
    transport, rank = transport_on(groups), groups.world.rank
    if rank == 1:
        up, down = Message(Kind.FORWARD, 0, 0), Message(Kind.BACKWARD, 0, 1)
        transport.expect([up, down], unanswered=3)
        before = list(transport.arrived(wait=False))
        groups.world.barrier()
        first = list(transport.arrived(wait=True))
        groups.world.barrier()
        assert comes_within(transport, up), "sent by now"
        both = list(transport.arrived(wait=True))
        values = [float(transport.receive(message)[0]) for message in reversed(both)]
        after = list(transport.arrived(wait=False))
        result = (before, first, both, values, after, transport.outstanding)
        assert result == ([], [down], [down, up], [10.0, 20.0], [], 0)
    else:
        transport.expect([], unanswered=3)
        groups.world.barrier()
        if rank == 2:
            transport.send(Message(Kind.BACKWARD, 0, 1), filled(20))
        groups.world.barrier()
        if rank == 0:
            transport.send(forward(0), filled(10))
    transport.wait_for_sends()
    outstanding = transport.outstanding
    transport.close()
    return outstanding


def test_the_kind_that_comes_first_is_the_first_that_arrived(mpi_ranks: Ranks) -> None:
    assert mpi_ranks.run(4, either_kind_first) == [0, 0, 0, 0]


def echo(groups: ProcessGroups, count: int, tags: int) -> Any:
    """Send activations that rank 1 answers: two batches, with an evaluation in between."""
    transport, rank = transport_on(groups, size=8, tags=tags), groups.world.rank
    pipeline = grid(groups, pp=2)
    pipeline.pp.traffic.take()
    assert pipeline.edges is not None
    edge = pipeline.edges.activations_out if rank == 0 else pipeline.edges.activations_in
    noted = edge.calls.count
    got: list[list[float]] = []
    for answered in (True, False, True):
        kind = Kind.BACKWARD if rank == 0 else Kind.FORWARD
        expected = [Message(kind, n, 0) for n in range(count) if rank or answered]
        transport.expect(expected, unanswered=count)
        if rank == 0:
            for number in range(count):
                transport.send(forward(number), filled(number, 8))
        values = []
        for message in expected:
            tensor = transport.receive(message)
            values.append(float(tensor.mean()))
            if rank and answered:
                transport.send(backward(message.microbatch), -tensor)
        transport.wait_for_sends()
        assert transport.outstanding == 0
        got.append(values)
    transport.close()
    return got, pipeline.pp.traffic.take(), edge.calls.count - noted


@pytest.mark.parametrize(("count", "tags"), [(12, 32768), (60, 4)])
def test_messages_of_a_kind_come_in_order_though_tags_wrap(
    mpi_ranks: Ranks, count: int, tags: int
) -> None:
    first, last = mpi_ranks.run(2, echo, count, tags)
    numbers = [float(number) for number in range(count)]
    answers = [-number for number in numbers]
    # 32 bytes each; 3 batches up and 2 down.
    assert first == ([answers, [], answers], 3 * count * 32, 3 * count)
    assert last == ([numbers, numbers, numbers], 2 * count * 32, 3 * count)


def while_in_a_collective(groups: ProcessGroups, in_collective: str) -> bool:
    """Let one end of a large message wait in a collective for the other end.

    The other end waits for the message first. The MPI library decides which ends must call it to
    hand the message over.
    """
    transport, sends = transport_on(groups, size=LARGE), groups.world.rank == 1
    right = True
    transport.expect([] if sends else [backward(0)], unanswered=2)
    groups.world.barrier()
    if sends:
        transport.send(backward(0), filled(7, LARGE))
    if (in_collective == "sender") == sends:
        right = transport.outstanding == 1  # not done before it has begun
        dist.all_reduce(torch.zeros(1))
    time.sleep(0.05)
    if sends:
        transport.wait_for_sends()
    else:
        right = right and bool((transport.receive(backward(0)) == 7).all())
    if (in_collective == "sender") != sends:
        dist.all_reduce(torch.zeros(1))
    transport.close()
    return right


@pytest.mark.parametrize("in_collective", ["sender", "receiver"])
def test_a_rank_in_a_collective_holds_up_nobody(mpi_ranks: Ranks, in_collective: str) -> None:
    assert mpi_ranks.run(2, while_in_a_collective, in_collective) == [True, True]


def while_both_compute(groups: ProcessGroups) -> bool:
    """Return whether a large message arrives while both ranks only compute."""
    transport = transport_on(groups, size=LARGE)
    rank = groups.world.rank
    transport.expect([forward(0)] if rank else [], unanswered=2)
    groups.world.barrier()
    if rank == 0:
        transport.send(forward(0), filled(3, LARGE))
    work, until = torch.ones(64, 64), time.monotonic() + SECONDS
    while time.monotonic() < until and transport.outstanding:
        work = work @ work * 0.01
    moved = transport.outstanding == 0  # only the thread has called MPI
    if rank:
        transport.receive(forward(0))
    transport.wait_for_sends()
    transport.close()
    return moved


def test_a_message_moves_while_both_compute(mpi_ranks: Ranks) -> None:
    assert mpi_ranks.run(2, while_both_compute) == [True, True]


def never_sent(groups: ProcessGroups) -> Any:
    transport = transport_on(groups, size=LARGE)
    transport._seconds = 0.3
    said: list[str] = []
    if groups.world.rank == 0:
        transport.expect([backward(3), backward(4)], unanswered=1)
        for waiting in (
            lambda: transport.arrived(wait=True),
            lambda: transport.receive(backward(3)),
        ):
            with pytest.raises(PeerError) as error:
                waiting()
            said.append(str(error.value))
        transport.send(forward(5), filled(0, LARGE))
        with pytest.raises(PeerError) as error:
            transport.wait_for_sends()
        said.append(str(error.value))
    groups.world.barrier()
    transport._progress.close()
    return said


def test_what_does_not_come_is_named_with_its_rank(mpi_ranks: Ranks) -> None:
    """Ranks also close with a send and receives under way."""
    assert mpi_ranks.run(2, never_sent)[0] == [
        "rank 1 did not send gradient 3.0 over MPI within 0.3 s",
        "rank 1 did not send gradient 3.0 over MPI within 0.3 s",
        "rank 1 did not take activation 5.0 over MPI within 0.3 s",
    ]


def sends_are_bounded(groups: ProcessGroups) -> tuple[int, int]:
    """Return the number of sends that rank 0 may have under way while rank 1 is slow."""
    transport, most = transport_on(groups, size=LARGE), 0
    messages = [forward(number) for number in range(8)]
    transport.expect(messages if groups.world.rank else [], unanswered=2)
    for message in messages:
        if groups.world.rank == 0:
            transport.send(message, filled(message.microbatch, LARGE))
            most = max(most, transport.outstanding)
        else:
            assert transport.receive(message)[-1] == message.microbatch
    transport.wait_for_sends()
    transport.close()
    return most, transport.outstanding


def test_no_more_is_kept_than_may_be_unanswered(mpi_ranks: Ranks) -> None:
    (most, left), (_, left_there) = mpi_ranks.run(2, sends_are_bounded)
    assert 1 <= most <= 2 and (left, left_there) == (0, 0)


def other_shapes(groups: ProcessGroups) -> None:
    with pytest.raises(ConfigError, match="rank 1 sends activations of"):
        transport_on(groups, size=4 + groups.world.rank)


def test_ranks_that_would_send_other_shapes_are_refused(mpi_ranks: Ranks) -> None:
    mpi_ranks.run(2, other_shapes)


def in_lines(groups: ProcessGroups) -> Any:
    """Send over the separate line of each of two tensor-parallel ranks of a stage."""
    from megatron.pipeline.mpi_transport import open_mpi_transport

    cut = grid(groups, tp=2, pp=2)
    transport = open_mpi_transport(
        cut, shape=(2,), dtype=torch.bfloat16, device=torch.device("cpu"), seconds=SECONDS
    )
    assert not isinstance(transport, NoTransport)
    got = None
    if cut.pp.rank == 0:
        transport.expect([], unanswered=2)
        transport.send(forward(0), torch.full((2,), groups.world.rank, dtype=torch.bfloat16))
    else:
        transport.expect([forward(0)], unanswered=2)
        got = transport.receive(forward(0)).tolist()
    transport.wait_for_sends()
    transport.close()
    return got


def test_tensor_parallel_ranks_have_lines_of_their_own(mpi_ranks: Ranks) -> None:
    assert mpi_ranks.run(4, in_lines) == [None, None, [0, 0], [1, 1]]


def late_memory(groups: ProcessGroups) -> Any:
    """Hold a message and its successors back until its memory is ready; the thread sends."""
    from megatron.pipeline.mpi_staging import HostStaging, MessageBuffer
    from megatron.pipeline.mpi_transport import MPITransport

    transport, rank = transport_on(groups), groups.world.rank
    assert isinstance(transport, MPITransport)
    ready = {0.0: False, 1.0: True}

    class Late(HostStaging):
        def outgoing(self, tensor: torch.Tensor) -> MessageBuffer:
            return MessageBuffer(buffer=tensor, ready=lambda: ready[float(tensor[0])])

    messages = [forward(0), forward(1)]
    transport.expect(messages if rank else [], unanswered=2)
    early: list[Message] = []
    if rank == 0:
        transport._staging = Late()
        for message in messages:
            transport.send(message, filled(message.microbatch))
        groups.world.barrier()
        groups.world.barrier()
        ready[0.0] = True
        sent = poll(lambda: not transport.outstanding, seconds=SECONDS)
        assert sent, "by the thread: nothing else has looked"
    else:
        groups.world.barrier()
        comes_within(transport, forward(0), 0.05)
        early = list(transport.arrived(wait=False))
        groups.world.barrier()
        for message in messages:
            assert transport.receive(message)[0] == message.microbatch
    transport.wait_for_sends()
    transport.close()
    return early


def test_a_message_waits_for_its_memory_and_not_its_rank(mpi_ranks: Ranks) -> None:
    assert mpi_ranks.run(2, late_memory) == [[], []]


def broken_memory(groups: ProcessGroups) -> Any:
    """Check that an error in the thread is raised where its rank looks next."""
    from megatron.pipeline.mpi_staging import HostStaging, MessageBuffer
    from megatron.pipeline.mpi_transport import MPITransport

    transport = transport_on(groups)
    assert isinstance(transport, MPITransport)
    asked: list[None] = []

    def ready() -> bool:
        asked.append(None)
        if len(asked) > 1:
            raise RuntimeError("the device is gone")
        return False

    class Broken(HostStaging):
        def outgoing(self, tensor: torch.Tensor) -> MessageBuffer:
            return MessageBuffer(buffer=tensor, ready=ready)

    transport._staging = Broken()
    transport.expect([], unanswered=1)
    if groups.world.rank == 0:
        transport.send(forward(0), filled(0))
        assert poll(lambda: len(asked) > 1, seconds=SECONDS), "by the thread"
        with pytest.raises(RuntimeError, match="the device is gone"):
            transport.wait_for_sends()
    groups.world.barrier()
    transport.close()


def test_the_threads_failure_is_its_ranks(mpi_ranks: Ranks) -> None:
    mpi_ranks.run(2, broken_memory)
