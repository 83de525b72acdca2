"""The log of a rank's NCCL calls, and the check that the logs of all ranks fit. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """One operation on a communicator.

    `how`: the reduction, or the source rank. `peer`: the other rank of a message.
    """

    communicator: str
    ranks: tuple[int, ...]
    kind: str
    how: str
    numel: int
    dtype: str
    peer: int | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, [self.kind, self.how, f"of {self.numel} {self.dtype}"]))


def disagreements(logs: Sequence[Sequence[Call]]) -> list[str]:
    """Compare the logs of all ranks, given in rank order.

    All ranks of a communicator must issue the same collectives in one order, and each rank must
    receive what another rank sends to it. Returns a line for each pair of ranks and communicator
    that differ.
    """
    found = []
    communicators = {(call.communicator, call.ranks) for log in logs for call in log}
    for name, ranks in sorted(communicators):
        on_it = {rank: [call for call in logs[rank] if call.communicator == name] for rank in ranks}
        for one, other in itertools.pairwise(ranks):
            collectives = [[str(c) for c in on_it[rank] if c.peer is None] for rank in (one, other)]
            found += _differing(f"{name}: ranks {one} and {other}", *collectives)
        for one, other in itertools.permutations(ranks, 2):
            sent = _messages(on_it[one], "send", other)
            received = _messages(on_it[other], "receive", one)
            found += _differing(f"{name}: rank {one} that sends to rank {other}", sent, received)
    return found


def _messages(calls: Sequence[Call], kind: str, peer: int) -> list[str]:
    return [f"{c.numel} {c.dtype}" for c in calls if (c.kind, c.peer) == (kind, peer)]


def _differing(who: str, one: list[Any], other: list[Any]) -> list[str]:
    pairs = enumerate(itertools.zip_longest(one, other, fillvalue="nothing"), start=1)
    first = next((f"{who}, call {n}: {a}, {b}" for n, (a, b) in pairs if a != b), None)
    return [] if first is None else [first]
