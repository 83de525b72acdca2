"""Finds the rank that issued another collective than its peers, from the ranks' heartbeat files.

gloo pairs the n-th collective of one rank with the n-th collective of another, whatever they are.
Ranks that are one apart abort, time out or receive each other's numbers, far from the cause.

    rank 0   bucket  vote  loss    bucket  vote
    rank 1   bucket  vote  [extra]  loss   bucket      they part at [extra]

Each set of connections has its own count: two ranks are compared over the connections that they
share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron.fault_tolerance.heartbeat import (
    PHASES,
    WORLD,
    CollectiveCall,
    LastCall,
    RankStatus,
    call_of,
    calls_of,
)


@dataclass(frozen=True, kw_only=True)
class Desync:
    """The first place where two ranks differ: `rank` issued `odd`, `other` issued `usual`."""

    rank: int
    odd: CollectiveCall
    other: int
    usual: CollectiveCall

    @property
    def place(self) -> CollectiveCall:
        """The earlier of the two calls; a collective was added or left out there."""
        return min(self.odd, self.usual, key=_moment)

    def __str__(self) -> str:
        group = "" if self.odd.group == WORLD else f" of {self.odd.group}"
        return (
            f"it differs from the others at collective {self.odd.number}{group}, {self.odd}, where "
            f"rank {self.other} has {self.usual}: one was added or left out"
        )


def find_parting(calls: Mapping[int, Sequence[CollectiveCall]]) -> Desync | None:
    """Return the first place where the calls of ranks differ; None if the records do not differ.

    The place is the earliest over all connections. The named rank is the one that differs from most
    ranks. Of two ranks, it is the one whose call did not follow the same calls in an earlier step;
    if no earlier step decides, the higher rank.
    """
    by_group: dict[str, dict[int, dict[int, CollectiveCall]]] = {}
    for rank, log in calls.items():
        for call in log:
            by_group.setdefault(call.group, {}).setdefault(call.number, {})[rank] = call
    found = [parting for each in by_group.values() if (parting := _find_in_group(each)) is not None]
    return min(found, key=lambda parting: _moment(parting.place), default=None)


def find_parting_of(folder: Path, seen: Sequence[RankStatus]) -> Desync | None:
    """Return the result of `find_parting` for the recorded calls of these ranks in `folder`.

    Heartbeat headers are read first; rings of calls are read only for ranks whose digests differ.
    """
    by_group: dict[str, dict[int, LastCall]] = {}
    for one in sorted(seen, key=lambda one: one.rank):
        for tail in one.tails:
            by_group.setdefault(tail.group, {})[one.rank] = tail
    found = [
        parting
        for tails in by_group.values()
        if (parting := _find_by_digests(folder, tails)) is not None
    ]
    return min(found, key=lambda parting: _moment(parting.place), default=None)


def _find_by_digests(folder: Path, tails: Mapping[int, LastCall]) -> Desync | None:
    """Compare the ranks pairwise, in order of progress.

    If two ranks differ, then two neighbours in this order differ no later, since a digest covers
    all earlier calls.
    """
    row = sorted(tails, key=lambda rank: tails[rank].number)
    by_number: dict[int, dict[int, CollectiveCall]] = {}
    for one, other in pairwise(row):
        if _digest(folder, other, tails[other], tails[one].number) not in (None, tails[one].digest):
            for rank in (one, other):
                for call in calls_of(folder, rank, tails[rank]):
                    by_number.setdefault(call.number, {})[rank] = call
    differ = (n for n in sorted(by_number) if len(set(map(_kind, by_number[n].values()))) > 1)
    first = next(differ, None)
    if first is None:
        return None
    # The odd rank is found by majority, so every rank's call of that number is needed.
    everybody = {
        rank: call
        for rank, tail in tails.items()
        if (call := call_of(folder, rank, tail, first)) is not None
    }
    before = {number: calls for number, calls in by_number.items() if number < first}
    return _find_in_group({**before, first: everybody})


def _digest(folder: Path, rank: int, tail: LastCall, number: int) -> int | None:
    if number == tail.number:
        return tail.digest
    call = call_of(folder, rank, tail, number)
    return call.digest if call is not None else None


def _find_in_group(by_number: Mapping[int, dict[int, CollectiveCall]]) -> Desync | None:
    agreed: list[CollectiveCall] = []
    for number in sorted(by_number):
        seen = by_number[number]
        counts = Counter(map(_kind, seen.values()))
        if len(counts) == 1:
            agreed.append(next(iter(seen.values())))
            continue
        precedents = _precedents(agreed)
        first = {_kind(call): (rank, call) for rank, call in reversed(seen.items())}
        by_kind = {
            kind: (counts[kind], precedents.get(_after(agreed, call), -1), -rank)
            for kind, (rank, call) in first.items()
        }
        usual, odd = max(by_kind, key=by_kind.__getitem__), min(by_kind, key=by_kind.__getitem__)
        return Desync(
            rank=first[odd][0], odd=first[odd][1], other=first[usual][0], usual=first[usual][1]
        )
    return None


def _moment(call: CollectiveCall) -> tuple[int, int]:
    return call.step, PHASES.index(call.phase)


def _kind(call: CollectiveCall) -> tuple[int, str]:
    return call.step, call.what


def _after(agreed: Sequence[CollectiveCall], call: CollectiveCall) -> tuple[int, int, str]:
    """Return how a call follows the agreed ones: calls in the last step, steps later, name."""
    if not agreed:
        return 0, 0, call.what
    last = agreed[-1].step
    place = sum(1 for before in agreed if before.step == last)
    return place, call.step - last, call.what


def _precedents(agreed: Sequence[CollectiveCall]) -> dict[tuple[int, int, str], int]:
    """Return the keys of `_after` of all agreed calls, each with the latest step that has it.

    The step of a key is that of the call before.
    """
    found: dict[tuple[int, int, str], int] = {}
    place, step = 0, agreed[0].step if agreed else 0
    for call in agreed:
        found[place, call.step - step, call.what] = step
        place = place + 1 if call.step == step else 1
        step = call.step
    return found
