"""The course of a batch on a message-driven rank: what has arrived decides, once for all
tensor-parallel ranks of the stage.

Each of those has a line of its own to its neighbours, over which messages come as they please, but
their passes hold collectives that must meet. So their rank 0 decides and tells the others, which
wait for the very message that it found. Where nothing is to be decided nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron.parallel.groups import Group
from megatron.pipeline.message_driven import BatchProgress
from megatron.pipeline.schedule import Kind, Operation, Place
from megatron.pipeline.transport import ArrivalTransport
from megatron.timers import Timers

WAIT = "any-recv"
"""Timer of waiting for whichever message comes first; the others of a stage wait for word of it."""
_KINDS = tuple(Kind)


class MessageDriven:
    """What a rank of a message-driven pipeline runs. `limit`: microbatches in flight at most (None:
    as many as stages); `tp`: the ranks that share the stage; `device`: that which computes."""

    def __init__(
        self,
        place: Place,
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
