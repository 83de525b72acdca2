"""The runner of a batch, which combines schedule, transport and stage.

    order --> receive --> stage.forward  --> send          hooks hand gradients to the engine
          '-> receive --> stage.backward --> send          while backward runs

The order is fixed before the batch, or follows from the arrival of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.data.batches import Batch
from megatron.data_parallel.engine import GradientEngine
from megatron.pipeline.message_driven import WAIT, MessageDriven
from megatron.pipeline.schedule import (
    Kind,
    Message,
    Operation,
    StagePosition,
    forward_only,
    interleaved,
    warm_up,
)
from megatron.pipeline.stage import Stage
from megatron.pipeline.transport import Transport
from megatron.timers import Timers

_RECEIVING = {Kind.FORWARD: "forward-recv", Kind.BACKWARD: "backward-recv"}


@dataclass(kw_only=True)
class Pipeline:
    """One rank's part of the pipeline, which may have a single stage.

    `sums` is the number of sums that the last chunk returns. `at` is called with the name of each
    phase that the rank enters in training. `driven` chooses passes as messages arrive; None selects
    1F1B, interleaved if a stage has several chunks.
    """

    stage: Stage
    place: StagePosition
    transport: Transport
    engine: GradientEngine
    timers: Timers
    at: Callable[[str], None]
    sums: int = 1
    driven: MessageDriven | None = None

    def forward_backward(
        self, batches: Sequence[Batch], *, iteration: int, scale: float
    ) -> torch.Tensor:
        """Run a training batch, and let the engine accumulate gradients of `scale` times the loss.

        Returns:
            The sums over all microbatches, fp64 [sums]; 0 on all but the last stage.
        """
        place, count = self.place, len(batches)
        order = self._begin(count)
        self._name_timers()
        total = self._zero()
        left = [count] * place.chunks
        for operation in order:
            batch, chunk = batches[operation.microbatch], operation.chunk
            message = self._receive(operation)
            if operation.kind is Kind.FORWARD:
                self.at("forward")
                with self.timers("forward-compute", level=2):
                    # Batch step 2: forward of one microbatch.
                    made = self.stage.forward(iteration, batch, message, chunk=chunk)
                if place.is_last(chunk):
                    total += made
            else:
                self.at("backward")
                left[chunk] -= 1
                if not left[chunk]:
                    self.engine.expect_last_backward(self.stage.names(chunk))
                gradient = scale if message is None else message
                with self.timers("backward-compute", level=2):
                    # Batch step 4: backward of one microbatch; hooks hand gradients to the engine.
                    made = self.stage.backward(batch.index, gradient, chunk=chunk)
            self._send(operation, made)
        return total

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], *, iteration: int) -> torch.Tensor:
        """Run an evaluation batch, and return the sums as `forward_backward` does."""
        order = forward_only(self.place.stages, self.place.chunks, len(batches))
        self._expect(self._needed(order), len(batches))
        total = self._zero()
        for operation in order:
            needed = self.place.needs(operation)
            hidden = None if needed is None else self.transport.receive(needed)
            batch, chunk = batches[operation.microbatch], operation.chunk
            made = self.stage.forward(iteration, batch, hidden, chunk=chunk)
            if self.place.is_last(chunk):
                total += made
            self._send(operation, made)
        self.transport.wait_for_sends()
        return total

    def wait_for_sends(self) -> None:
        """Wait until all sends are complete, and release the sent tensors.

        Call this after a step, when all ranks have finished their backwards and no wait is long.
        """
        self.transport.wait_for_sends()

    def _begin(self, count: int) -> Iterable[Operation]:
        """Return the passes of a training batch, after announcing its messages to the transport."""
        place = self.place
        if self.driven is not None:
            progress = self.driven.begin(count)
            self._expect(progress.messages(), count)
            return self.driven.passes(progress)
        order = interleaved(place.stage, place.stages, place.chunks, count)
        self._expect(self._needed(order), count)
        return order

    def _needed(self, order: Sequence[Operation]) -> list[Message]:
        return [message for each in order if (message := self.place.needs(each)) is not None]

    def _expect(self, needed: Sequence[Message], count: int) -> None:
        # The first stage has most microbatches in flight, and a rank has no more unanswered sends
        # than its receiver has in flight. Evaluations answer no message: with `stages` unanswered
        # sends allowed, a rank waits only for sends that are received before its next turn.
        place = self.place
        most = warm_up(0, place.stages, place.chunks, count) + 1
        if self.driven is not None:
            most = self.driven.limit
        self.transport.expect(needed, unanswered=max(most, place.stages))

    def _receive(self, operation: Operation) -> torch.Tensor | None:
        needed = self.place.needs(operation)
        if needed is None:
            return None
        self.at("receive")
        with self.timers(_RECEIVING[operation.kind], level=2):
            # Batch step 3: receive from a neighbouring stage.
            return self.transport.receive(needed)

    def _send(self, operation: Operation, made: torch.Tensor | None) -> None:
        message = self.place.makes(operation)
        if message is not None:
            assert made is not None, "what is to be sent was computed"
            # Batch step 3: send to a neighbouring stage.
            self.transport.send(message, made)

    def _name_timers(self) -> None:
        """Create all timers on every stage, since timers are compared over ranks."""
        if self.place.stages > 1:
            names = [*_RECEIVING.values(), *([WAIT] if self.driven is not None else [])]
            for name in names:
                with self.timers(name, level=2):
                    pass

    def _zero(self) -> torch.Tensor:
        device = self.stage.chunks[0].device
        return torch.zeros(self.sums, dtype=torch.float64, device=device)
