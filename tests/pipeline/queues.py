"""Devices whose work queues block, and ranks that issue a pipeline's work to them.

A CUDA device has a few work queues (CUDA_DEVICE_MAX_CONNECTIONS), to which streams are assigned in
turn. An operation begins at the head of its queue when its predecessor in the stream is done; until
then it blocks the whole queue, including other streams. An NCCL transfer is done when both ends are
in it, a collective when all ranks are. A first launch that loads its kernel makes the host wait
until the device is idle: so do Triton's kernels, and with CUDA_MODULE_LOADING=LAZY also torch's.

Nothing is computed: the work issued by the project's runner and transport is recorded and played.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megatron.pipeline.runner import Pipeline
from megatron.pipeline.schedule import StagePosition
from megatron.pipeline.transport import GroupTransport
from megatron.timers import Timers

COMPUTE = "compute"
META = torch.device("meta")


class QueueEvent(NamedTuple):
    """The end of the `number`-th operation of a stream."""

    stream: str
    number: int


class QueuedLaunch(NamedTuple):
    """A kernel of torch or of Triton (`compiled`), or an allocation.

    `first`: the first launch on this device. `waits`: the host waits for the device in any case, as
    an allocation does on a device without free memory.
    """

    stream: str
    name: str
    first: bool
    compiled: bool = False
    waits: bool = False


class Meeting(NamedTuple):
    """An operation that is done when all `ranks` are in it, identified by `key` and a count."""

    stream: str
    key: Hashable
    ranks: tuple[int, ...]


class StreamWait(NamedTuple):
    """An entry that delays later operations of the stream until the event."""

    stream: str
    event: QueueEvent


class HostWait(NamedTuple):
    """An entry at which the host stops until the event."""

    event: QueueEvent


Entry = QueuedLaunch | Meeting | StreamWait | HostWait


class Recorder:
    """A list of the operations that the host of one rank issues."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._issued: Counter[str] = Counter()
        self._launched: set[str] = set()

    def launch(self, name: str, *, compiled: bool = False) -> None:
        self._issued[COMPUTE] += 1
        self.entries.append(QueuedLaunch(COMPUTE, name, name not in self._launched, compiled))
        self._launched.add(name)

    def meet(self, stream: str, key: Hashable, ranks: Sequence[int]) -> QueueEvent:
        """Issue a transfer after all work in the compute stream, as ProcessGroupNCCL does."""
        self.entries.append(StreamWait(stream, self._last(COMPUTE)))
        self._issued[stream] += 1
        self.entries.append(Meeting(stream, key, tuple(ranks)))
        return self._last(stream)

    def wait(self, event: QueueEvent) -> None:
        self.entries.append(StreamWait(COMPUTE, event))

    def host_waits(self) -> None:
        self.entries.append(HostWait(self._last(COMPUTE)))

    def _last(self, stream: str) -> QueueEvent:
        return QueueEvent(stream, self._issued[stream])


@dataclass
class RecordedEdge:
    """An edge of `megatron.parallel.groups.Edges` with its own communicator."""

    recorder: Recorder
    kind: str
    ranks: tuple[int, int]

    def send(self, tensor: torch.Tensor, **_: Any) -> Any:
        return self._begin()

    def receive(self, out: torch.Tensor, **_: Any) -> Any:
        return self._begin()

    def _begin(self) -> Any:
        sender, receiver = self.ranks
        name = f"{self.kind} {sender}>{receiver}"
        event = self.recorder.meet(name, name, self.ranks)
        return SimpleNamespace(wait=lambda: self.recorder.wait(event), is_completed=lambda: False)


def edges(recorder: Recorder, place: StagePosition) -> Any:
    """Return the edges of the rank at a place, in the form of `megatron.parallel.groups.Edges`."""
    rank, up, down = place.stage, (place.stage + 1) % place.stages, (place.stage - 1) % place.stages
    return SimpleNamespace(
        activations_in=RecordedEdge(recorder, "activations", (down, rank)),
        activations_out=RecordedEdge(recorder, "activations", (rank, up)),
        gradients_in=RecordedEdge(recorder, "gradients", (up, rank)),
        gradients_out=RecordedEdge(recorder, "gradients", (rank, down)),
    )


@dataclass
class RecordedStage:
    """A stage of `chunks` chunks, each pass of which launches its own kernels.

    A chunk's first gradient of a step is copied, later ones are added.
    """

    recorder: Recorder
    place: StagePosition
    chunks: Sequence[Any] = (SimpleNamespace(device=META),)
    evaluates: bool = False
    accumulated: set[int] = field(default_factory=set)

    def names(self, chunk: int) -> tuple[str, ...]:
        return ()

    def forward(self, *_: Any, chunk: int) -> torch.Tensor:
        self._launch("evaluation" if self.evaluates else "forward", chunk)
        return torch.empty(() if self.place.is_last(chunk) else (1,), device=META)

    def backward(self, *_: Any, chunk: int) -> torch.Tensor:
        self._launch("backward", chunk)
        self.recorder.launch(f"{'add' if chunk in self.accumulated else 'copy'} of chunk {chunk}")
        self.accumulated.add(chunk)
        return torch.empty(1, device=META)

    def _launch(self, what: str, chunk: int) -> None:
        self.recorder.launch(f"{what} of chunk {chunk}")
        self.recorder.launch(f"compiled {what} of chunk {chunk}", compiled=True)


def record(
    place: StagePosition,
    microbatches: int,
    *,
    steps: int = 2,
    transport: Callable[..., GroupTransport] = GroupTransport,
) -> list[Entry]:
    """Return what one rank issues in `steps` training steps, each followed by an evaluation."""
    recorder = Recorder()
    stage = RecordedStage(recorder, place)
    carrier = transport(edges(recorder, place), shape=(1,), dtype=torch.float32, device=META)
    empty = carrier._empty

    def allocated() -> torch.Tensor:
        recorder.launch("allocation")
        return empty()

    carrier._empty = allocated  # type: ignore[method-assign]
    pipeline = Pipeline(
        stage=stage,  # type: ignore[arg-type]
        place=place,
        transport=carrier,
        engine=SimpleNamespace(expect_last_backward=lambda names: None),  # type: ignore[arg-type]
        timers=Timers(0),
        at=lambda phase: None,
    )
    batches: Any = [SimpleNamespace(index=number) for number in range(microbatches)]
    for _ in range(steps):
        stage.evaluates = False
        stage.accumulated.clear()
        pipeline.forward_backward(batches, iteration=1, scale=1.0)
        recorder.launch("norm")
        recorder.host_waits()
        pipeline.wait_for_sends()
        recorder.wait(recorder.meet("world", "all-reduce", range(place.stages)))
        recorder.launch("optimizer")
        stage.evaluates = True
        pipeline.forward(batches, iteration=1)
        recorder.launch("loss")
        recorder.host_waits()
    return recorder.entries


@dataclass
class QueueDevice:
    """A device and its host, part way through the entries.

    `lazy`: CUDA loads torch's kernels at their first launch; Triton's are always loaded then.
    `drawn` draws the queue of each stream, since earlier streams may shift the assignment.
    """

    rank: int
    entries: Sequence[Entry]
    connections: int
    lazy: bool
    drawn: Random | None = None
    at: int = 0
    queues: list[deque[Entry]] = field(init=False)
    over: Counter[str] = field(default_factory=Counter)
    begun: Counter[Hashable] = field(default_factory=Counter)
    meetings: dict[tuple[Hashable, int], Meeting] = field(default_factory=dict)
    _assigned: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.connections)]

    @property
    def is_idle(self) -> bool:
        return not self.meetings and not any(self.queues)

    @property
    def is_through(self) -> bool:
        return self.at == len(self.entries) and self.is_idle

    def issue(self) -> bool:
        """Run the host until it has to wait; return whether it did anything."""
        began = self.at
        while self.at < len(self.entries):
            entry = self.entries[self.at]
            if isinstance(entry, HostWait):
                if not self._passed(entry.event):
                    break
            elif isinstance(entry, QueuedLaunch) and self._waits(entry) and not self.is_idle:
                break
            else:
                self.queues[self._queue_of(entry.stream)].append(entry)
            self.at += 1
        return self.at > began

    def _waits(self, launch: QueuedLaunch) -> bool:
        return launch.waits or (launch.first and (self.lazy or launch.compiled))

    def _queue_of(self, stream: str) -> int:
        if stream not in self._assigned:
            drawn = self.drawn.randrange(self.connections) if self.drawn is not None else None
            turn = len(self._assigned) % self.connections
            self._assigned[stream] = turn if drawn is None else drawn
        return self._assigned[stream]

    def run(self) -> bool:
        """Begin all operations that can begin; return whether there was one."""
        moved = False
        for queue in self.queues:
            while queue and self._begins(queue[0]):
                queue.popleft()
                moved = True
        return moved

    def _begins(self, entry: Entry) -> bool:
        assert not isinstance(entry, HostWait)
        if any(meeting.stream == entry.stream for meeting in self.meetings.values()):
            return False
        if isinstance(entry, StreamWait):
            return self._passed(entry.event)
        if isinstance(entry, QueuedLaunch):
            self.over[entry.stream] += 1
        else:
            self.meetings[entry.key, self.begun[entry.key]] = entry
            self.begun[entry.key] += 1
        return True

    def _passed(self, event: QueueEvent) -> bool:
        return self.over[event.stream] >= event.number

    def finish(self, meeting: tuple[Hashable, int]) -> None:
        self.over[self.meetings.pop(meeting).stream] += 1

    def __str__(self) -> str:
        where = self.entries[self.at] if self.at < len(self.entries) else "all issued"
        heads = [queue[0] for queue in self.queues if queue]
        return f"rank {self.rank}: host at {where}; device in {list(self.meetings)}, next {heads}"


def play(
    traces: Sequence[Sequence[Entry]], *, connections: int, lazy: bool, seed: int | None = None
) -> list[str]:
    """Return the state of each rank that never finishes; `seed` draws the streams' queues."""
    devices = [
        QueueDevice(
            rank, trace, connections, lazy, None if seed is None else Random(f"{seed} {rank}")
        )
        for rank, trace in enumerate(traces)
    ]
    while any([device.issue() | device.run() for device in devices]) or _meet(devices):
        pass
    return [str(device) for device in devices if not device.is_through]


def _meet(devices: Sequence[QueueDevice]) -> bool:
    """End the meetings that all ranks have reached; return whether there was one."""
    moved = False
    for device in devices:
        for meeting, entry in list(device.meetings.items()):
            if all(meeting in devices[rank].meetings for rank in entry.ranks):
                for rank in entry.ranks:
                    devices[rank].finish(meeting)
                moved = True
    return moved
