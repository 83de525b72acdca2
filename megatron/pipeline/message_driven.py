"""What a pipeline rank computes next, by what has arrived (Singh and Bhatele 2022, Algorithm 2).
Decides only: no torch, no transport, no clock."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from megatron.pipeline.schedule import Kind, Message, Operation, Place


@dataclass(frozen=True, kw_only=True)
class BatchProgress:
    """How far a rank is in a batch of `microbatches`: it ran so many `forwards` and `backwards`,
    each in the order of the microbatches, and holds at most `limit` between the two.

    Nobody waits for ever, whatever the limit: the first stage holds whatever another one does, so
    to a stage that holds `limit` no activation is on its way.
    """

    place: Place
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
