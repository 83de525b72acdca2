"""What a pipeline rank computes in which order. Decides only: no torch, no transport, no model.

Layers are cut into virtual stages 0, 1, ... in the order in which a microbatch passes them; rank r
of p holds those whose number is r modulo p, its chunks. Between virtual stages b and b + 1 lies
boundary b: activations cross it one way and gradients the other.

    1F1B, 3 ranks, 4 microbatches (capitals: forward; small letters: backward)
    rank 0   A B C . . a D b . c . d          at most p - r microbatches are in flight on rank r,
    rank 1   . A B . a C b D c . d .          and rank r waits for 2 (p - 1) of the passes
    rank 2   . . A a B b C c D d . .

    message-driven, at most 4 in flight, where a message takes as long as a pass
    rank 0   A B C D . . . . . a . b . c . d          what arrives decides: while a is under way,
    rank 1   . . A B C D . a . b . c . d . .          rank 1 takes C and D on. 1F1B, whose rank 1
    rank 2   . . . . A a B b C c D d . . . .          waits for a, would be through after 20
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

POSTED = 2
"""Receives that wait for their message at a time, so that one arrives during a pass: in the steady
state of 1F1B the next activation and the next gradient; of each kind where either may come. NCCL
posts none ahead (`transport`)."""


class Kind(Enum):
    """Direction of a pass; its value is what messages of that direction are called."""

    FORWARD = "activation"
    BACKWARD = "gradient"


class Operation(NamedTuple):
    """A pass of a microbatch, by its number on this pipeline, through one of the rank's chunks."""

    kind: Kind
    microbatch: int
    chunk: int = 0


class Message(NamedTuple):
    """What crosses a boundary: an activation upwards, or the gradient that answers it."""

    kind: Kind
    microbatch: int
    boundary: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.microbatch}.{self.boundary}"


@dataclass(frozen=True, kw_only=True)
class StagePosition:
    """Where a rank stands: `stage` of `stages`, each with `chunks` runs of layers."""

    stage: int = 0
    stages: int = 1
    chunks: int = 1

    def is_first(self, chunk: int) -> bool:
        """Whether a chunk begins the model: it needs no activation and makes no gradient."""
        return self.virtual(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk ends the model, in the loss."""
        return self.virtual(chunk) == self.stages * self.chunks - 1

    def virtual(self, chunk: int) -> int:
        """Number of the virtual stage that a chunk is."""
        return chunk * self.stages + self.stage

    def needs(self, operation: Operation) -> Message | None:
        """The message that an operation waits for, if any."""
        kind, microbatch, chunk = operation
        if kind is Kind.FORWARD:
            boundary = None if self.is_first(chunk) else self.virtual(chunk) - 1
        else:
            boundary = None if self.is_last(chunk) else self.virtual(chunk)
        return None if boundary is None else Message(kind, microbatch, boundary)

    def makes(self, operation: Operation) -> Message | None:
        """The message that carries its result on, if any."""
        kind, microbatch, chunk = operation
        if kind is Kind.FORWARD:
            boundary = None if self.is_last(chunk) else self.virtual(chunk)
        else:
            boundary = None if self.is_first(chunk) else self.virtual(chunk) - 1
        return None if boundary is None else Message(kind, microbatch, boundary)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Operation]:
    """1F1B (Narayanan et al. 2019): forwards until the pipeline below is filled, then one forward
    and one backward in turns. At most stages - stage microbatches are in flight."""
    return interleaved(stage, stages, 1, microbatches)


def interleaved(stage: int, stages: int, chunks: int, microbatches: int) -> list[Operation]:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2): as `one_f_one_b` over virtual stages.

    A rank takes as many microbatches as there are stages through each of its chunks before the
    next as many; with more than one chunk `microbatches` must be a multiple of that. In flight are
    at most as many chunk inputs as `warm_up` plus one.
    """
    assert chunks == 1 or microbatches % stages == 0, "the configuration is checked for it"
    forwards = _in_turns(Kind.FORWARD, range(chunks), stages, microbatches)
    backwards = _in_turns(Kind.BACKWARD, range(chunks)[::-1], stages, microbatches)
    ahead = warm_up(stage, stages, chunks, microbatches)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards) - ahead :]


def warm_up(stage: int, stages: int, chunks: int, microbatches: int) -> int:
    """Forwards of a rank before its first backward, but for the one right before that.

    With chunks, a rank runs twice as many ahead for each stage below it: until an input that it
    needs has come back round, it has work to do.
    """
    below = stages - 1 - stage
    ahead = below if chunks == 1 else 2 * below + (chunks - 1) * stages
    return min(ahead, chunks * microbatches)


def forward_only(stages: int, chunks: int, microbatches: int) -> list[Operation]:
    """The order of an evaluation, on every rank; any number of microbatches."""
    return _in_turns(Kind.FORWARD, range(chunks), stages, microbatches)


def _in_turns(kind: Kind, chunks: Sequence[int], stages: int, microbatches: int) -> list[Operation]:
    """Microbatches in groups of as many as there are stages, each through chunk after chunk."""
    return [
        Operation(kind, microbatch, chunk)
        for first in range(0, microbatches, stages)
        for chunk in chunks
        for microbatch in range(first, min(first + stages, microbatches))
    ]
