"""The steps of a run after which copies of the model are averaged. Imports no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Rounds:
    """The attempted steps after which fragments of the model are averaged.

    Each fragment is averaged every `steps` steps. The turns of the fragments are spread evenly over
    a round, and the last fragment's turn is the end of the round. The last of `total` steps
    averages all fragments.
    """

    steps: int
    fragments: int
    total: int

    def fragment_of(self, bucket: int, buckets: int) -> int:
        """Return the fragment of a bucket of a rank with this number of buckets."""
        # Counted from the end: the last bucket of two stages may be the copies of a tied embedding,
        # which must have the same turn.
        return self.fragments - 1 - (buckets - 1 - bucket) * self.fragments // buckets

    def ends(self, fragment: int, iteration: int) -> bool:
        """Return whether a fragment is averaged after the step `iteration`, which counts from 1."""
        turn = (fragment + 1) * self.steps // self.fragments
        return iteration == self.total or iteration % self.steps == turn % self.steps

    def ended(self, iteration: int) -> tuple[int, ...]:
        """Return the fragments that are averaged after the step `iteration`."""
        return tuple(each for each in range(self.fragments) if self.ends(each, iteration))

    def counts(self) -> Counter[tuple[int, ...]]:
        """Return the number of steps of the run by the fragments that are averaged after them."""
        found: Counter[tuple[int, ...]] = Counter()
        before_last = self.total - 1
        for first in range(1, min(self.steps, before_last) + 1):
            found[self.ended(first)] += (before_last - first) // self.steps + 1
        found[self.ended(self.total)] += 1
        return found
