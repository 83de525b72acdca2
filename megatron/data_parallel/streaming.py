"""Reduced gradients that are used while later ones are still being reduced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from megatron.data_parallel.bucket import Slice
from megatron.data_parallel.reducer import ReducedGrad, Work


class PiecewiseArrival:
    """The `ReducedGrad.wait_until` of a bucket that is reduced in pieces.

    It waits for each piece once, in order, and passes the piece to `seen`, before the caller of
    `wait_until` may overwrite the values.
    """

    def __init__(
        self, pieces: Sequence[tuple[Slice, Work]], seen: Callable[[ReducedGrad], None]
    ) -> None:
        self._left, self._seen = deque(pieces), seen

    def __call__(self, stop: int) -> None:
        while self._left and self._left[0][0].start < stop:
            _, work = self._left.popleft()
            self._seen(work.wait())


class StreamedGrads:
    """The lazy `ReducedGrads` of a step: `take(number)` waits for a mean on first access.

    `begun` does not wait for a mean that arrives in pieces; its `wait_until` waits for the pieces
    that the caller needs.
    """

    def __init__(self, take: Callable[[int], ReducedGrad], count: int) -> None:
        self._take, self._count = take, count
        self._taken: list[ReducedGrad] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> ReducedGrad:
        reduced = self.begun(index)
        reduced.wait_until(reduced.values.numel())
        return reduced

    def begun(self, index: int, /) -> ReducedGrad:
        number = range(self._count)[index]
        while len(self._taken) <= number:
            self._taken.append(self._take(len(self._taken)))
        return self._taken[number]

    def __iter__(self) -> Iterator[ReducedGrad]:
        return (self[number] for number in range(self._count))

    def clear(self) -> None:
        """Release the gradients, whose memory is about to be replaced."""
        self._taken.clear()
        self._count = 0
