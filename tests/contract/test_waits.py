"""The time that ranks wait for gradients, on a CPU by the clock and on a GPU by events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.exchange import Exchange, Transfer, Waits
from megatron.parallel.groups import Group

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class WaitStream:
    """A device that is at `reached` of what it was given; each item takes it a millisecond."""

    def __init__(self) -> None:
        self.given = self.reached = 0

    def event(self) -> WaitEvent:
        return WaitEvent(self)


class WaitEvent:
    def __init__(self, stream: WaitStream) -> None:
        self._stream = stream
        self._at: int | None = None

    def record(self) -> None:
        assert self._at is None, "recorded once"
        self._at = self._stream.given

    def query(self) -> bool:
        assert self._at is not None
        return self._at <= self._stream.reached

    def elapsed_time(self, end_event: WaitEvent) -> float:
        assert self._at is not None and end_event._at is not None
        assert self.query() and end_event.query(), "the host would wait"
        return float(end_event._at - self._at)


def test_on_a_cpu_the_host_waits() -> None:
    waits = Waits()
    with waits.on(CPU):
        time.sleep(0.02)
    assert 0.02 <= waits.take() < 2 and waits.take() == 0


def test_on_a_gpu_the_stream_does_and_is_asked_later() -> None:
    stream = WaitStream()
    waits = Waits(stream.event)
    for milliseconds in (3, 5, 7):
        with waits.on(GPU):
            stream.given += milliseconds
        stream.given += 100  # what is computed in between
    assert waits.take() == 0
    stream.reached = 2
    assert waits.take() == 0
    stream.reached = 3 + 100 + 5
    assert waits.take() == pytest.approx(0.008) and waits.take() == 0
    stream.reached = stream.given
    assert waits.take() == pytest.approx(0.007)


class LateWork:
    """A collective that takes a stream ten milliseconds."""

    def __init__(self, stream: WaitStream) -> None:
        self._stream = stream

    def wait(self) -> None:
        self._stream.given += 10


def test_the_dense_path_tells_of_the_stream_a_step_later() -> None:
    stream = WaitStream()
    reducer = AllReduceReducer(exchange := Exchange(Group((0, 1), 0)))
    exchange.waits = Waits(stream.event)
    values: Any = SimpleNamespace(device=GPU)

    def steps() -> Iterator[float]:
        while True:
            late: Any = LateWork(stream)
            Transfer(values, [late], exchange).wait()
            yield reducer.stats().wait_seconds
            stream.reached = stream.given

    told = steps()
    assert [next(told) for _ in range(3)] == pytest.approx([0, 0.01, 0.01])
