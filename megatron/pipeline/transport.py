"""Moves activations and gradients between pipeline stages. Knows neither order nor model.

        expect        receive(i)                receive(i + 1)
    post i, i + 1 --> wait for i, post i + 2 --> ...            while the rank computes
    send: begun, kept until done, never waited for before it must be

With NCCL a receive is posted only when its message is needed. Its kernel occupies the device until
the sender is there, and whatever waits for the device waits with it: what is issued later to the
same hardware queue, the first launch of a kernel, an allocation that frees memory. Two ranks that
post receives ahead could so keep each other from ever sending. The memory of a receive is taken
before the send that precedes the receive, because the send's kernel occupies the device too.
1F1B then gets through wherever a rank waits for its device. The interleaved schedule gets through
where all kernels but those of the first passes are loaded at the start; an allocation that has to
free memory first may stop the interleaved schedule for good (`tests/pipeline/test_queues.py` plays
all of these). Sends still overlap with computing.

torch.distributed's `batch_isend_irecv` does not do: it pairs what both sides issue together, and
stages do not keep in step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.parallel.groups import Edges, Group, ProcessGroups
from megatron.pipeline.schedule import POSTED, Kind, Message

_MICROBATCHES = 1 << 20


class Transport(Protocol):
    """Carries the messages of one step or evaluation batch after another."""

    def expect(self, messages: Sequence[Message], *, unanswered: int) -> None:
        """These are the next messages for this rank, in the order in which it will need them;
        posts the first if it posts ahead. `unanswered`: sends that this rank may have under way in
        each direction without waiting for the oldest."""
        ...

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for the next message; the tensor is the caller's."""
        ...

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Begin to send; nobody may write to the tensor any more. Returns at once."""
        ...

    def settle(self) -> None:
        """Wait until all that was sent is out of this rank's hands."""
        ...

    def close(self) -> None:
        """At an orderly end, when all is settled: let go of what it holds. Collective."""
        ...


@runtime_checkable
class ArrivalTransport(Transport, Protocol):
    """A transport that can also tell which messages came, in whatever order of the two kinds; those
    of one kind come in the order of their microbatches."""

    def arrived(self, *, wait: bool) -> Sequence[Message]:
        """Messages that are here and were not received yet: of each kind the next one at most, in
        the order in which they came. With `wait` there is at least one; raises `PeerError` where
        none comes within the transport's timeout."""
        ...


class NoTransport:
    """Of a single stage, which has nobody to talk to."""

    def expect(self, messages: Sequence[Message], *, unanswered: int) -> None:
        assert not messages, "a single stage needs no messages"

    def receive(self, message: Message) -> torch.Tensor:
        raise AssertionError(f"nobody sends {message}")

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        raise AssertionError(f"nobody receives {message}")

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class GroupTransport:
    """Over torch.distributed, for schedules fixed beforehand: every message is a tensor of one
    `shape` and `dtype`, and both ends of an edge issue its messages in one order."""

    def __init__(
        self,
        edges: Edges,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._incoming = {Kind.FORWARD: edges.activations_in, Kind.BACKWARD: edges.gradients_in}
        self._outgoing = {Kind.FORWARD: edges.activations_out, Kind.BACKWARD: edges.gradients_out}
        self._shape, self._dtype, self._device = shape, dtype, device
        self._expected: deque[Message] = deque()
        self._posted: deque[tuple[Message, torch.Tensor, dist.Work]] = deque()
        self._sent: dict[Kind, dict[Message, tuple[torch.Tensor, dist.Work]]] = {
            kind: {} for kind in Kind
        }
        self._unanswered = 0
        # gloo's receives hold up nothing.
        self._ahead = POSTED if device.type == "cpu" else 0
        self._buffer: torch.Tensor | None = None
        """Memory of the next receive."""

    def expect(self, messages: Sequence[Message], *, unanswered: int) -> None:
        assert not self._expected and not self._posted, "the last batch is not over"
        self._expected.extend(messages)
        self._unanswered = unanswered
        self._post(self._ahead)
        self._prepare()

    def receive(self, message: Message) -> torch.Tensor:
        self._post(max(self._ahead, 1))
        posted, tensor, work = self._posted.popleft()
        assert posted == message, f"{posted} was announced, {message} is asked for"
        self._post(self._ahead)
        work.wait()
        if message.kind is Kind.BACKWARD:
            # Whose answer this is has arrived: nothing is waited for here.
            self._finish(message._replace(kind=Kind.FORWARD))
        return tensor

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        assert tensor.shape == self._shape and tensor.dtype == self._dtype, "as was agreed on"
        group, tensor = self._outgoing[message.kind], tensor.contiguous()
        self._prepare()
        work = group.send(tensor, to=1, tag=_tag(message), about=str(message))
        sent = self._sent[message.kind]
        sent[message] = (tensor, work)
        # NCCL tells of sends that are done; gloo's are not known to be until they are waited for.
        while (oldest := next(iter(sent))) != message and (
            sent[oldest][1].is_completed() or len(sent) > self._unanswered
        ):
            self._finish(oldest)

    def settle(self) -> None:
        for sent in self._sent.values():
            while sent:
                self._finish(next(iter(sent)))

    def close(self) -> None:
        pass  # torch.distributed's groups are their owner's

    def _post(self, wanted: int) -> None:
        """Post receives until there are as many as wanted, or no message is left."""
        while self._expected and len(self._posted) < wanted:
            message = self._expected.popleft()
            tensor, self._buffer = self._empty() if self._buffer is None else self._buffer, None
            group = self._incoming[message.kind]
            work = group.receive(tensor, source=0, tag=_tag(message), about=str(message))
            self._posted.append((message, tensor, work))

    def _prepare(self) -> None:
        """Take the memory of the next receive, where that is not posted yet."""
        if self._expected and self._buffer is None and not self._ahead:
            self._buffer = self._empty()

    def _empty(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def _finish(self, message: Message) -> None:
        sent = self._sent[message.kind].pop(message, None)
        if sent is not None:
            sent[1].wait()


def open_transport(
    groups: ProcessGroups,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    chunks: int = 1,
) -> Transport:
    """The transport of this rank's pipeline, for messages of `shape` and `dtype`. Collective over
    the pipeline; raises `ConfigError` where its ranks would send different shapes."""
    if groups.edges is None:
        return NoTransport()
    agree_on_shape(groups.pp, f"{list(shape)} {dtype}")
    _connect(groups, device, ring=chunks > 1)
    return GroupTransport(groups.edges, shape=shape, dtype=dtype, device=device)


def agree_on_shape(pipeline: Group, mine: str) -> None:
    """Raise `ConfigError` where a rank of the pipeline says another text than the first."""
    seen = pipeline.all_gather_str(mine)
    for rank, other in zip(pipeline.ranks, seen, strict=True):
        if other != seen[0]:
            raise ConfigError(
                f"rank {rank} sends activations of {other}, rank {pipeline.ranks[0]} of {seen[0]}; "
                "start every rank with the same configuration and code"
            )


def _connect(groups: ProcessGroups, device: torch.device, *, ring: bool) -> None:
    """Send one number over every edge that will be used, edge by edge: NCCL makes a connection at
    its first use, where both ends wait for each other and memory is allocated, which must not
    happen within a step. `ring`: also from the last stage to the first."""
    assert groups.edges is not None
    stage, stages = groups.pp.rank, groups.pp.size
    edges = groups.edges
    # By the lower of the two stages; that from the last one to the first comes at the end.
    above, below = stage, (stage - 1) % stages
    order = [
        (above, edges.activations_out),
        (below, edges.activations_in),
        (stages + above, edges.gradients_in),
        (stages + below, edges.gradients_out),
    ]
    number = torch.zeros(1, device=device)
    for place, edge in sorted(order, key=lambda item: item[0]):
        if place % stages == stages - 1 and not ring:
            continue
        if edge.rank == 0:
            edge.send(number, to=1, about="connect").wait()
        else:
            edge.receive(number, source=0, about="connect").wait()


def _tag(message: Message) -> int:
    assert message.microbatch < _MICROBATCHES, "a tag has 31 bits"
    answers = message.kind is Kind.BACKWARD
    return (message.boundary * _MICROBATCHES + message.microbatch) * 2 + answers
