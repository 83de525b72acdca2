"""Tests that streams and events order copies and updates, without a GPU.

Of any two accesses to the same memory, one of them a write, the second waits for the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron.optimizer import cpu_offload
from megatron.optimizer.cpu_offload import CudaLanes
from megatron.optimizer.update_rules import AdamW
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import DSR, RANDOM, PathCase, Toy, gradients

ALONE = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)


class LaneStream:
    """A vector clock of the operations known to be done on a stream, or by the host."""

    def __init__(self, device: object = None) -> None:
        self.device, self.clock = device, dict[int, int]()

    def tick(self) -> dict[int, int]:
        self.learn(HOST.clock)  # an operation starts with the host's knowledge
        self.clock[id(self)] = self.clock.get(id(self), 0) + 1
        return dict(self.clock)

    def learn(self, clock: dict[int, int]) -> None:
        for stream, time in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def wait_event(self, event: LaneEvent) -> None:
        self.learn(event.clock)

    def wait_stream(self, other: LaneStream) -> None:
        self.learn(other.clock)

    def synchronize(self) -> None:
        HOST.learn(self.clock)


class LaneEvent:
    def __init__(self) -> None:
        self.clock = dict[int, int]()

    def record(self, stream: LaneStream) -> None:
        self.clock = dict(stream.clock)


HOST = LaneStream()


@dataclass
class Access:
    start: int
    stop: int
    writes: bool
    stream: int
    clock: dict[int, int]

    def needs(self, earlier: Access) -> bool:
        """Return whether this access has to come after the earlier one."""
        overlap = earlier.start < self.stop and self.start < earlier.stop
        return overlap and (self.writes or earlier.writes)

    def follows(self, earlier: Access) -> bool:
        return self.clock.get(earlier.stream, 0) >= earlier.clock[earlier.stream]


class LaneMachine:
    """Streams of one device that record who reads and writes which memory, and when."""

    def __init__(self) -> None:
        self.current = LaneStream()
        self.seen: list[Access] = []
        self.races = self.pairs = 0

    @contextmanager
    def on(self, stream: LaneStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def touch(self, tensors: Sequence[torch.Tensor], *, writes: bool, stream: LaneStream) -> None:
        clock = stream.tick()
        for tensor in tensors:
            at = tensor.data_ptr()
            access = Access(at, at + tensor.nbytes, writes, id(stream), clock)
            pairs = [other for other in self.seen if access.needs(other)]
            self.pairs += len(pairs)
            self.races += sum(not access.follows(other) for other in pairs)
            self.seen.append(access)

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self.touch(sources, writes=False, stream=self.current)
        self.touch(targets, writes=True, stream=self.current)
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


class WatchedLanes(AdamW):
    """An update rule whose reads and writes the machine records."""

    def watch(self, machine: LaneMachine) -> WatchedLanes:
        object.__setattr__(self, "machine", machine)
        return self

    def apply(
        self, weight: Any, grad: Any, moments: Any, hyper: Any, steps_accumulated: Any = None
    ) -> None:
        machine: LaneMachine = self.machine  # type: ignore[attr-defined]
        machine.touch([weight, *moments], writes=True, stream=machine.current)
        super().apply(weight, grad, moments, hyper, steps_accumulated)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> LaneMachine:
    made = LaneMachine()
    monkeypatch.setattr(torch.cuda, "Stream", LaneStream)
    monkeypatch.setattr(torch.cuda, "Event", LaneEvent)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(cpu_offload, "_copy", made.copy)
    return made


def steps(machine: LaneMachine, *, cap: int, size: int) -> None:
    """Run steps of a network that is rewired in between; the host reads and loads states."""
    case = PathCase("samo", RANDOM | DSR, offloaded=True)
    rule = WatchedLanes(beta1=0.9, beta2=0.99, eps=1e-8).watch(machine)
    toy = Toy(ALONE, case, dtype=torch.bfloat16, grad_dtype=torch.bfloat16, cap=cap, rule=rule)
    optimizer: Any = toy.optimizer
    optimizer._chunk = size
    optimizer._size_scratch()
    optimizer._lanes = CudaLanes(torch.device("cpu"))
    for number in range(5):
        toy.backward([gradients(number)])
        step = toy.finish()
        toy.optimizer.step(step, lr=1e-2, weight_decay=0.1)
        toy.engine.commit(step)
        if number == 3:
            states = [t for s in optimizer.states for t in (s.master, *s.moments)]
            machine.touch(states, writes=True, stream=HOST)
            optimizer.finish_load()


@pytest.mark.parametrize(("cap", "size"), [(1024, 192), (1, 64), (1 << 20, 1 << 20)])
def test_what_touches_the_same_memory_is_in_order(
    machine: LaneMachine, cap: int, size: int
) -> None:
    steps(machine, cap=cap, size=size)
    assert machine.pairs > 50 and machine.races == 0


@pytest.mark.parametrize("forgotten", ["wait_event", "synchronize"])
def test_a_wait_that_is_left_out_is_a_race(
    machine: LaneMachine, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    monkeypatch.setattr(LaneStream, forgotten, lambda *args: None)
    steps(machine, cap=1024, size=192)
    assert machine.races
