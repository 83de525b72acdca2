"""Transports, which carry activations and gradients between pipeline stages.

        expect        receive(i)                receive(i + 1)
    post i, i + 1 --> wait for i, post i + 2 --> ...            while the rank computes
    send: begun, kept until done, never waited for before it must be

With NCCL a receive is posted only when its message is needed. Its kernel occupies the device until
the sender arrives, and blocks later work on the same hardware queue, the first launch of a kernel,
and an allocation that frees memory; two ranks that post receives ahead could prevent each other
from ever sending. A send's kernel occupies the device, too, so the memory of a receive is allocated
before the preceding send. 1F1B then completes even if a rank waits for its device. The interleaved
schedule completes if all kernels but those of the first passes are loaded at the start; an
allocation that must free memory first may deadlock it (`tests/pipeline/test_queues.py` simulates
all of these). Sends still overlap with computation.

torch.distributed's `batch_isend_irecv` is unsuitable, since it pairs operations that both sides
issue together, and stages are not in lockstep.
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
    """A carrier of activations and gradients between stages, for one batch after another."""

    def expect(self, messages: Sequence[Message], *, unanswered: int) -> None:
        """Announce the next messages in order of use; may post the first receives ahead.

        `unanswered` is the number of sends per direction that may be in progress before a wait.
        """
        ...

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for the next message, and return its tensor, which the caller owns.

        `message` must be the next one announced to `expect` (of its kind, where messages arrive in
        any order).
        """
        ...

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start to send; the tensor must not be modified any more. Returns at once."""
        ...

    def wait_for_sends(self) -> None:
        """Wait until all sends are complete on this rank."""
        ...

    def close(self) -> None:
        """Release resources at an orderly end, after `settle`. Collective."""
        ...


@runtime_checkable
class ArrivalTransport(Transport, Protocol):
    """A transport that also reports which messages have arrived.

    Messages of one kind arrive in microbatch order; the two kinds mix in any order.
    """

    def arrived(self, *, wait: bool) -> Sequence[Message]:
        """Return the messages that arrived but were not received yet, in order of arrival.

        There is at most one per kind, and with `wait` at least one. Raises `PeerError` if none
        arrives within the transport's timeout.
        """
        ...


class NoTransport:
    """The transport of a single stage, which has no peer."""

    def expect(self, messages: Sequence[Message], *, unanswered: int) -> None:
        assert not messages, "a single stage needs no messages"

    def receive(self, message: Message) -> torch.Tensor:
        raise AssertionError(f"nobody sends {message}")

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        raise AssertionError(f"nobody receives {message}")

    def wait_for_sends(self) -> None:
        pass

    def close(self) -> None:
        pass


class GroupTransport:
    """Transport over torch.distributed, for fixed schedules.

    All messages have one `shape` and `dtype`, and both ends of an edge issue them in one order.
    """

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
        # gloo's receives block nothing.
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
            # The gradient answers an activation, whose send is therefore complete.
            self._finish(message._replace(kind=Kind.FORWARD))
        return tensor

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        assert tensor.shape == self._shape and tensor.dtype == self._dtype, "as was agreed on"
        group, tensor = self._outgoing[message.kind], tensor.contiguous()
        self._prepare()
        work = group.send(tensor, to=1, tag=_tag(message), about=str(message))
        sent = self._sent[message.kind]
        sent[message] = (tensor, work)
        # NCCL reports completed sends; gloo's must be waited for.
        while (oldest := next(iter(sent))) != message and (
            sent[oldest][1].is_completed() or len(sent) > self._unanswered
        ):
            self._finish(oldest)

    def wait_for_sends(self) -> None:
        for sent in self._sent.values():
            while sent:
                self._finish(next(iter(sent)))

    def close(self) -> None:
        pass  # the owner of the groups destroys them

    def _post(self, wanted: int) -> None:
        """Post receives until `wanted` are in progress or no message is left."""
        while self._expected and len(self._posted) < wanted:
            message = self._expected.popleft()
            tensor, self._buffer = self._empty() if self._buffer is None else self._buffer, None
            group = self._incoming[message.kind]
            work = group.receive(tensor, source=0, tag=_tag(message), about=str(message))
            self._posted.append((message, tensor, work))

    def _prepare(self) -> None:
        """Allocate the memory of the next receive, if receives are not posted ahead."""
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
    """Return the transport of this rank's pipeline for messages of `shape` and `dtype`.

    Collective over the pipeline. Several `chunks` per stage also connect the last stage to the
    first. Raises `ConfigError` if ranks would send different shapes or dtypes.
    """
    if groups.edges is None:
        return NoTransport()
    agree_on_shape(groups.pp, f"{list(shape)} {dtype}")
    _connect(groups, device, ring=chunks > 1)
    return GroupTransport(groups.edges, shape=shape, dtype=dtype, device=device)


def agree_on_shape(pipeline: Group, mine: str) -> None:
    """Raise `ConfigError` if a rank of the pipeline passes another text than the first rank."""
    seen = pipeline.all_gather_str(mine)
    for rank, other in zip(pipeline.ranks, seen, strict=True):
        if other != seen[0]:
            raise ConfigError(
                f"rank {rank} sends activations of {other}, rank {pipeline.ranks[0]} of {seen[0]}; "
                "start every rank with the same configuration and code"
            )


def _connect(groups: ProcessGroups, device: torch.device, *, ring: bool) -> None:
    """Connect all edges by sending one number over each; a `ring` includes last to first."""
    assert groups.edges is not None
    stage, stages = groups.pp.rank, groups.pp.size
    edges = groups.edges
    # NCCL connects at the first use, where both ends wait and memory is allocated, which must not
    # happen within a step. Edges are in the order of their lower stage, last to first at the end.
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
