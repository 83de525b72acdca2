"""How many entries are chosen in each range of a bucket, kept on the host.

A device could count its bitmap, but the host would wait for the answer, and the number of entries
to send must be known before they are gathered. Whoever chooses says how many, so nothing need be
counted but for a range that cuts across those in which was chosen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable


class Tally:
    """`count_on_device(start, stop)` counts the chosen entries of a range and makes the host wait.
    At first there are none in `[0, length)`."""

    def __init__(self, length: int, count_on_device: Callable[[int, int], int]) -> None:
        self._count_on_device = count_on_device
        # Ranges in order: range i is [_starts[i], _starts[i + 1]) and holds _counts[i].
        self._starts = [0, length]
        self._counts = [0]
        self.total = 0

    def replace(self, start: int, stop: int, count: int | None) -> None:
        """`[start, stop)` now holds `count` entries, None where only the device can tell."""
        first, last = self._cut(start), self._cut(stop)
        if count is None:
            count = self._count_on_device(start, stop)
        self.total += count - sum(self._counts[first:last])
        self._starts[first:last] = [start]
        self._counts[first:last] = [count]

    def count(self, start: int, stop: int) -> int:
        """How many are chosen in `[start, stop)`."""
        first, last = self._cut(start), self._cut(stop)
        return sum(self._counts[first:last])

    def _cut(self, position: int) -> int:
        """Make a range begin at the position; which one that is."""
        number = bisect_left(self._starts, position)
        if self._starts[number] == position:
            return number
        start, stop = self._starts[number - 1], self._starts[number]
        count = self._counts[number - 1]
        if count == 0 or count == stop - start:
            left = min(count, position - start)
        else:
            left = self._count_on_device(start, position)
        self._starts.insert(number, position)
        self._counts[number - 1 : number] = [left, count - left]
        return number
