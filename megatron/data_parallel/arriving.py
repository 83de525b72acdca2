"""Means of which the first are used while the last are still being summed up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.data_parallel.interface import Reduced


class ArrivingMeans:
    """The means of a step's buckets in index order, `take(number)` each when it is first asked for:
    nothing is waited for before that."""

    def __init__(self, take: Callable[[int], Reduced], count: int) -> None:
        self._take, self._count = take, count
        self._taken: list[Reduced] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> Reduced:
        number = range(self._count)[index]
        while len(self._taken) <= number:
            self._taken.append(self._take(len(self._taken)))
        return self._taken[number]

    def __iter__(self) -> Iterator[Reduced]:
        return (self[number] for number in range(self._count))

    def clear(self) -> None:
        """Forget them: their memory is about to be replaced."""
        self._taken.clear()
        self._count = 0
