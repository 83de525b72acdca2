"""AxoNN's message-driven schedule, in which the message that arrives first decides the next pass.

`BatchProgress` is the pure decision. `MessageDriven` applies the decision for all tensor-parallel
ranks of a stage: their passes contain collectives that must match, so rank 0 decides, and the
others follow and wait for the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.pipeline.schedule import Kind, Message, Operation, StagePosition

if TYPE_CHECKING:
    import torch

    from megatron.parallel.groups import Group
    from megatron.pipeline.pass_marker import PassMarker
    from megatron.pipeline.transport import ArrivalTransport
    from megatron.timers import Timers


@dataclass(frozen=True, kw_only=True)
class BatchProgress:
    """The progress of a rank in a batch of `microbatches`.

    The rank has run `forwards` and `backwards` passes in microbatch order and holds at most `limit`
    microbatches between the two. There is no deadlock for any limit: the first stage holds all
    microbatches that any other stage holds, so no activation is on its way to a stage at its limit.
    """

    place: StagePosition
    microbatches: int
    limit: int
    forwards: int = 0
    backwards: int = 0

    def __post_init__(self) -> None:
        assert self.place.chunks == 1 and self.limit >= 1, "the configuration is checked for it"

    def possible(self) -> tuple[Operation, ...]:
        """Return the passes that may come next, most urgent first; empty if the batch is over.

        A single possible pass comes next whatever arrives. With two, backward goes first if both
        messages have arrived. The first stage injects microbatches up to the limit before it waits
        for gradients, and the last stage runs backward right after forward: neither has a choice.
        """
        backward = Operation(Kind.BACKWARD, self.backwards)
        forward = Operation(Kind.FORWARD, self.forwards)
        held = self.forwards - self.backwards
        more = self.forwards < self.microbatches and held < self.limit
        if not held:
            return (forward,) if more else ()
        if not more or self.place.needs(backward) is None:
            return (backward,)
        return (forward,) if self.place.needs(forward) is None else (backward, forward)

    def choose(self, arrived: Container[Message]) -> Operation | None:
        """Return the next pass given the arrived messages.

        None if the rank must wait for a message, or if the batch is over.
        """
        for operation in self.possible():
            needed = self.place.needs(operation)
            if needed is None or needed in arrived:
                return operation
        return None

    def after(self, operation: Operation) -> BatchProgress:
        """Return the progress after `operation`, which must be one of `possible`."""
        assert operation in self.possible(), f"{operation} does not come after {self}"
        if operation.kind is Kind.FORWARD:
            return replace(self, forwards=self.forwards + 1)
        return replace(self, backwards=self.backwards + 1)

    def messages(self) -> list[Message]:
        """Return all messages that the rank receives in a batch, each kind in order of arrival."""
        passes = [Operation(kind, i) for i in range(self.microbatches) for kind in Kind]
        return [message for each in passes if (message := self.place.needs(each)) is not None]


WAIT = "any-recv"
"""Timer of the wait for any message, or on other tensor-parallel ranks for the decision."""
_KINDS = tuple(Kind)


class MessageDriven:
    """The driver of a rank in a message-driven pipeline.

    `limit` is the maximum number of microbatches in flight (None: number of stages). `tp` is the
    group of ranks that share the stage. `marker` tells how far the device is in the last pass (None
    if passes are over when they return). `at` is called with the phase in which the rank waits.
    """

    def __init__(
        self,
        place: StagePosition,
        *,
        limit: int | None,
        transport: ArrivalTransport,
        tp: Group,
        marker: PassMarker | None,
        timers: Timers,
        at: Callable[[str], None],
    ) -> None:
        self.limit = place.stages if limit is None else limit
        self._place, self._transport, self._tp = place, transport, tp
        self._marker, self._timers, self._at = marker, timers, at

    def begin(self, microbatches: int) -> BatchProgress:
        """Return the progress at the start of a batch."""
        return BatchProgress(place=self._place, microbatches=microbatches, limit=self.limit)

    def passes(self, progress: BatchProgress) -> Iterator[Operation]:
        """Yield the remaining passes of the batch, each chosen when it is asked for.

        The caller must have announced the messages to the transport, and runs each pass before it
        asks for the next. Collective over `tp`. Raises `PeerError` if no message arrives within
        the transport's timeout.
        """
        while possible := progress.possible():
            operation = possible[0] if len(possible) == 1 else self._agree(progress)
            yield operation
            progress = progress.after(operation)

    def _agree(self, progress: BatchProgress) -> Operation:
        import torch  # lazily, since tools/planner simulates `BatchProgress` without torch

        if self._tp.rank == 0:
            operation = self._decide(progress)
            self._tell(torch.tensor([_KINDS.index(operation.kind), operation.microbatch]))
            return operation
        told = torch.empty(2, dtype=torch.int64)
        self._at("receive")
        with self._timers(WAIT, level=2):
            self._tell(told)
        kind, microbatch = told.tolist()
        return Operation(_KINDS[kind], microbatch)

    def _tell(self, what: torch.Tensor) -> None:
        """Broadcast on the CPU, since the host launches the next pass."""
        self._tp.broadcast(what, source=0, about="next pass")

    def _decide(self, progress: BatchProgress) -> Operation:
        if self._marker is not None:
            self._marker.wait()  # more messages may arrive until then
        operation = progress.choose(self._transport.arrived(wait=False))
        if operation is None:
            self._at("receive")
            with self._timers(WAIT, level=2):
                arrived = self._transport.arrived(wait=True)
            operation = progress.choose(arrived)
            assert operation is not None, f"{arrived} was not to come next at {progress}"
        return operation
