"""AxoNN's message-driven schedule: whichever message arrived decides the next operation.

`BatchProgress` is the pure decision. `MessageDriven` applies it once for all tensor-parallel ranks
of a stage: their passes hold collectives that must meet, so rank 0 decides and tells the others,
which wait for the very message that rank 0 found.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.pipeline.schedule import Kind, Message, Operation, StagePosition

if TYPE_CHECKING:
    import torch

    from megatron.parallel.groups import Group
    from megatron.pipeline.transport import ArrivalTransport
    from megatron.timers import Timers


@dataclass(frozen=True, kw_only=True)
class BatchProgress:
    """How far a rank is in a batch of `microbatches`: it ran so many `forwards` and `backwards`,
    each in the order of the microbatches, and holds at most `limit` between the two.

    Nobody waits for ever, whatever the limit: the first stage holds whatever another one does, so
    to a stage that holds `limit` no activation is on its way.
    """

    place: StagePosition
    microbatches: int
    limit: int
    forwards: int = 0
    backwards: int = 0

    def __post_init__(self) -> None:
        assert self.place.chunks == 1 and self.limit >= 1, "the configuration is checked for it"

    def possible(self) -> tuple[Operation, ...]:
        """What may come next, as soon as its message is there, the more urgent first; a single one
        comes next whatever arrives. None: the batch is over.

        With messages of both kinds there, backward goes first. The first stage injects microbatches
        up to the limit before it looks for gradients, and the last runs backward right after
        forward: neither has a choice.
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
        """The pass to run next where these messages are there; None: wait for another one, or the
        batch is over."""
        for operation in self.possible():
            needed = self.place.needs(operation)
            if needed is None or needed in arrived:
                return operation
        return None

    def after(self, operation: Operation) -> BatchProgress:
        """How far the rank is once one of the possible passes has run."""
        assert operation in self.possible(), f"{operation} does not come after {self}"
        if operation.kind is Kind.FORWARD:
            return replace(self, forwards=self.forwards + 1)
        return replace(self, backwards=self.backwards + 1)

    def messages(self) -> list[Message]:
        """All that a whole batch needs, those of each kind in the order in which they come."""
        passes = [Operation(kind, i) for i in range(self.microbatches) for kind in Kind]
        return [message for each in passes if (message := self.place.needs(each)) is not None]


WAIT = "any-recv"
"""Timer of waiting for whichever message comes first; the others of a stage wait for word of it."""
_KINDS = tuple(Kind)


class MessageDriven:
    """What a rank of a message-driven pipeline runs. `limit`: microbatches in flight at most (None:
    as many as stages); `tp`: the ranks that share the stage; `device`: that which computes."""

    def __init__(
        self,
        place: StagePosition,
        *,
        limit: int | None,
        transport: ArrivalTransport,
        tp: Group,
        device: torch.device,
        timers: Timers,
        at: Callable[[str], None],
    ) -> None:
        self.limit = place.stages if limit is None else limit
        self._place, self._transport, self._tp = place, transport, tp
        self._device, self._timers, self._at = device, timers, at

    def begin(self, microbatches: int) -> BatchProgress:
        """The progress at the start of a batch."""
        return BatchProgress(place=self._place, microbatches=microbatches, limit=self.limit)

    def passes(self, progress: BatchProgress) -> Iterator[Operation]:
        """The rest of the batch, pass by pass, each decided on when it is asked for; the caller has
        told the transport what to expect, and runs it before it asks for the next one. Collective
        over `tp`."""
        while possible := progress.possible():
            operation = possible[0] if len(possible) == 1 else self._agree(progress)
            yield operation
            progress = progress.after(operation)

    def _agree(self, progress: BatchProgress) -> Operation:
        import torch  # Here, so that the simulator of tools/planner needs none for `BatchProgress`.

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
        """On the CPU on every device: the next pass is launched by it."""
        self._tp.broadcast(what, source=0, about="next pass")

    def _decide(self, progress: BatchProgress) -> Operation:
        if self._device.type == "cuda":
            import torch

            # Until the last pass is computed, more may arrive to choose from.
            torch.cuda.current_stream(self._device).synchronize()
        operation = progress.choose(self._transport.arrived(wait=False))
        if operation is None:
            self._at("receive")
            with self._timers(WAIT, level=2):
                arrived = self._transport.arrived(wait=True)
            operation = progress.choose(arrived)
            assert operation is not None, f"{arrived} was not to come next at {progress}"
        return operation
