"""Pipeline schedules: the order of a rank's passes. No torch, no transport, no model.

Layers are divided into virtual stages 0, 1, ... in forward order; rank r of p holds those whose
number is r modulo p, its chunks. Activations and gradients cross boundary b between virtual stages
b and b + 1 in opposite directions.

    1F1B, 3 ranks, 4 microbatches (capitals: forward; small letters: backward)
    rank 0   A B C . . a D b . c . d          at most p - r microbatches are in flight on rank r,
    rank 1   . A B . a C b D c . d .          and rank r waits for 2 (p - 1) of the passes
    rank 2   . . A a B b C c D d . .

    message-driven, at most 4 in flight, where a message takes as long as a pass
    rank 0   A B C D . . . . . a . b . c . d          messages decide: while a is in flight, rank 1
    rank 1   . . A B C D . a . b . c . d . .          runs C and D. 1F1B, whose rank 1 waits for a,
    rank 2   . . . . A a B b C c D d . . . .          would take 20
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

POSTED = 2
"""Number of receives posted at a time, so that messages arrive during a pass.

In the steady state of 1F1B these are the next activation and the next gradient; if either may come
first, the number applies to each kind. NCCL posts none ahead (`transport`).
"""


class Kind(Enum):
    """Direction of a pass; the value names its messages."""

    FORWARD = "activation"
    BACKWARD = "gradient"


class Operation(NamedTuple):
    """A pass of a microbatch, by its number in this pipeline, through one chunk of the rank."""

    kind: Kind
    microbatch: int
    chunk: int = 0


class Message(NamedTuple):
    """A tensor that crosses a boundary: an activation, or the gradient that answers it."""

    kind: Kind
    microbatch: int
    boundary: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.microbatch}.{self.boundary}"


@dataclass(frozen=True, kw_only=True)
class StagePosition:
    """Position of a rank: `stage` of `stages`, each with `chunks` model chunks."""

    stage: int = 0
    stages: int = 1
    chunks: int = 1

    def is_first(self, chunk: int) -> bool:
        """Return whether a chunk begins the model; it needs no activation and sends no gradient."""
        return self.virtual(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk ends the model with the loss."""
        return self.virtual(chunk) == self.stages * self.chunks - 1

    def virtual(self, chunk: int) -> int:
        """Return the number of a chunk's virtual stage."""
        return chunk * self.stages + self.stage

    def needs(self, operation: Operation) -> Message | None:
        """Return the message that an operation waits for, if any."""
        kind, microbatch, chunk = operation
        if kind is Kind.FORWARD:
            boundary = None if self.is_first(chunk) else self.virtual(chunk) - 1
        else:
            boundary = None if self.is_last(chunk) else self.virtual(chunk)
        return None if boundary is None else Message(kind, microbatch, boundary)

    def makes(self, operation: Operation) -> Message | None:
        """Return the message that carries the result of an operation, if any."""
        kind, microbatch, chunk = operation
        if kind is Kind.FORWARD:
            boundary = None if self.is_last(chunk) else self.virtual(chunk)
        else:
            boundary = None if self.is_first(chunk) else self.virtual(chunk) - 1
        return None if boundary is None else Message(kind, microbatch, boundary)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Operation]:
    """Return the passes of 1F1B (Narayanan et al. 2019).

    Forwards fill the pipeline, then forwards and backwards alternate. At most `stages - stage`
    microbatches are in flight.
    """
    return interleaved(stage, stages, 1, microbatches)


def interleaved(stage: int, stages: int, chunks: int, microbatches: int) -> list[Operation]:
    """Return the passes of interleaved 1F1B (Narayanan et al. 2021, section 2.2).

    A rank takes groups of `stages` microbatches through each of its chunks; with several chunks,
    `microbatches` must be a multiple of `stages`. At most `warm_up` plus one chunk inputs are in
    flight. One chunk gives `one_f_one_b`.
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
    """Return the number of forwards before the first pair of a forward and a backward.

    With one chunk, a rank runs one forward ahead for each later stage. With several, it runs two
    for each later stage, and `stages` for each chunk but one, to stay busy until a needed input has
    passed through the other stages.
    """
    below = stages - 1 - stage
    ahead = below if chunks == 1 else 2 * below + (chunks - 1) * stages
    return min(ahead, chunks * microbatches)


def forward_only(stages: int, chunks: int, microbatches: int) -> list[Operation]:
    """Return the passes of an evaluation of any number of microbatches, equal on every rank."""
    return _in_turns(Kind.FORWARD, range(chunks), stages, microbatches)


def _in_turns(kind: Kind, chunks: Sequence[int], stages: int, microbatches: int) -> list[Operation]:
    """Return passes for groups of `stages` microbatches, each through chunk after chunk."""
    return [
        Operation(kind, microbatch, chunk)
        for first in range(0, microbatches, stages)
        for chunk in chunks
        for microbatch in range(first, min(first + stages, microbatches))
    ]
